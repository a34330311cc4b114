"""Takes facts into the coordinator's state, before anything is decided.

Facts may come twice, late and in any order. Each fact is about one life of a trainer (its
incarnation). So a fact never changes what is known of an older or newer life, and a life that has
ended never comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.base.values import replace
from mainstay_core.coordinator.causes import Suspicion, ToldCause
from mainstay_core.coordinator.events import Announce, RecordRecovery, Transition
from mainstay_core.coordinator.fingerprints import difference_of, refusal
from mainstay_core.coordinator.intake.check_plans import note_checks
from mainstay_core.coordinator.intake.checkpoints import (
    note_checkpoint,
    note_how,
    note_reached,
    note_replayed,
    note_settled,
)
from mainstay_core.coordinator.intake.crashes import explain_end, keep_newest, note_crash
from mainstay_core.coordinator.intake.ends import end_all, end_slot, lose_pod, note_end
from mainstay_core.coordinator.intake.missed_flips import note_missed
from mainstay_core.coordinator.intake.refused_states import note_refused
from mainstay_core.coordinator.intake.silence import dated
from mainstay_core.coordinator.leaving import has_adopted, note_leaving, note_named, outgoing
from mainstay_core.coordinator.lineage import apply_told
from mainstay_core.coordinator.names import named_by_pod, slot_name
from mainstay_core.coordinator.permission import take_used
from mainstay_core.coordinator.records import close_known, how_replayed, plan_settled
from mainstay_core.coordinator.state import (
    CoordinatorState,
    PodState,
    SlotState,
    all_settled,
    has_left,
    with_pod,
    with_slot,
    with_slots,
)
from mainstay_core.coordinator.suspension import note_paused
from mainstay_core.coordinator.taints import (
    check_named,
    forget_clean,
    note_again,
    note_gone,
    with_reason,
)
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import (
    Adopted,
    Checkpoint,
    Checks,
    Fact,
    Failed,
    Finished,
    Leaving,
    Missed,
    Named,
    Parked,
    Paused,
    PodGone,
    PodRegistration,
    RankFact,
    Settled,
    StateRefused,
    TrainerDown,
    TrainerFact,
    TrainerUp,
)
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.plan import Member, Method

MAX_ASKS = 3
"""Bound on how often members meet again where not all is known of what pods keep in memory. Then
what is unknown counts as empty."""


class UnregisteredPodError(RemoteProtocolError):
    """A fact names a pod that is unknown or counts as gone. The pod has to register first."""


def note_pod(state: CoordinatorState, registration: PodRegistration, now_s: float) -> Transition:
    """Return the state with the pod registered.

    Another supervisor process on the same pod means that the old one's trainers have ended.

    Raises:
        RemoteProtocolError: it has more slots than a pod of the job has.
    """
    if registration.num_slots > state.shape.ranks_per_pod:
        bound = f"is more than parallelism.ranksPerPod, {state.shape.ranks_per_pod}"
        raise RemoteProtocolError(f"PodRegistration.num_slots: {registration.num_slots} {bound}")
    known = state.pod(registration.pod)
    placeholder = known is not None and known.placeholder
    here = known is not None and not (known.gone or placeholder)
    if known is not None and here and known.registration == registration:
        return Transition(state=state, reason="already registered")
    # A pod known from a recovered plan names no process: the first that registers is the old one.
    replaced = known is not None and (known.gone or _is_another(known.registration, registration))
    if replaced and not placeholder:
        lost_s = now_s if known is None else dated(state, known, now_s)
        state = end_all(state, registration.pod, "its supervisor was replaced", lost_s, now_s)
    # A pod that leaves goes on leaving, whatever becomes of its supervisor.
    pod = known if known is not None else PodState(registration=registration)
    pod = replace(
        pod,
        registration=registration,
        gone=False,
        why="",
        gone_at_s=0.0,
        silent_since_s=0.0,
        placeholder=False,
    )
    state = with_pod(state, with_reason(state, pod, now_s))
    slots = [Slot(pod=registration.pod, index=i) for i in range(registration.num_slots)]
    state = with_slots(state, [SlotState(slot=s) for s in slots if state.slot(s) is None])
    what = "registered" if known is None else "registered again"
    message = f"{registration.name} at {registration.address} {what}"
    if state.config.snapshots is not None and not registration.snapshots:
        message += "; it keeps no snapshots: it was started without memory for them"
    return Transition(
        state=state, actions=(Announce(code="PodRegistered", message=message),), reason=message
    )


def _is_another(old: PodRegistration, new: PodRegistration) -> bool:
    """Return whether the pod is supervised by another process than before."""
    return (old.pid, old.supervisor) != (new.pid, new.supervisor)


def note_facts(
    state: CoordinatorState, facts: tuple[Fact, ...], now_s: float, supervisor: str = ""
) -> Transition:
    """Return the state with all facts noted, in order.

    Args:
        state: what is known.
        facts: what was told.
        now_s: wall clock.
        supervisor: name of the supervisor's process that tells, if it says so.

    Raises:
        RemoteProtocolError: a fact names a pod or slot that has to register first, or steps that
            the job does not have.
    """
    result = Transition(state=state)
    stale = []
    for fact in facts:
        _check_known(result.state, fact, supervisor)
        outcome = _FACTS[type(fact)](result.state, fact, now_s)
        stale.append(outcome.stale)
        result = result.then(outcome)
    return replace(result, stale=bool(stale) and all(stale))


def _check_known(state: CoordinatorState, fact: Fact, supervisor: str) -> None:
    pod = state.pod(fact.pod)
    if isinstance(fact, PodGone):
        return
    if pod is None or pod.gone:
        why = "is unknown" if pod is None else f"counts as gone ({pod.why})"
        raise UnregisteredPodError(f"pod {fact.pod} {why}: register it, then tell its trainers")
    if supervisor and not pod.placeholder and supervisor != pod.registration.supervisor:
        # The pod sent it before it ended, or does not know that it was replaced.
        raise UnregisteredPodError(f"pod {fact.pod} has another supervisor, not {supervisor}")
    if isinstance(fact, Leaving):
        return
    if state.slot(Slot(pod=fact.pod, index=fact.slot)) is None:
        raise RemoteProtocolError(f"pod {fact.pod} has no slot {fact.slot}")
    if isinstance(fact, Named):
        check_named(state, fact)


def _slot_of(state: CoordinatorState, fact: TrainerFact) -> SlotState:
    slot = state.slot(Slot(pod=fact.pod, index=fact.slot))
    assert slot is not None
    return slot


def _when(fact: Fact, now_s: float) -> float:
    return fact.observed_at_s or now_s


def _trainer_up(state: CoordinatorState, fact: TrainerUp, now_s: float) -> Transition:
    slot = _slot_of(state, fact)
    name = slot_name(state, slot.slot)
    if fact.incarnation in slot.ended:
        return Transition(state=state, reason=f"{name}: that trainer has ended")
    if fact.incarnation == slot.incarnation:
        return Transition(state=_know_again(state, fact), reason=f"{name} is known to be up")
    if slot.incarnation is not None:
        why = "replaced by a new trainer"
        slot = end_slot(state, slot, slot.incarnation, why, _when(fact, now_s), now_s)
        state = note_end(state, fact.pod, why, now_s)
    theirs = fact.fingerprint
    refused = difference_of(state.fingerprint, theirs)
    slot = replace(
        slot,
        incarnation=fact.incarnation,
        restarting=False,
        refused=refused,
        accelerator=fact.accelerator,
    )
    state = with_slot(state, slot)
    state = replace(state, fingerprints={**state.fingerprints, str(slot.slot): theirs})
    if not refused and fact.outline:
        state = replace(state, outline=fact.outline)
    if refused:
        return Transition(state=state, actions=(refusal(name, refused),), reason=refused)
    return Transition(
        state=state,
        actions=(Announce(code="TrainerUp", message=f"trainer {name} is up"),),
        reason=f"{name} is up",
    )


def _know_again(state: CoordinatorState, fact: TrainerUp) -> CoordinatorState:
    """Note a trainer that is reported again. After a store recovery nothing else shows it."""
    slot = _slot_of(state, fact)
    key = str(slot.slot)
    if fact.accelerator and not slot.accelerator:
        state = with_slot(state, replace(slot, accelerator=fact.accelerator))
    if fact.outline and not state.outline:
        state = replace(state, outline=fact.outline)
    if key in state.fingerprints:
        return state
    state = replace(state, fingerprints={**state.fingerprints, key: fact.fingerprint})
    if state.fingerprint is None and fact.fingerprint and _member(state, fact) is not None:
        state = replace(state, fingerprint=fact.fingerprint)
    return state


def _trainer_down(state: CoordinatorState, fact: TrainerDown, now_s: float) -> Transition:
    slot = _slot_of(state, fact)
    name = slot_name(state, slot.slot)
    before, state = state, note_crash(state, slot.slot, fact.crash, _when(fact, now_s))
    if fact.incarnation in slot.ended and state is not before:
        # Its process was reaped before what it had told was read.
        return explain_end(state, slot, fact)
    if fact.incarnation in slot.ended:
        if slot.incarnation is None:
            handed_over = slot.handed_over or fact.handed_over
            known = replace(slot, restarting=fact.restarting, handed_over=handed_over)
            state = state if known == slot else with_slot(state, known)
        return Transition(state=state, reason=f"{name}: that end is known")
    at_s = _when(fact, now_s)
    ended = end_slot(state, slot, fact.incarnation, fact.evidence, at_s, now_s)
    if ended.incarnation is None:
        ended = replace(ended, restarting=fact.restarting, handed_over=fact.handed_over)
    if fact.incarnation in state.finished:
        ended = replace(ended, failures=slot.failures, held_until_s=slot.held_until_s)
        return Transition(state=with_slot(state, ended), reason=f"{name} ended after it finished")
    if ended.incarnation is None and fact.incarnation in ended.ended:
        state = note_end(state, fact.pod, fact.evidence, now_s)
    message = f"trainer {name} ended: {fact.evidence or 'no detail'}"
    left = has_left(state, fact.pod)
    return Transition(
        state=with_slot(state, ended),
        actions=(
            Announce(
                code="TrainerLeft" if left else "TrainerDown", message=message, warning=not left
            ),
        ),
        reason=message,
    )


def _pod_gone(state: CoordinatorState, fact: PodGone, now_s: float) -> Transition:
    return lose_pod(state, fact.pod, fact.evidence, _when(fact, now_s), now_s)


def _member(state: CoordinatorState, fact: TrainerFact) -> Member | None:
    if state.plan is None:
        return None
    return state.plan.member_of(Slot(pod=fact.pod, index=fact.slot), fact.incarnation)


def _outgoing(state: CoordinatorState, fact: TrainerFact) -> Member | None:
    """Return the teller as a member that the newest plan drops and the others still wait for."""
    mine = (Slot(pod=fact.pod, index=fact.slot), fact.incarnation)
    return next((m for m in outgoing(state) if (m.slot, m.incarnation) == mine), None)


def _stale(state: CoordinatorState, fact: RankFact) -> Transition:
    current = state.plan.quorum if state.plan else "no quorum"
    reason = f"{fact.kind} of {fact.quorum or 'no quorum'} is stale: the job is in {current}"
    return Transition(state=state, reason=reason, stale=True)


def _parked(state: CoordinatorState, fact: Parked, now_s: float) -> Transition:
    """Note that a member's quorum is broken. This is a hint: known deaths were acted on before."""
    member = _member(state, fact) or _outgoing(state, fact)
    if member is None or not _concerns(state, member, fact.quorum):
        return _stale(state, fact)
    old = state.suspicion
    if old is None:
        old = Suspicion(
            first_s=now_s,
            reporters=(),
            suspects=(),
            evidence=named_by_pod(state, fact.evidence),
            observed_at_s=_when(fact, now_s),
            differing=fact.differing,
        )
    causes = old.causes
    if fact.cause is not None and member.slot not in old.reporters:
        told = ToldCause(
            teller=member.slot, kind=fact.cause, sources=fact.sources, was_told=fact.was_told
        )
        causes = (*causes, told)
    new = replace(
        old,
        reporters=tuple(sorted({*old.reporters, member.slot})),
        suspects=tuple(sorted({*old.suspects, *fact.suspects})),
        causes=causes,
        doubted=old.doubted or fact.doubted,
        differing=old.differing or fact.differing,
        repeats=fact.repeats if old.repeats is None else old.repeats,
        unreached=old.unreached or fact.unreached,
    )
    name = slot_name(state, member.slot)
    state = replace(state, suspicion=new)
    if fact.unreached and (not fact.unasked or state.asked >= MAX_ASKS):
        state = replace(_stayed(state, fact), unreached=True)
    return Transition(state=state, reason=f"{name} parked: {fact.evidence}")


def _stayed(state: CoordinatorState, fact: Parked) -> CoordinatorState:
    """Return the state in which a plan whose members ask has lost no steps: they went nowhere.

    After a store's recovery that was not known.
    """
    plan = state.plan
    assert plan is not None
    if fact.quorum != plan.quorum or state.restarted_id != plan.quorum.id:
        return state
    return replace(state, restarted_id=max((v.quorum for v in plan.voided), default=0))


def _concerns(state: CoordinatorState, member: Member, quorum: QuorumId | None) -> bool:
    """Return whether a newer plan still has to help a member that gave up ``quorum``.

    An unplanned current plan helps every member below it. A planned plan interrupts nobody: a
    member that has not adopted it yet is reached only by a newer unplanned plan.
    """
    assert state.plan is not None
    if quorum is None:
        return False
    if quorum.id == state.plan.quorum.id:
        return quorum.nonce == state.plan.quorum.nonce
    older = state.plan.unplanned_id <= quorum.id < state.plan.quorum.id
    dropped = state.plan.member_of(member.slot, member.incarnation) is None
    return older and (dropped or not has_adopted(state, member))


def _adopted(state: CoordinatorState, fact: Adopted, now_s: float) -> Transition:
    member = _member(state, fact)
    if member is None or state.plan is None or fact.quorum != state.plan.quorum:
        return _stale(state, fact)
    if member.index in state.adopted_at_s:
        return Transition(state=state, reason="already known")
    state = note_how(note_reached(state, fact.reached), fact)
    adopted = {**state.adopted_at_s, member.index: _when(fact, now_s)}
    return Transition(
        state=replace(state, adopted_at_s=adopted), reason=f"{member.rank} adopted {fact.quorum}"
    )


def _settled(state: CoordinatorState, fact: Settled, now_s: float) -> Transition:
    member = _member(state, fact)
    if member is None or state.plan is None or fact.quorum != state.plan.quorum:
        return _stale(state, fact)
    if fact.history is not None and not fact.history.newest:
        raise RemoteProtocolError("history.newest: names no fork; must name the newest ones")
    if member.index in state.settled_at_s:
        if member.index or state.is_history_told:
            return Transition(state=state, reason="already known")
        # Commits were quicker than its word. They say since when, and not by which forks.
        return apply_told(replace(state, told_history=fact.history, is_history_told=True))
    settled = {**state.settled_at_s, member.index: _when(fact, now_s)}
    step = state.settled_step if fact.step is None else fact.step
    state = note_replayed(note_settled(state, fact), fact)
    state = replace(state, settled_at_s=settled, settled_step=step)
    if member.index == 0:
        state = replace(state, told_history=fact.history, is_history_told=True)
    if not all_settled(state):
        return Transition(state=state, reason=f"{member.rank} goes on in {fact.quorum}")
    return _all_settled(state)


def settle_all(state: CoordinatorState, at_s: float) -> Transition:
    """Return the state with every member settled: commits prove it, even if a report is missing."""
    assert state.plan is not None
    settled = {m.index: state.settled_at_s.get(m.index, at_s) for m in state.plan.members}
    return _all_settled(replace(state, settled_at_s=settled))


def _all_settled(state: CoordinatorState) -> Transition:
    plan = state.plan
    assert plan is not None
    used = take_used(plan_settled(state))
    course = used.then(apply_told(used.state))
    state = course.state
    if state.commits == 0 and state.settled_step is not None:
        # A restart goes back; so does a step that only the dead had applied: it is done again.
        # A job that goes on from an earlier run's checkpoint begins with the steps of that.
        step = max if plan.method is Method.START else min
        state = replace(state, step=step(state.step, state.settled_step))
        if plan.method is Method.START:
            state = replace(state, furthest=max(state.furthest, state.step))
    goes_on_at = state.step if state.settled_step is None else state.settled_step
    state = forget_clean(note_gone(note_again(state, goes_on_at), goes_on_at), goes_on_at)
    if state.phase is JobPhase.RECOVERING:
        state = replace(state, phase=JobPhase.RUNNING)
    # After a store's recovery it is by commits that all are known to have settled.
    message = f"all members of {plan.quorum} go on at step {goes_on_at}{how_replayed(state)}"
    state, closed = close_known(state)
    actions = tuple(RecordRecovery(recovery=r) for r in closed)
    settled = Announce(code="Settled", message=message)
    return course.then(Transition(state=state, actions=(*actions, settled), reason=message))


def _finished(state: CoordinatorState, fact: Finished, now_s: float) -> Transition:
    del now_s
    slot = _slot_of(state, fact)
    if fact.incarnation != slot.incarnation and fact.incarnation not in slot.ended:
        return _stale(state, fact)
    if fact.incarnation not in state.finished:
        state = replace(state, finished=(*state.finished, fact.incarnation))
    name = slot_name(state, slot.slot)
    result = Transition(state=state, reason=f"{name} has finished")
    if fact.final is None or _is_of_a_lineage_before(state, fact):
        return result
    return result.then(_final(state, fact.final, name))


def _is_of_a_lineage_before(state: CoordinatorState, fact: Finished) -> bool:
    """Return whether others may go on in another way than the one who has finished did.

    It finishes again, in the plan that began the lineage or in a later one.
    """
    plan = state.plan
    if plan is None or plan.lineage == 0 or fact.quorum is None:
        return False
    return fact.quorum.id < plan.unplanned_id


def _final(state: CoordinatorState, final: FinalDigests, name: str) -> Transition:
    where = (final.stage, final.inner)
    known = next((f for f in state.finals if (f.stage, f.inner) == where), None)
    if known is None:
        finals = sorted([*state.finals, final], key=lambda f: (f.stage, f.inner))
        return Transition(state=replace(state, finals=tuple(finals)))
    if known == final:
        return Transition(state=state)
    message = f"final digests of stage {final.stage} differ: {name} has {final}, first was {known}"
    return Transition(
        state=state, actions=(Announce(code="DigestMismatch", message=message, warning=True),)
    )


def _failed(state: CoordinatorState, fact: Failed, now_s: float) -> Transition:
    """Note why the job has to end. The decision to end it depends on all that is known."""
    slot = _slot_of(state, fact)
    if fact.incarnation in slot.ended or slot.refused:
        return _stale(state, fact)
    name = slot_name(state, slot.slot)
    reason = f"trainer {name} cannot go on: {fact.evidence or 'no detail'}"
    state = keep_newest(state, slot.slot, fact.crash, _when(fact, now_s))
    return Transition(state=replace(state, outcome=state.outcome or reason), reason=reason)


_FACTS: dict[type, Callable[[CoordinatorState, Any, float], Transition]] = {
    TrainerUp: _trainer_up,
    TrainerDown: _trainer_down,
    PodGone: _pod_gone,
    Leaving: note_leaving,
    Parked: _parked,
    Adopted: _adopted,
    Settled: _settled,
    Finished: _finished,
    Failed: _failed,
    Checkpoint: note_checkpoint,
    Checks: note_checks,
    Missed: note_missed,
    Paused: note_paused,
    Named: note_named,
    StateRefused: note_refused,
}
