"""Decides when a job is complete, and tells since when its last states are approximate."""

from __future__ import annotations

from mainstay_core.coordinator.events import Transition
from mainstay_core.coordinator.intake.facts import settle_all
from mainstay_core.coordinator.lineage import apply_finals
from mainstay_core.coordinator.publishing import end_job
from mainstay_core.coordinator.state import (
    CoordinatorState,
    all_settled,
    is_living,
    lost_members,
    still_joining,
)
from mainstay_core.job.phase import JobPhase


def is_finishing(state: CoordinatorState) -> bool:
    """Return whether some member of every position has applied the last step."""
    return len(state.finals) == len(state.shape.positions)


def decide_finishing(state: CoordinatorState, now_s: float) -> Transition:
    """Complete the job, once the members that can still finish by themselves have done so.

    A member that is gone sends no settle report any more: who has not settled in its plan is not
    waited for. Nor is a joiner, as all others may have gone on without it; but where they cannot
    have, the first member is, as it alone tells which forks the states contain.
    """
    assert state.plan is not None
    parked = state.suspicion.reporters if state.suspicion else ()
    stuck = bool(lost_members(state))
    tells = not state.is_history_told and _have_all_gone_on(state)
    unfinished = [
        m
        for m in state.plan.members
        if m.incarnation not in state.finished
        and is_living(state, m)
        and (not still_joining(state, m) or (m.index == 0 and tells))
        and m.slot not in parked
        and not (stuck and m.index not in state.settled_at_s)
    ]
    if unfinished:
        return Transition(state=state)
    told = _tell_course(state, now_s)
    reason = f"all {state.shape.steps} steps are applied"
    return told.then(end_job(told.state, JobPhase.COMPLETE, reason))


def _tell_course(state: CoordinatorState, now_s: float) -> Transition:
    """Return the state that knows since when the job's last states are approximate.

    Trainers may finish before all have told that they go on, and before the commits that show it
    are read: as when no replica of the api was up meanwhile. In a lineage that an unplanned plan
    began, whoever has finished has gone on in it with all others. What the last states say of
    themselves counts in any case.
    """
    known = Transition(state=state)
    if _have_all_gone_on(state) and not all_settled(state):
        # The others went on when the last one did, as far as anybody has told.
        known = settle_all(state, max(state.settled_at_s.values(), default=now_s))
    return known.then(apply_finals(known.state))


def _have_all_gone_on(state: CoordinatorState) -> bool:
    """Return whether whoever finishes proves that all others have gone on in the plan with it."""
    return state.plan is not None and state.plan.lineage > 0 and not state.plan.planned
