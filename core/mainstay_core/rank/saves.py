"""Durable checkpoints, as the votes of a quorum speak of them (protocol section 10).

A version is written by one rank per position, in the background, so its parts
become safe at different steps. An attempt is named by (version, nonce of the
quorum in which it was copied): only parts of one attempt make a version. Every
rank reads the same statuses and comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import SaveStatus


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Attempt:
    """One writing of a version."""

    version: int
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """What a full set of statuses means."""

    safe: Attempt | None = None
    """Newest attempt of which every position has a safely written part."""
    busy: tuple[int, ...] = ()
    """Members that still write."""
    durable: int = 0
    """Newest complete version that anybody knows."""


def writer_of(plan: Plan, index: int) -> int:
    """Return the member that writes the part of a member's position: its lowest one."""
    return plan.position_members(plan.position_of(index))[0].index


def judge_saves(plan: Plan, statuses: Sequence[SaveStatus]) -> Saves:
    """Return what the statuses, one per member in index order, say together."""
    common: set[Attempt] | None = None
    for members in plan.positions:
        have = {
            Attempt(version=version, nonce=statuses[m.index].checkpoint_nonce)
            for m in members
            if (version := statuses[m.index].checkpoint_safe) is not None
        }
        common = have if common is None else common & have
    return Saves(
        safe=max(common) if common else None,
        busy=tuple(m.index for m in plan.members if statuses[m.index].checkpoint_busy),
        durable=max((s.durable for s in statuses), default=0),
    )
