"""Decides the transitions of one slot of a pod, by one table.

See :mod:`mainstay_core.supervisor.machine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.backoff import doubled_s
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import Incarnation, Slot
from mainstay_core.base.values import replace
from mainstay_core.supervisor.events import (
    Action,
    Committed,
    Crashed,
    Exited,
    FactSeen,
    Forked,
    Forward,
    Hello,
    SendFact,
    Signal,
    SocketEnded,
    StatusSeen,
    StopTrainers,
)
from mainstay_core.supervisor.state import (
    EXIT_FINISHED,
    EXIT_USER_ERROR,
    GOES_ON_S,
    LATER_S,
    MAX_NAMED,
    SIGKILL,
    STEPS_THAT_PROVE,
    TELLERS,
    SlotPhase,
    SlotState,
    SupervisorLimits,
    SupervisorState,
)
from mainstay_core.wire.facts import (
    Adopted,
    Cause,
    Failed,
    Finished,
    Named,
    Parked,
    Paused,
    Settled,
    SlotStatus,
    TrainerDown,
    TrainerUp,
)
from mainstay_core.wire.plan import Method, Plan

LAST_WORDS = (Finished, Failed)
"""Facts about itself that count even when the trainer that told them has ended."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The outcome of one event: the new state, the actions, and a reason."""

    state: SupervisorState
    actions: tuple[Action, ...] = ()
    reason: str = ""


def slot_step(state: SupervisorState, event: Any, now_s: float) -> Transition:
    """Return the transition that an event of one slot causes.

    It forks nothing: forks come after it.
    """
    if not 0 <= event.slot < len(state.slots):
        raise LocalProtocolError(f"slot {event.slot} of a pod with {len(state.slots)}")
    slot = state.slots[event.slot]
    if event.incarnation != slot.incarnation:
        if isinstance(event, FactSeen) and isinstance(event.fact, LAST_WORDS):
            return _last_words_before(state, slot, event.fact)
        if isinstance(event, FactSeen) and isinstance(event.fact, Named):
            return _named(state, event.fact)
        if isinstance(event, Crashed):
            return _crashed_before(state, slot, event)
        return Transition(state, (), f"{type(event).__name__} of a former life is ignored")
    handler = _TABLE.get((slot.phase, type(event)))
    if handler is None:
        raise LocalProtocolError(f"slot {slot.index}: {type(event).__name__} while {slot.phase}")
    return handler(state, slot, event, now_s)


def put(state: SupervisorState, slot: SlotState) -> SupervisorState:
    """Return the state with one slot replaced."""
    slots = list(state.slots)
    slots[slot.index] = slot
    return replace(state, slots=tuple(slots))


def with_phase(state: SupervisorState, *phases: SlotPhase) -> tuple[int, ...]:
    """Return the slots that are in one of the phases, ascending."""
    return tuple(s.index for s in state.slots if s.phase in phases)


def line_of(slot: SlotState) -> SlotStatus:
    """Return a slot's line in the heartbeat.

    The kernel tells a supervisor no pid of a process in another container: then the pid is the one
    that the process itself has said.
    """
    status = slot.status
    if slot.phase is SlotPhase.UP and status is not None:
        return status if status.pid else replace(status, pid=slot.pid)
    phase = "starting" if slot.phase is SlotPhase.UP else slot.phase.value
    return SlotStatus(index=slot.index, incarnation=slot.incarnation, pid=slot.pid, phase=phase)


def _forked(state: SupervisorState, slot: SlotState, event: Forked, now_s: float) -> Transition:
    del now_s
    return Transition(put(state, replace(slot, pid=event.pid)))


def _hello(state: SupervisorState, slot: SlotState, event: Hello, now_s: float) -> Transition:
    fact = TrainerUp(
        pod=state.pod,
        slot=slot.index,
        incarnation=event.incarnation,
        fingerprint=event.fingerprint,
        outline=event.outline,
        accelerator=event.accelerator,
        evidence=f"pid {event.pid} said hello",
        observed_at_s=now_s,
    )
    slot = replace(
        slot,
        phase=SlotPhase.UP,
        pid=event.pid,
        up=fact,
        alive_at_s=now_s,
        progress_at_s=now_s,
        status=None,
    )
    if state.ending:
        return Transition(put(state, slot), (StopTrainers((slot.index,)),), state.ending)
    actions: tuple[Action, ...] = (SendFact(fact),)
    if state.plan is not None:
        actions += (Forward(state.plan, (slot.index,)),)
    return Transition(put(state, slot), actions, f"slot {slot.index}: {fact.evidence}")


def _status(state: SupervisorState, slot: SlotState, event: StatusSeen, now_s: float) -> Transition:
    before = slot.status
    moved = before is None or (before.progress, before.phase, before.step) != (
        event.status.progress,
        event.status.phase,
        event.status.step,
    )
    # The end of a wait starts the count: what was waited for is not this rank's fault.
    excused = event.status.waiting or (before is not None and before.waiting)
    progress_at_s = now_s if moved or excused else slot.progress_at_s
    slot = replace(slot, status=event.status, alive_at_s=now_s, progress_at_s=progress_at_s)
    return Transition(put(state, slot))


def _fact(state: SupervisorState, slot: SlotState, event: FactSeen, now_s: float) -> Transition:
    fact = event.fact
    plan = state.plan
    if isinstance(fact, Named):
        return _named(put(state, replace(slot, alive_at_s=now_s)), fact)
    if isinstance(fact, Parked) and plan is not None and outdates(plan, fact):
        return Transition(state, (), f"parked quorum is older than {plan.quorum}: not told")
    if isinstance(fact, Parked):
        slot = replace(slot, parked=fact)
    elif isinstance(fact, (*LAST_WORDS, Paused)):
        slot = replace(slot, final=fact)
    if isinstance(fact, Adopted):
        state = replace(state, met=fact.quorum)
    reason = f"slot {slot.index}: {fact.kind}"
    if isinstance(fact, Settled) and _goes_on_after_a_loss(state, slot, fact):
        later = (*slot.later, fact)
        slot = replace(slot, alive_at_s=now_s, later=later, later_due_s=now_s + GOES_ON_S)
        return Transition(put(state, slot), (), reason)
    before = tuple(SendFact(told) for told in slot.later)
    slot = replace(slot, alive_at_s=now_s, later=())
    if _can_wait(state, slot, fact):
        assert isinstance(fact, Adopted | Parked)
        slot = replace(slot, later=(fact,), later_due_s=now_s + LATER_S)
        return Transition(put(state, slot), before, reason)
    return Transition(put(state, slot), (*before, SendFact(fact)), reason)


def _goes_on_after_a_loss(state: SupervisorState, slot: SlotState, fact: Settled) -> bool:
    """Return whether a member goes on as it was, under a plan that only leaves lost ones out.

    Who had to make or copy a state first tells it at once, and so does the quorum's first member:
    it tells of all states. A planned plan holds up pods that leave until all have adopted it.
    """
    plan = state.plan
    if plan is None or plan.planned or plan.quorum != fact.quorum or fact.replayed is not None:
        return False
    just_adopted = any(isinstance(told, Adopted) for told in slot.later)
    first = plan.members[0].slot if plan.members else None
    loses = plan.method in (Method.MASK, Method.REFORM)
    return loses and just_adopted and first != Slot(pod=state.pod, index=slot.index)


def without_parked(slot: SlotState) -> SlotState:
    """Return a slot that does not wait to tell that it has parked."""
    if not any(isinstance(fact, Parked) for fact in slot.later):
        return slot
    return replace(slot, later=tuple(f for f in slot.later if not isinstance(f, Parked)))


def _can_wait(state: SupervisorState, slot: SlotState, fact: object) -> bool:
    """Return whether a fact is told a little later.

    Who has adopted a plan goes on in it within milliseconds, as a rule. Who has parked, as another
    member has ended the quorum, gets a new plan: that one tells the api. But if the quorum ended
    with a member's connection, all have only heard of it, and whose pod is gone tells nothing. So
    the first member that is not suspected tells it at once. All members of a lost one's position
    see for themselves that their reduction has ended: the first ones tell it at once.
    """
    if isinstance(fact, Adopted):
        return True
    if not isinstance(fact, Parked) or state.plan is None:
        return isinstance(fact, Parked) and fact.was_told
    mine = Slot(pod=state.pod, index=slot.index)
    if fact.was_told:
        members = state.plan.members if fact.suspects else ()
        first = next((m.slot for m in members if m.slot not in fact.suspects), None)
        return first != mine
    return fact.cause is Cause.REDUCTION and _others_see_it(state.plan, mine, fact)


def _others_see_it(plan: Plan, mine: Slot, fact: Parked) -> bool:
    """Return whether enough members before this one see that their position's reduction ended."""
    member = plan.member_of(mine, fact.incarnation) if plan.quorum == fact.quorum else None
    if member is None:
        return False
    members = plan.position_members(plan.position_of(member.index))
    tellers = [m.slot for m in members if m.slot not in fact.suspects][:TELLERS]
    return mine not in tellers


def _named(state: SupervisorState, fact: Named) -> Transition:
    """Tell that a device computes wrongly, and remember it: a store may lose it.

    Of a device the last word is kept, with the first step of which any word says that it is wrong.
    """
    before = [known for known in state.named if known.named == fact.named]
    steps = [known.since for known in (*before, fact) if known.since is not None]
    kept = replace(fact, since=min(steps, default=None))
    others = tuple(known for known in state.named if known not in before)
    state = replace(state, named=(*others, kept)[-MAX_NAMED:])
    return Transition(state, (SendFact(fact),), f"{fact.named} is named: {fact.evidence}")


def outdates(plan: Plan, fact: Parked) -> bool:
    """Return whether a newer plan helps a rank that gave up the quorum of a fact.

    A planned plan helps nobody: a parked rank adopts only an unplanned one.
    """
    return fact.quorum is not None and plan.unplanned_id > fact.quorum.id


def _last_words(
    state: SupervisorState, slot: SlotState, event: FactSeen, now_s: float
) -> Transition:
    """Take a fact of a trainer whose process was reaped before its socket was read to the end."""
    if not isinstance(event.fact, (*LAST_WORDS, Named)):
        return Transition(state)
    return _fact(state, slot, event, now_s)


def _last_words_before(
    state: SupervisorState, slot: SlotState, fact: Finished | Failed
) -> Transition:
    """Take a fact of a trainer whose slot has another one by now."""
    if isinstance(fact, Finished) and slot.final is None:
        state = put(state, replace(slot, final=fact))
    return Transition(state, (SendFact(fact),), "last words of a former life")


def _committed(
    state: SupervisorState, slot: SlotState, event: Committed, now_s: float
) -> Transition:
    goes_on = any(isinstance(fact, Settled) for fact in slot.later)
    told = tuple(SendFact(fact) for fact in slot.later) if goes_on else ()
    slot = replace(slot, later=()) if goes_on else slot
    if event.step <= slot.newest_step:
        return Transition(put(state, replace(slot, alive_at_s=now_s)), told)
    new_steps = slot.new_steps + 1
    slot = replace(
        slot,
        alive_at_s=now_s,
        newest_step=event.step,
        new_steps=new_steps,
        restarts=0 if new_steps >= STEPS_THAT_PROVE else slot.restarts,
    )
    return Transition(put(state, slot), told)


def _crashed(state: SupervisorState, slot: SlotState, event: Crashed, now_s: float) -> Transition:
    del now_s
    return Transition(put(state, replace(slot, crash=event.crash)), (), event.crash.describe())


def _crashed_before(state: SupervisorState, slot: SlotState, event: Crashed) -> Transition:
    """Add a crash to the end of a trainer whose process was reaped before its socket was read."""
    down = slot.down
    if down is None or down.incarnation != event.incarnation:
        return Transition(state, (), f"the crash of {event.incarnation} comes too late")
    evidence = event.crash.describe() + _outlook(state, slot, down.restarting)
    down = replace(down, crash=event.crash, evidence=evidence)
    return Transition(put(state, replace(slot, down=down)), (SendFact(down),), down.evidence)


def _crashed_late(
    state: SupervisorState, slot: SlotState, event: Crashed, now_s: float
) -> Transition:
    del now_s
    return _crashed_before(state, slot, event)


def _socket_ended(
    state: SupervisorState, slot: SlotState, event: SocketEnded, now_s: float
) -> Transition:
    del event
    evidence = _why_ended(slot) or f"the socket of pid {slot.pid} ended"
    slot, tell = report_down(state, slot, evidence, _may_restart(state, slot), now_s)
    # Without a supervisor a trainer must not live on; it normally is dead already.
    kill = Signal(slot.index, slot.incarnation or Incarnation(""), SIGKILL)
    slot = replace(slot, phase=SlotPhase.ENDING)
    return Transition(put(state, slot), (tell, kill), evidence)


def _exited(state: SupervisorState, slot: SlotState, event: Exited, now_s: float) -> Transition:
    how = f"signal {event.signal}" if event.signal is not None else f"code {event.code}"
    evidence = f"{_why_ended(slot) or f'pid {slot.pid} ended'} ({how})"
    over = event.code in (EXIT_FINISHED, EXIT_USER_ERROR)
    restarting = not over and _may_restart(state, slot)
    actions: tuple[Action, ...] = ()
    told = slot.phase is SlotPhase.ENDING and slot.down is not None
    if not told or (slot.down is not None and slot.down.restarting != restarting):
        slot, tell = report_down(state, slot, evidence, restarting, now_s)
        actions = (tell,)
    if restarting:
        delay_s = _backoff_s(state.settings, slot.restarts)
        slot = replace(slot, phase=SlotPhase.BACKOFF, restart_at_s=now_s + delay_s)
        reason = f"slot {slot.index}: {evidence}; restart {slot.restarts + 1} in {delay_s:g} s"
    else:
        slot = replace(slot, phase=SlotPhase.GIVEN_UP)
        reason = f"slot {slot.index}: {evidence}; not restarted"
    return Transition(put(state, slot), actions, reason)


def _why_ended(slot: SlotState) -> str:
    """Return why a trainer ends, as far as it or its supervisor has said; else nothing."""
    return slot.killed_for or (slot.crash.describe() if slot.crash is not None else "")


def _ignored(state: SupervisorState, slot: SlotState, event: object, now_s: float) -> Transition:
    del slot, event, now_s
    return Transition(state)


def _may_restart(state: SupervisorState, slot: SlotState) -> bool:
    """Return whether another trainer follows one that ends.

    Another one follows a trainer that has finished, too: as long as the job is not over, the others
    may die before they finish, and then the job goes on from a checkpoint with all of them.
    """
    over = slot.has_failed or state.ending or state.leaving is not None
    return not over and slot.restarts < state.settings.max_restarts


def _outlook(state: SupervisorState, slot: SlotState, restarting: bool) -> str:
    """Return what a slot's evidence adds when its restarts are used up; else nothing.

    Nobody else knows why a pod stays that has no trainer any more.
    """
    at_work = slot.final is None and not state.ending and state.leaving is None
    if restarting or not at_work or slot.restarts < state.settings.max_restarts:
        return ""
    return (
        f"; recovery.maxRestarts is {state.settings.max_restarts}, so the slot stays empty: "
        "its pod is kept as it is, and another is made once that is gone"
    )


def _backoff_s(settings: SupervisorLimits, restarts: int) -> float:
    if restarts == 0:
        return 0.0
    return doubled_s(settings.backoff_s, restarts - 1, settings.backoff_max_s)


def report_down(
    state: SupervisorState, slot: SlotState, evidence: str, restarting: bool, now_s: float
) -> tuple[SlotState, SendFact]:
    """Return the slot with its end noted, and the fact to send.

    The fact names no quorum: it is true whichever quorum is in force. A trainer that was killed for
    its silence, or since it hung, is lost since its last sign: others have waited since then.
    """
    assert slot.incarnation is not None
    fact = TrainerDown(
        pod=state.pod,
        slot=slot.index,
        incarnation=slot.incarnation,
        restarting=restarting,
        handed_over=state.handed_over,
        crash=slot.crash,
        evidence=evidence + _outlook(state, slot, restarting),
        observed_at_s=slot.lost_at_s or now_s,
    )
    return replace(slot, down=fact, parked=None, later=()), SendFact(fact)


_SlotHandler = Callable[[SupervisorState, SlotState, Any, float], Transition]

# Launcher and trainers have sockets of their own, so what one says of a trainer may arrive before
# or after what the trainer itself said earlier: both orders are in the table.
_TABLE: dict[tuple[SlotPhase, type], _SlotHandler] = {
    (SlotPhase.FORKING, Forked): _forked,
    (SlotPhase.FORKING, Hello): _hello,
    (SlotPhase.FORKING, Exited): _exited,
    (SlotPhase.UP, Forked): _forked,
    (SlotPhase.UP, StatusSeen): _status,
    (SlotPhase.UP, FactSeen): _fact,
    (SlotPhase.UP, Committed): _committed,
    (SlotPhase.FORKING, Crashed): _crashed,
    (SlotPhase.UP, Crashed): _crashed,
    (SlotPhase.UP, SocketEnded): _socket_ended,
    (SlotPhase.UP, Exited): _exited,
    (SlotPhase.ENDING, Forked): _forked,
    (SlotPhase.ENDING, Exited): _exited,
    **{
        (phase, event): _ignored
        for phase in (SlotPhase.BACKOFF, SlotPhase.GIVEN_UP)
        for event in (Hello, StatusSeen, Committed, SocketEnded)
    },
    (SlotPhase.BACKOFF, Crashed): _crashed_late,
    (SlotPhase.GIVEN_UP, Crashed): _crashed_late,
    (SlotPhase.BACKOFF, FactSeen): _last_words,
    (SlotPhase.GIVEN_UP, FactSeen): _last_words,
}
