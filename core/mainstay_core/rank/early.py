"""Decides whether a cell's reduction begins while the last of its types is still computed.

What is sent then is the same, in the same order, only earlier: a cell that begins early and one
that does not reduce together. So each cell may decide for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from mainstay_core.planning.partials import covers, grow_all
from mainstay_core.rank.connections import GroupT, QuorumConnections
from mainstay_core.rank.state import RankState
from mainstay_core.rank.steps.step_plan import StepPlan, Supply
from mainstay_core.wire.plan import Partial, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStart:
    """The answer whether a reduction begins before all types of its cell are computed."""

    partial: Partial | None
    """The one that the last type completes, of which parts are sent as soon as they are there.
    None: the reduction begins when all types are computed."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyReduction(Generic[GroupT]):
    """A reduction to begin while the last type is computed."""

    group: GroupT
    """The position's members; it is connected."""
    table: tuple[Supply, ...]
    """Supplies in canonical order."""
    members: tuple[int, ...]
    """Indices of the position's members, in the group's order."""
    index: int
    """Of this member."""
    partial: Partial
    """The one that the last type completes."""


def early_start(
    plan: Plan,
    step: StepPlan,
    index: int,
    shards_per_lane: int,
    *,
    held: Sequence[Partial],
    connected: bool,
) -> EarlyStart:
    """Return whether a member's reduction begins while its last type is computed.

    A cell with inner ranks talks to them until its last weight gradient. On a transport that takes
    a rank's operations one after the other, an exchange between two of those could wait for ever.

    Args:
        plan: membership.
        step: who computes and supplies what.
        index: of the member.
        shards_per_lane: types of a lane.
        held: what it holds of the step.
        connected: whether the group of its position is connected.
    """
    chain = plan.chain_of(index)
    types = tuple(step.todo.get(chain.replica, ())) if chain is not None else ()
    if not types:
        return EarlyStart(partial=None, reason="this cell computes nothing")
    if held:
        return EarlyStart(partial=None, reason="this cell holds types of the step already")
    if plan.ranks_per_stage > 1:
        return EarlyStart(partial=None, reason="inner ranks communicate until the last gradient")
    table = step.table[plan.position_of(index)]
    supplied = tuple(sorted(supply.partial for supply in table if supply.index == index))
    if supplied != grow_all((), types, shards_per_lane):
        return EarlyStart(partial=None, reason="others supply some of what this cell computes")
    if not connected:
        return EarlyStart(partial=None, reason="the group of the position is not connected yet")
    (last,) = (partial for partial in supplied if covers(partial, types[-1]))
    return EarlyStart(partial=last, reason=f"parts of type {types[-1]} are sent as they are there")


def early_reduction(
    state: RankState, connections: QuorumConnections[Any, GroupT, Any], held: Sequence[Partial]
) -> EarlyReduction[GroupT] | None:
    """Return the reduction that a rank begins while it computes; None if it begins none.

    Args:
        state: of the rank, which is about to compute.
        connections: what it is connected to.
        held: what it holds of the step.
    """
    plan, step = state.plan, state.step_plan
    assert plan is not None
    assert step is not None
    group = connections.standing_stage_group(state.agreed_stage_group)
    start = early_start(
        plan,
        step,
        state.index,
        state.shards_per_lane,
        held=held,
        connected=group is not None,
    )
    if group is None or start.partial is None:
        return None
    return EarlyReduction(
        group=group,
        table=step.table[state.member_position],
        members=tuple(connections.stage_order()),
        index=state.index,
        partial=start.partial,
    )
