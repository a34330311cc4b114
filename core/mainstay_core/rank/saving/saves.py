"""Reads from a quorum's votes how far durable checkpoints are (protocol section 10).

One rank of each position writes its part of a version, in the background. So the parts become safe
at different steps. An attempt is named by the version and by the quorum in which it was copied:
only parts of one attempt make a version. Every rank reads the same statuses and comes to the same
answer. A rank that others have given up may go on and write for a while: its attempts are older.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mainstay_core.base.ids import QuorumId
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import SaveStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt to write a version."""

    version: int
    nonce: str
    """As :func:`name_attempt` names its quorum."""

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: the newest attempt to write the newest version is the last."""
        return self.version, quorum_number(self.nonce), self.nonce


def name_attempt(quorum: QuorumId) -> str:
    """Return the nonce of the attempts whose parts are copied in a quorum."""
    return f"{quorum.id}_{quorum.nonce}"


def quorum_number(nonce: str) -> int:
    """Return the id of an attempt's quorum; 0 for one of the version before, which named none."""
    number, mark, _ = nonce.partition("_")
    return int(number) if mark and number.isascii() and number.isdecimal() else 0


def ends_attempt(nonce: str, other: str) -> bool:
    """Return whether an attempt that begins ends another one, whose parts nobody needs any more.

    It does if the other one is of its own quorum, or of an older one. Two quorums share an id after
    the store fell back to an older state, and neither is older: ranks that hold different ones
    would remove each other's parts. Both attempts stay, and the votes choose
    (:attr:`Attempt.order`).

    Args:
        nonce: of the attempt that begins.
        other: nonce of the other one.
    """
    return other == nonce or quorum_number(other) < max(1, quorum_number(nonce))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """The state of durable checkpoints, according to the statuses of all members."""

    safe: Attempt | None = None
    """Newest attempt of which every position has a safely written part."""
    busy: tuple[int, ...] = ()
    """Members that still write."""
    durable: int = 0
    """Newest durable version that any member knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outdated:
    """The versions on a disk that no settle can choose any more."""

    complete: int
    """Complete versions up to this one go, readable or not."""
    unfinished: int
    """Attempts to write a version up to this one go."""


def find_outdated(good: Iterable[int], keep: int) -> Outdated:
    """Return what is older than all versions that are kept.

    Args:
        good: complete versions that look readable. One that is torn is never kept.
        keep: number of versions to keep; with fewer of them nothing complete goes.
    """
    kept = sorted(good, reverse=True)[:keep]
    return Outdated(
        complete=min(kept) - 1 if len(kept) >= keep else -1,
        unfinished=max(kept, default=-1),
    )


def writer_of(plan: Plan, index: int) -> int:
    """Return the member that writes the part of a member's position: its first one."""
    return plan.position_members(plan.position_of(index))[0].index


def judge_saves(plan: Plan, statuses: Sequence[SaveStatus]) -> Saves:
    """Return what all statuses say together. There is one per member, in index order."""
    common: set[Attempt] | None = None
    for members in plan.positions:
        have = {
            Attempt(version=version, nonce=statuses[m.index].checkpoint_nonce)
            for m in members
            if (version := statuses[m.index].checkpoint_safe) is not None
        }
        common = have if common is None else common & have
    return Saves(
        safe=max(common, key=lambda a: a.order) if common else None,
        busy=tuple(m.index for m in plan.members if statuses[m.index].checkpoint_busy),
        durable=max((s.durable for s in statuses), default=0),
    )
