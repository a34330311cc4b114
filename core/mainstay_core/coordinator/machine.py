"""The coordinator's state machine: one table says which event each phase accepts.

``step(state, event, now_s, nonce)`` is the only maker of plans (protocol section 8). A shell reads
the state, calls ``step``, and compares and sets the result in the store. A shell that loses this
race reads again. An event that the table does not list raises and changes nothing. After an event
is noted, the decider of the phase looks at the whole state.

    forming --START--> running <--settled / MASK, RE-FORM, REPLAY, RESTART--> recovering
    running, recovering --no row applies--> waiting --REPLAY, RESTART--> recovering
    any --> complete | failed | stopped
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.coordinator.events import (
    ApproximationAllowed,
    ApproximationWithdrawn,
    DrainRequested,
    Event,
    FactsReported,
    FaultFired,
    FaultsRequested,
    JobSubmitted,
    PlanReported,
    PlanStored,
    PodRegistered,
    ScaleRequested,
    StepsCommitted,
    StopRequested,
    StoreReopened,
    SuspendRequested,
    Tick,
    TopologyReported,
    Transition,
)
from mainstay_core.coordinator.forming import decide_forming
from mainstay_core.coordinator.injection import inject_into_spares, record_fired, request_faults
from mainstay_core.coordinator.intake.reports import (
    take_commit,
    take_commit_before_suspension,
    take_facts,
    take_last_facts,
    take_late_commit,
    take_registration,
    take_stored,
    take_tick,
)
from mainstay_core.coordinator.intake.store_recovery import (
    note_plan,
    reopen,
)
from mainstay_core.coordinator.leaving import leaving_members, note_drain, outgoing_died
from mainstay_core.coordinator.permission import note_permission, note_withdrawal
from mainstay_core.coordinator.publishing import end_job
from mainstay_core.coordinator.recovery import decide_running, decide_suspended, decide_waiting
from mainstay_core.coordinator.scaling import note_scale
from mainstay_core.coordinator.state import (
    CoordinatorState,
)
from mainstay_core.coordinator.submission import note_submission, note_topology
from mainstay_core.coordinator.suspension import note_suspend
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import TERMINAL, JobPhase


def initial(config: JobConfig, now_s: float) -> CoordinatorState:
    """Return the state of a job that no pod has joined yet."""
    phase = JobPhase.SUSPENDED if config.suspend else JobPhase.FORMING
    return CoordinatorState(config=config, phase=phase, created_at_s=now_s, suspend=config.suspend)


def step(state: CoordinatorState, event: Event, now_s: float, nonce: str) -> Transition:
    """Return what follows from ``event``.

    Args:
        state: what is known.
        event: what was learnt.
        now_s: wall clock of the caller, only for deadlines and records.
        nonce: random name for the plan, if one is made.

    Raises:
        RemoteProtocolError: the phase or the job does not accept the event.
    """
    handler = _TABLE.get((state.phase, type(event)))
    if handler is None:
        raise RemoteProtocolError(f"a job that is {state.phase} accepts no {type(event).__name__}")
    learnt = handler(state, event, now_s)
    if learnt.state.terminal:
        return learnt
    if learnt.state.outcome:
        return learnt.then(end_job(learnt.state, JobPhase.FAILED, learnt.state.outcome))
    if learnt.state.unheard or learnt.plan is not None:
        return learnt  # a plan that was recovered: what follows from it is the next event's
    decided = learnt.then(_DECIDE[learnt.state.phase](learnt.state, now_s, nonce))
    if decided.state.terminal or decided.state.plan is None:
        return decided
    return decided.then(inject_into_spares(decided.state))


def is_pending(state: CoordinatorState) -> bool:
    """Return whether a decision waits for time to pass, so that ticks should be frequent."""
    if state.terminal or state.phase is JobPhase.SUSPENDED:
        return False
    if state.phase is not JobPhase.RUNNING or state.suspicion is not None or state.unheard:
        return True
    if leaving_members(state) or outgoing_died(state):
        return True
    if state.plan is not None and (state.suspend or state.plan.pause):
        return True
    return state.plan is not None and len(state.plan.chains) != state.wanted


def _on_stop(state: CoordinatorState, event: StopRequested, now_s: float) -> Transition:
    del now_s
    return end_job(state, JobPhase.STOPPED, f"{event.who} asked for it")


def _ignore(state: CoordinatorState, event: Event, now_s: float) -> Transition:
    del event, now_s
    return Transition(state=state, reason=f"the job is {state.phase}")


_Handler = Callable[[CoordinatorState, Any, float], Transition]

_ALWAYS: dict[type, _Handler] = {
    PodRegistered: take_registration,
    FactsReported: take_facts,
    Tick: take_tick,
    StopRequested: _on_stop,
    FaultsRequested: request_faults,
    ScaleRequested: note_scale,
    JobSubmitted: note_submission,
    SuspendRequested: note_suspend,
    TopologyReported: note_topology,
    DrainRequested: note_drain,
    PlanReported: note_plan,
    StoreReopened: reopen,
    ApproximationAllowed: note_permission,
    ApproximationWithdrawn: note_withdrawal,
}
_WITH_PLAN: dict[type, _Handler] = {
    **_ALWAYS,
    StepsCommitted: take_commit,
    FaultFired: record_fired,
    PlanStored: take_stored,
}
_ENDED: dict[type, _Handler] = {
    PodRegistered: take_registration,
    **dict.fromkeys(
        (
            FactsReported,
            Tick,
            StopRequested,
            PlanStored,
            PlanReported,
            JobSubmitted,
            SuspendRequested,
            TopologyReported,
        ),
        _ignore,
    ),
    StoreReopened: reopen,
    StepsCommitted: take_late_commit,
    ApproximationAllowed: note_permission,
    ApproximationWithdrawn: note_withdrawal,
}

_ACCEPTS: dict[JobPhase, dict[type, _Handler]] = {
    JobPhase.FORMING: {
        **_ALWAYS,
        StepsCommitted: take_commit_before_suspension,
        PlanStored: take_stored,
    },
    JobPhase.SUSPENDED: {
        **_ALWAYS,
        FactsReported: take_last_facts,
        StepsCommitted: take_commit_before_suspension,
        PlanStored: take_stored,
    },
    JobPhase.RUNNING: _WITH_PLAN,
    JobPhase.RECOVERING: _WITH_PLAN,
    JobPhase.WAITING: _WITH_PLAN,
    **dict.fromkeys(sorted(TERMINAL), _ENDED),
}
_TABLE: dict[tuple[JobPhase, type], _Handler] = {
    (phase, kind): handler
    for phase, handlers in _ACCEPTS.items()
    for kind, handler in handlers.items()
}
"""The transitions: for each phase, the events that it accepts and their handlers."""

_DECIDE: dict[JobPhase, Callable[[CoordinatorState, float, str], Transition]] = {
    JobPhase.FORMING: decide_forming,
    JobPhase.RUNNING: decide_running,
    JobPhase.RECOVERING: decide_running,
    JobPhase.WAITING: decide_waiting,
    JobPhase.SUSPENDED: decide_suspended,
}
