"""The coordinator's state machine: one table says which event each phase accepts.

``step(state, event, now_s, nonce)`` is the only maker of plans (protocol section 8). A shell reads
the state, calls ``step``, and compares and sets the result in the store. A shell that loses this
race reads again. An event that the table does not list raises and changes nothing. After an event
is noted, the decider of the phase looks at the whole state.

    forming --START--> running <--settled / MASK, RE-FORM, RESTART--> recovering
    running, recovering --no row applies--> waiting --RESTART--> recovering
    any --> complete | failed | stopped
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.coordinator.backoff import clear_failures
from mainstay_core.coordinator.checkpoints import note_checkpoint, note_reached
from mainstay_core.coordinator.events import (
    DrainRequested,
    Event,
    FactsReported,
    FaultFired,
    FaultsRequested,
    JobSubmitted,
    PlanReported,
    PlanStored,
    PodRegistered,
    RecordRecovery,
    ScaleRequested,
    StepsCommitted,
    StopRequested,
    StoreReopened,
    SuspendRequested,
    Tick,
    TopologyReported,
    Transition,
)
from mainstay_core.coordinator.injection import inject_into_spares, record_fired, request_faults
from mainstay_core.coordinator.intake import (
    lose_pod,
    note_facts,
    note_pod,
    note_silence,
    settle_all,
)
from mainstay_core.coordinator.leaving import leaving_members, note_drain, outgoing_died
from mainstay_core.coordinator.pruning import prune_gone_pods
from mainstay_core.coordinator.publishing import end_job
from mainstay_core.coordinator.records import close_known, plan_stored, step_committed
from mainstay_core.coordinator.recovery import (
    decide_forming,
    decide_running,
    decide_suspended,
    decide_waiting,
)
from mainstay_core.coordinator.scaling import note_scale
from mainstay_core.coordinator.state import (
    COMMITS_THAT_SETTLE,
    MAX_STEP_SECONDS,
    CoordinatorState,
    all_settled,
    uid_of,
)
from mainstay_core.coordinator.store_recovery import (
    drop_let_go,
    note_heard,
    note_plan,
    note_unheard,
    reopen,
)
from mainstay_core.coordinator.submission import note_submission, note_topology
from mainstay_core.coordinator.suspension import note_suspend
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import TERMINAL, JobPhase
from mainstay_core.wire.facts import Checkpoint, PodGone


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
        return learnt  # a plan that was restored: what follows from it is the next event's
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


def _on_registered(state: CoordinatorState, event: PodRegistered, now_s: float) -> Transition:
    known = note_pod(prune_gone_pods(state), event.registration, now_s)
    return replace(known, state=note_heard(known.state, (event.registration.pod,)))


def _on_facts(state: CoordinatorState, event: FactsReported, now_s: float) -> Transition:
    known = note_facts(state, event.facts, now_s, event.supervisor)
    return replace(known, state=note_heard(known.state, {fact.pod for fact in event.facts}))


def _on_tick(state: CoordinatorState, event: Tick, now_s: float) -> Transition:
    known = note_silence(drop_let_go(state), event.behind_s, now_s)
    heard = note_heard(note_unheard(known.state, event.behind_s), event.heard)
    return replace(known, state=heard)


def _on_stop(state: CoordinatorState, event: StopRequested, now_s: float) -> Transition:
    del now_s
    return end_job(state, JobPhase.STOPPED, f"{event.who} asked for it")


def _on_committed(state: CoordinatorState, event: StepsCommitted, now_s: float) -> Transition:
    """Note a committed step: it is progress, and it proves that the members of its quorum work."""
    del now_s
    plan = state.plan
    assert plan is not None
    if event.quorum.id < state.restarted_id:
        state = note_reached(state, event.step + 1)
        return Transition(state=state, reason=f"step {event.step} was undone by a restart")
    if event.quorum.id > plan.quorum.id:
        raise RemoteProtocolError(f"{event.quorum} is newer than the plan, {plan.quorum}")
    seconds = (*state.step_seconds, event.step_s)[-MAX_STEP_SECONDS:]
    first = event.quorum == plan.quorum and state.commits == 0
    # The first commit of a quorum says where it stands: after a restart that is further back.
    committed = event.step + 1 if first else max(state.step, event.step + 1)
    state = replace(state, step=committed, step_seconds=seconds)
    result = Transition(state=state, reason=f"step {event.step} is committed in {event.quorum}")
    if event.quorum == plan.quorum:
        result = result.then(_quorum_works(state, event.committed_at_s))
    state, closed = close_known(step_committed(result.state, event.quorum, event.committed_at_s))
    recorded = tuple(RecordRecovery(recovery=r) for r in closed)
    return result.then(Transition(state=state, actions=recorded))


def _quorum_works(state: CoordinatorState, at_s: float) -> Transition:
    """Clear all suspicions: every member of the current quorum voted for a step."""
    assert state.plan is not None
    state = clear_failures(state)
    state = replace(state, suspected_before=(), reforms=0, commits=state.commits + 1)
    if state.commits >= COMMITS_THAT_SETTLE and not all_settled(state):
        return settle_all(state, at_s)
    return Transition(state=state)


def _on_stored(state: CoordinatorState, event: PlanStored, now_s: float) -> Transition:
    del now_s
    state = plan_stored(state, event.quorum, event.at_s)
    changed = [o.recovery for o in state.recoveries if o.recovery.quorum == event.quorum]
    return Transition(
        state=state,
        actions=tuple(RecordRecovery(recovery=r) for r in changed),
        reason=f"{event.quorum} is durable",
    )


def _on_late_commit(state: CoordinatorState, event: StepsCommitted, now_s: float) -> Transition:
    """Note a commit of an ended job.

    The ledger's last entries may arrive after its last trainer left.
    """
    if state.phase is not JobPhase.COMPLETE:
        return _ignore(state, event, now_s)
    state = replace(state, step=max(state.step, event.step + 1))
    state, closed = close_known(step_committed(state, event.quorum, event.committed_at_s))
    return Transition(
        state=state,
        actions=tuple(RecordRecovery(recovery=r) for r in closed),
        reason=f"step {event.step} is committed in {event.quorum}, told late",
    )


def _on_settling_facts(state: CoordinatorState, event: FactsReported, now_s: float) -> Transition:
    """Note facts about a suspended job: only gone pods and durable checkpoints are news."""
    known = {uid_of(p) for p in state.pods}
    result = Transition(state=state, reason="the job is suspended")
    for fact in (f for f in event.facts if f.pod in known):
        if isinstance(fact, Checkpoint):
            result = result.then(note_checkpoint(result.state, fact, now_s))
        elif isinstance(fact, PodGone):
            at_s = fact.observed_at_s or now_s
            result = result.then(lose_pod(result.state, fact.pod, fact.evidence, at_s, now_s))
    return result


def _on_suspended_commit(
    state: CoordinatorState, event: StepsCommitted, now_s: float
) -> Transition:
    """Note a commit of a suspended job.

    The ledger's last entries may arrive after its trainers left.
    """
    del now_s
    if state.plan is None or event.quorum.id > state.plan.quorum.id:
        raise RemoteProtocolError(f"a job that is {state.phase} accepts no StepsCommitted")
    state = replace(state, step=max(state.step, event.step + 1))
    return Transition(state=state, reason=f"step {event.step} was committed, told late")


def _ignore(state: CoordinatorState, event: Event, now_s: float) -> Transition:
    del event, now_s
    return Transition(state=state, reason=f"the job is {state.phase}")


_Handler = Callable[[CoordinatorState, Any, float], Transition]

_ALWAYS: dict[type, _Handler] = {
    PodRegistered: _on_registered,
    FactsReported: _on_facts,
    Tick: _on_tick,
    StopRequested: _on_stop,
    FaultsRequested: request_faults,
    ScaleRequested: note_scale,
    JobSubmitted: note_submission,
    SuspendRequested: note_suspend,
    TopologyReported: note_topology,
    DrainRequested: note_drain,
    PlanReported: note_plan,
    StoreReopened: reopen,
}
_WITH_PLAN: dict[type, _Handler] = {
    **_ALWAYS,
    StepsCommitted: _on_committed,
    FaultFired: record_fired,
    PlanStored: _on_stored,
}
_ENDED: dict[type, _Handler] = {
    PodRegistered: _on_registered,
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
    StepsCommitted: _on_late_commit,
}

_ACCEPTS: dict[JobPhase, dict[type, _Handler]] = {
    JobPhase.FORMING: {
        **_ALWAYS,
        StepsCommitted: _on_suspended_commit,
        PlanStored: _on_stored,
    },
    JobPhase.SUSPENDED: {
        **_ALWAYS,
        FactsReported: _on_settling_facts,
        StepsCommitted: _on_suspended_commit,
        PlanStored: _on_stored,
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
