"""Takes in what pods, supervisors and the store report: one function for each kind of report.

Each returns the state with the report noted. None of them decides how the job goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.values import replace
from mainstay_core.coordinator.events import (
    FactsReported,
    PlanStored,
    PodRegistered,
    RecordRecovery,
    StepsCommitted,
    Tick,
    Transition,
)
from mainstay_core.coordinator.intake.backoff import clear_failures
from mainstay_core.coordinator.intake.checkpoints import note_checkpoint, note_reached
from mainstay_core.coordinator.intake.crashes import forget_overcome
from mainstay_core.coordinator.intake.ends import lose_pod
from mainstay_core.coordinator.intake.facts import note_facts, note_pod, settle_all
from mainstay_core.coordinator.intake.pruning import prune_gone_pods
from mainstay_core.coordinator.intake.silence import note_signs
from mainstay_core.coordinator.intake.store_recovery import drop_let_go, note_heard, note_unheard
from mainstay_core.coordinator.permission import take_used
from mainstay_core.coordinator.progress import lateness_s, note_commit
from mainstay_core.coordinator.records import (
    close_known,
    is_shown,
    plan_stored,
    step_committed,
)
from mainstay_core.coordinator.repeats import forget_mended
from mainstay_core.coordinator.situation import note_guards
from mainstay_core.coordinator.state import (
    COMMITS_THAT_SETTLE,
    CoordinatorState,
    all_settled,
    uid_of,
)
from mainstay_core.coordinator.taints import note_clean, note_gone
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Checkpoint, PodGone


def take_registration(state: CoordinatorState, event: PodRegistered, now_s: float) -> Transition:
    """Take a pod in, or know it again; it counts as heard."""
    known = note_pod(prune_gone_pods(state), event.registration, now_s)
    return replace(known, state=note_heard(known.state, (event.registration.pod,)))


def take_facts(state: CoordinatorState, event: FactsReported, now_s: float) -> Transition:
    """Take facts in; the pods that they are about count as heard."""
    known = note_facts(state, event.facts, now_s, event.supervisor)
    return replace(known, state=note_heard(known.state, {fact.pod for fact in event.facts}))


def take_tick(state: CoordinatorState, event: Tick, now_s: float) -> Transition:
    """Take in how long each pod has been silent, and who was heard."""
    state = note_signs(drop_let_go(state), event.behind_s, event.heard_at_s, now_s)
    known = note_silence(state, event.behind_s, now_s)
    heard = note_heard(note_unheard(known.state, event.behind_s), event.heard)
    return replace(known, state=heard)


def note_silence(
    state: CoordinatorState, behind_s: Mapping[str, float], now_s: float
) -> Transition:
    """Return the state without the pods that lag too far behind the job's newest heartbeat."""
    result = Transition(state=state)
    for pod in state.pods:
        behind = behind_s.get(uid_of(pod), 0.0)
        if not pod.gone and behind > state.config.heartbeat_timeout_s:
            why = f"silent for {behind:.1f} s while others were heard"
            lost = lose_pod(result.state, uid_of(pod), why, now_s, now_s, sure=False)
            result = result.then(lost)
    return result


def take_commit(state: CoordinatorState, event: StepsCommitted, now_s: float) -> Transition:
    """Note a committed step: it is progress, and it proves that the members of its quorum work."""
    del now_s
    plan = state.plan
    assert plan is not None
    if event.quorum.id < state.restarted_id:
        state = note_reached(note_commit(state, event), event.step + 1)
        return Transition(state=state, reason=f"step {event.step} was undone by a restart")
    if event.quorum.id > plan.quorum.id:
        raise RemoteProtocolError(f"{event.quorum} is newer than the plan, {plan.quorum}")
    first = event.quorum == plan.quorum and state.commits == 0
    state = note_clean(state, event.clean)
    # The first commit of a quorum says where it stands: after a restart that is further back.
    committed = event.step + 1 if first else max(state.step, event.step + 1)
    late_s = lateness_s(state, event)
    state = note_commit(forget_overcome(replace(state, step=committed)), event)
    result = Transition(state=state, reason=f"step {event.step} is committed in {event.quorum}")
    if event.quorum == plan.quorum:
        # After a store's recovery nobody says again at which step a plan was adopted.
        result = result.then(_quorum_works(note_gone(state, event.step), event.committed_at_s))
    state, closed = close_known(step_committed(result.state, event, late_s))
    recorded = tuple(RecordRecovery(recovery=r) for r in closed)
    return result.then(Transition(state=state, actions=recorded))


def _quorum_works(state: CoordinatorState, at_s: float) -> Transition:
    """Clear all suspicions: every member of the current quorum voted for a step."""
    assert state.plan is not None
    state = clear_failures(state)
    state = replace(state, suspected_before=(), reforms=0, commits=state.commits + 1)
    state = replace(state, unreached=False, asked=0, silent=())
    if state.commits == 1:
        state = note_guards(state)
    used = _use_permission(forget_mended(state))
    if state.commits >= COMMITS_THAT_SETTLE and not all_settled(used.state):
        return used.then(settle_all(used.state, at_s))
    return used


def _use_permission(state: CoordinatorState) -> Transition:
    """Return the state without the permission that the quorum which commits has had.

    Not all facts that its members go on may have come yet. A job that waits may hear late of a
    commit from before its permission, which is still to be used then, unless it was given ahead:
    then it is of a plan before.
    """
    plan, given = state.plan, state.permission
    assert plan is not None
    waits = state.phase is JobPhase.WAITING and (plan.fork is None or all_settled(state))
    is_later = waits and given is not None and not given.is_ahead
    return Transition(state=state) if is_later else take_used(state)


def take_stored(state: CoordinatorState, event: PlanStored, now_s: float) -> Transition:
    """Note that a plan is stored, in the records of its recoveries."""
    del now_s
    state = plan_stored(state, event.quorum, event.at_s)
    opened = [o for o in state.recoveries if o.recovery.quorum == event.quorum]
    changed = [o.recovery for o in opened if is_shown(o)]
    return Transition(
        state=state,
        actions=tuple(RecordRecovery(recovery=r) for r in changed),
        reason=f"{event.quorum} is stored",
    )


def take_late_commit(state: CoordinatorState, event: StepsCommitted, now_s: float) -> Transition:
    """Count the ledger's last entries when they come after the last trainer's goodbye."""
    del now_s
    if state.phase is not JobPhase.COMPLETE:
        return Transition(state=state, reason=f"the job is {state.phase}")
    late_s = lateness_s(state, event)
    state = note_commit(replace(state, step=max(state.step, event.step + 1)), event)
    state, closed = close_known(step_committed(state, event, late_s))
    return Transition(
        state=state,
        actions=tuple(RecordRecovery(recovery=r) for r in closed),
        reason=f"step {event.step} is committed in {event.quorum}, told late",
    )


def take_last_facts(state: CoordinatorState, event: FactsReported, now_s: float) -> Transition:
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


def take_commit_before_suspension(
    state: CoordinatorState, event: StepsCommitted, now_s: float
) -> Transition:
    """Note a commit of a suspended job.

    The ledger's last entries may arrive after its trainers left.
    """
    del now_s
    if state.plan is None or event.quorum.id > state.plan.quorum.id:
        raise RemoteProtocolError(f"a job that is {state.phase} accepts no StepsCommitted")
    state = note_commit(replace(state, step=max(state.step, event.step + 1)), event)
    return Transition(state=state, reason=f"step {event.step} was committed, told late")
