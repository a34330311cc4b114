"""Decides what each maker of a lost position copies, and from which members."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.rank.forks.guard_copies import LeftGuards
from mainstay_core.rank.forks.histories import history_at
from mainstay_core.rank.serving import CopyOrder, Wanted, sources_of
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import (
    Fork,
    History,
    MadePosition,
    OptimizerState,
    SourceKind,
)
from mainstay_core.wire.votes import SettleReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A position of another stage whose parameters a maker copies."""

    position: int
    """Its number."""
    members: tuple[int, ...]
    """Members that have them, best first."""
    expected: str
    """Digest of its masters; "" if no report names one, or if they name several."""
    guarded: int | None = None
    """The end whose blocks they guard, with the optimizer's state, if these are copied instead."""
    whole: bool = False
    """Whether the optimizer's state is copied, too."""

    def wanted(self, quorum: str, version: int) -> Wanted:
        """Return what its members are asked for in a quorum."""
        masters_only = self.guarded is None and not self.whole
        return Wanted(quorum, self.position, version, masters_only, self.guarded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """The work of one member that makes its position anew."""

    made: MadePosition
    beside: tuple[Beside, ...]
    """The positions that it copies, ascending."""
    stale: int | None = None
    """The version of its own that it loads; None: it is made of others."""
    stale_history: History = ()
    """Forks that this version contains."""
    keeps_own: bool = False
    """Whether what guards would give is as it has it itself: nobody was lost, and nobody guards."""


def copy_orders(
    plan: Plan, reports: Sequence[SettleReport], beside: Sequence[Beside], version: int
) -> tuple[CopyOrder, ...]:
    """Return what a maker copies in a quorum, and from whom.

    Args:
        plan: of the quorum.
        reports: by member index.
        beside: the positions.
        version: at which all go on.
    """
    quorum = str(plan.quorum)
    return tuple(
        CopyOrder(sources_of(plan, reports, one.members), one.wanted(quorum, version), one.expected)
        for one in beside
    )


def plan_making(
    plan: Plan,
    fork: Fork,
    index: int,
    holders: Mapping[int, Sequence[int]],
    reports: Sequence[SettleReport],
    guards: Collection[LeftGuards] = (),
    history: History = (),
) -> Making:
    """Return what a member does to make its position anew.

    The members that hold a position beside are taken by turns, as each maker begins with another.

    Args:
        plan: that orders the fork.
        fork: that makes the member's position.
        index: of the member.
        holders: by number of a position, the members that will have the version without making it.
        reports: by member index.
        guards: whose copies of what ends alone have count.
        history: of all states with the fork.
    """
    width, position = plan.ranks_per_stage, plan.position_of(index)
    (made,) = [m for m in fork.made.positions if m.stage * width + m.inner == position]
    turn = [m.index for m in plan.position_members(position)].index(index)
    beside = []
    sources = [s for block in made.blocks for s in block.sources if not block.is_exact]
    stale = next((s.version for s in sources if s.kind is SourceKind.STALE_COPY), None)
    others = {s.stage * width + s.inner for s in sources if s.kind is not SourceKind.STALE_COPY}
    for other in sorted(others):
        members = tuple(holders[other])
        start = turn % len(members) if members else 0
        told = {reports[i].state for i in members if reports[i].version == fork.version}
        beside.append(
            Beside(
                position=other,
                members=members[start:] + members[:start],
                expected=told.pop() if len(told) == 1 else "",
                whole=made.optimizer_state is OptimizerState.AVERAGE,
            )
        )
    has_exact = any(block.is_exact for block in made.blocks)
    for left in guards:
        if left.end == made.stage and has_exact:
            start = turn % len(left.members)
            members = left.members[start:] + left.members[:start]
            beside.append(
                Beside(
                    position=left.stage * width,
                    members=members,
                    expected=left.masters,
                    guarded=left.end,
                )
            )
    return Making(
        made=made,
        beside=tuple(beside),
        stale=stale,
        stale_history=() if stale is None else history_at(history, stale),
        keeps_own=has_exact and all(left.end != made.stage for left in guards),
    )
