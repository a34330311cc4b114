"""Orders the forks of another run in a job that repeats its lineage."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mainstay_core.base.ids import Slot
from mainstay_core.coordinator import seating
from mainstay_core.coordinator.events import Transition
from mainstay_core.coordinator.publishing import end_job, publish
from mainstay_core.coordinator.records import open_suspicion
from mainstay_core.coordinator.seating import Draft
from mainstay_core.coordinator.state import CoordinatorState, all_settled
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.plan import Method
from mainstay_core.wire.reinitialisation import Fork
from mainstay_core.wire.repeated_lineage import problem_with_blocks, read_repeats

MAX_VAIN_ORDERS = 4
"""Bound on the orders of a fork that is made again, while no step is committed."""


def make_again(state: CoordinatorState, number: int, now_s: float, nonce: str) -> Transition:
    """Order the fork that is due in a job that repeats the lineage of another run."""
    forks = read_repeats(state.config)
    if number >= len(forks):
        reason = f"a trainer asks for fork {number + 1} of {len(forks)}"
        return end_job(state, JobPhase.FAILED, reason)
    opened_fork = _open_repeat(state)
    if opened_fork is not None and opened_fork != forks[number]:
        assert state.suspicion is not None
        if _have_settled(state, state.suspicion.reporters):
            # Who asks has made the fork before it, which others still make.
            return Transition(state=state)
        number = forks.index(opened_fork)
    problem = problem_with_blocks(forks[number], state.outline)
    if problem:
        reason = f"fork {number + 1} of the lineage to repeat is of another model: {problem}"
        return end_job(state, JobPhase.FAILED, reason)
    if _came_to_nothing(state, forks[number]):
        reason = (
            f"fork {number + 1} of the lineage to repeat was ordered {MAX_VAIN_ORDERS} times at "
            f"step {forks[number].version} and came to nothing: no guard has what it takes of them"
        )
        return end_job(state, JobPhase.FAILED, reason)
    reason = f"fork {number + 1} of {len(forks)} of the lineage that the job repeats"
    draft = Draft(method=Method.APPROXIMATE, planned=False, reason=reason, now_s=now_s, nonce=nonce)
    plan = seating.repeating_plan(state, draft, forks[number])
    opened = replace(open_suspicion(state, (), plan, reason), reforms=state.reforms + 1)
    return publish(opened, plan, JobPhase.RECOVERING)


def _came_to_nothing(state: CoordinatorState, fork: Fork) -> bool:
    """Return whether a fork of another run is asked for again and again, though all have settled.

    What it takes of guards they have no copy of, and get none before another step is computed.
    """
    order = state.plan.fork if state.plan is not None else None
    is_ordered = order is not None and order.repeats == fork
    return is_ordered and all_settled(state) and state.reforms >= MAX_VAIN_ORDERS


def _open_repeat(state: CoordinatorState) -> Fork | None:
    """Return the fork of another run that members are still making; None: there is none."""
    order = state.plan.fork if state.plan is not None else None
    return None if order is None or all_settled(state) else order.repeats


def _have_settled(state: CoordinatorState, slots: Collection[Slot]) -> bool:
    """Return whether all members in some slots have settled in the plan."""
    assert state.plan is not None
    return all(m.index in state.settled_at_s for m in state.plan.members if m.slot in slots)
