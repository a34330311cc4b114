"""The supervisor's state machine: when trainers are forked, killed and given up, and what is told.

``step(state, event, now_s, nonce)`` returns the new state, actions for the shell and a reason. One
table owns the transitions of a slot::

    down --(launcher and job known)--> forking --hello--> up --socket end--> ending
     ^                                    |                |                   |
     |                                 exited            exited              exited
     |                                    v                v                   v
     +--launcher lost                backoff (or forking at once) or given-up <+

Invariants: every fork draws a new incarnation for its slot, and no event of another incarnation
changes the slot. A trainer is never forked after the job's end, nor after exit code 0 (done) or 10
(the user's mistake). Another one follows a trainer that has said that it finished, if its process
is lost before the job's end. The end of a trainer that said hello is told once, and repeated with
every heartbeat while the newest plan still names that incarnation: a fault is a state, not an event
(protocol section 8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.supervisor.events import (
    Action,
    Ended,
    Event,
    Fork,
    Forward,
    HeartbeatDue,
    LauncherLost,
    LauncherUp,
    Leave,
    LeaveAcknowledged,
    LeaveRequested,
    PlanReceived,
    Registered,
    SendFact,
    Signal,
    StopTrainers,
    Tick,
)
from mainstay_core.supervisor.leaving import (
    EXIT_TERMINATED,
    can_leave,
    leave_acknowledged,
    leave_requested,
    release,
    repeated,
)
from mainstay_core.supervisor.slots import (
    Transition,
    outdates,
    put,
    report_down,
    slot_step,
    with_phase,
)
from mainstay_core.supervisor.state import SIGKILL, SlotPhase, SlotState, SupervisorState
from mainstay_core.wire.facts import Fact, Finished, Parked, TrainerDown
from mainstay_core.wire.plan import Plan


def initial(pod: PodUid, num_slots: int) -> SupervisorState:
    """Return the state of a pod that knows nothing yet."""
    return SupervisorState(pod=pod, slots=tuple(SlotState(index=i) for i in range(num_slots)))


def step(state: SupervisorState, event: Event, now_s: float, nonce: str) -> Transition:
    """Return the transition that an event causes.

    Args:
        state: the pod so far.
        event: what happened.
        now_s: seconds since the epoch, from a clock that never jumps.
        nonce: random text, a part of the names of trainers forked by this step.

    Raises:
        LocalProtocolError: the slot's phase does not accept the event.
    """
    handler = _POD.get(type(event), slot_step)
    done = handler(state, event, now_s)
    after = _advance(done.state, now_s, nonce)
    return Transition(after.state, done.actions + after.actions, done.reason or after.reason)


def _launcher_up(state: SupervisorState, event: object, now_s: float) -> Transition:
    del event, now_s
    return Transition(replace(state, launcher_up=True))


def _registered(state: SupervisorState, event: Registered, now_s: float) -> Transition:
    """Tell the api of all trainers anew: it may have lost the pod."""
    del now_s
    facts: list[Fact] = [*state.named]
    for slot in state.slots:
        up = slot.up if slot.phase is SlotPhase.UP else None
        down = slot.down if slot.phase is not SlotPhase.UP else None
        facts += [fact for fact in (up, slot.final, down) if fact is not None]
    state = replace(state, registered=True, settings=event.settings)
    return Transition(state, tuple(SendFact(fact) for fact in facts))


def _launcher_lost(state: SupervisorState, event: object, now_s: float) -> Transition:
    """Note that all trainers are gone. Nobody promises that a launcher comes back.

    Their own sockets may have ended first, with the promise of a restart: that promise is taken
    back.
    """
    del event
    actions: list[Action] = []
    slots = []
    why = "the launcher of its pod ended, and all trainers with it"
    for slot in state.slots:
        lived = slot.phase in (SlotPhase.FORKING, SlotPhase.UP, SlotPhase.ENDING)
        promised = slot.down is not None and slot.down.restarting
        if slot.phase is SlotPhase.UP or (promised and slot.phase in _PROMISED):
            slot, tell = report_down(state, slot, why, False, now_s)
            actions.append(tell)
        restarts = slot.restarts + lived
        over = slot.has_failed or restarts > state.settings.max_restarts
        phase = SlotPhase.GIVEN_UP if over else SlotPhase.DOWN
        slots.append(replace(slot, phase=phase, incarnation=None, pid=0, restarts=restarts))
    state = replace(state, slots=tuple(slots), launcher_up=False)
    return Transition(state, tuple(actions), "the launcher ended")


def _plan_received(state: SupervisorState, event: PlanReceived, now_s: float) -> Transition:
    del now_s
    plan, held = event.plan, state.plan
    if held is not None and plan.quorum.id <= held.quorum.id:
        return Transition(state, (), f"{plan.quorum} is not newer than {held.quorum}")
    slots = tuple(_without_outdated(plan, slot) for slot in state.slots)
    state = replace(state, plan=plan, slots=slots)
    up = with_phase(state, SlotPhase.UP)
    return Transition(state, (Forward(plan, up),) if up else (), f"{plan.quorum}: {plan.reason}")


def _without_outdated(plan: Plan, slot: SlotState) -> SlotState:
    """Return a slot without the fact that it parked, if a plan has an answer to that."""
    if slot.parked is None or not outdates(plan, slot.parked):
        return slot
    later = None if isinstance(slot.later, Parked) else slot.later
    return replace(slot, parked=None, later=later)


def _ended(state: SupervisorState, event: Ended, now_s: float) -> Transition:
    if state.ending:
        return Transition(state)
    state = replace(
        state,
        ending=event.why,
        exit_code=event.exit_code,
        handed_over=event.handed_over,
        ending_at_s=now_s,
    )
    up = with_phase(state, SlotPhase.UP)
    return Transition(state, (StopTrainers(up),) if up else (), event.why)


def _heartbeat_due(state: SupervisorState, event: object, now_s: float) -> Transition:
    """Repeat what the newest plan does not reflect yet."""
    del event, now_s
    facts = [fact for slot in state.slots for fact in (slot.down, slot.parked) if fact is not None]
    unheard = tuple(SendFact(fact) for fact in facts if _unheard(state, fact))
    # What has parked is told by this.
    slots = tuple(
        replace(slot, later=None) if isinstance(slot.later, Parked) else slot
        for slot in state.slots
    )
    return Transition(replace(state, slots=slots), (*unheard, *repeated(state)))


def _unheard(state: SupervisorState, fact: TrainerDown | Parked) -> bool:
    if state.ending:
        return False
    if isinstance(fact, Parked):
        return True
    slot = Slot(pod=state.pod, index=fact.slot)
    return state.plan is not None and state.plan.member_of(slot, fact.incarnation) is not None


def _leave_asked(state: SupervisorState, event: LeaveRequested, now_s: float) -> Transition:
    if can_leave(state):
        return leave_requested(state, event, now_s)
    return _ended(state, Ended(event.why, EXIT_TERMINATED), now_s)


def _tick(state: SupervisorState, event: object, now_s: float) -> Transition:
    del event
    if state.leaving is not None and not state.ending and now_s >= state.leave_by_s:
        code = 0 if state.released else EXIT_TERMINATED
        why = f"{state.leaving.evidence}, and {state.settings.handover_s:g} s are over"
        return _ended(state, Ended(why, code), now_s)
    actions: list[Action] = []
    reasons = []
    for slot in state.slots:
        if slot.later is not None and now_s >= slot.later_due_s:
            actions.append(SendFact(slot.later))
            slot = replace(slot, later=None)
            state = put(state, slot)
        why, lost_at_s = _overdue(state, slot, now_s)
        if why and not slot.killed_for:
            assert slot.incarnation is not None
            actions.append(Signal(slot.index, slot.incarnation, SIGKILL))
            state = put(state, replace(slot, killed_for=why, lost_at_s=lost_at_s))
            reasons.append(f"slot {slot.index}: {why}")
        elif slot.phase is SlotPhase.UP and _is_first_look(state, slot, now_s):
            state = put(state, replace(slot, missed_at_s=now_s))
    return Transition(state, tuple(actions), "; ".join(reasons))


def _overdue(state: SupervisorState, slot: SlotState, now_s: float) -> tuple[str, float]:
    """Return why a slot's trainer must be killed, and when it gave the last sign that is missed.

    The reason is empty if it need not be killed. The time is 0 if no sign is missed.
    """
    alive = slot.phase in (SlotPhase.UP, SlotPhase.ENDING, SlotPhase.FORKING)
    if not alive or slot.incarnation is None:
        return "", 0.0
    if state.ending:
        late = now_s - state.ending_at_s > state.settings.stop_grace_s
        return "killed: it did not stop in time" if late else "", 0.0
    hang_s, silence_s = state.settings.hang_s, state.settings.silence_s
    missed_at_s = _missed_at_s(state, slot)
    if slot.phase is not SlotPhase.UP or missed_at_s is None:
        return "", 0.0
    if now_s < missed_at_s + state.settings.second_look_s:
        return "", 0.0
    if now_s - slot.alive_at_s > silence_s:
        return f"killed: no sign of life for {silence_s:g} s", slot.alive_at_s
    if now_s - slot.progress_at_s > hang_s:
        status = slot.status
        where = f" in step {status.step}, {status.phase}" if status is not None else ""
        return f"killed: no progress for {hang_s:g} s{where}", slot.progress_at_s
    return "", 0.0


def _missed_at_s(state: SupervisorState, slot: SlotState) -> float | None:
    """Return when a look has found that a trainer's sign is missed; None: no look has.

    A trainer is killed only a while after that. The supervisor may have stood still together with
    it, as when all of a pod is stopped and goes on later: then nobody has read what the trainer
    said. It may hold a state that nobody else has.
    """
    seen_s = slot.missed_at_s
    return seen_s if seen_s is not None and seen_s >= _first_look_s(state, slot) else None


def _is_first_look(state: SupervisorState, slot: SlotState, now_s: float) -> bool:
    return _missed_at_s(state, slot) is None and now_s >= _first_look_s(state, slot)


def _first_look_s(state: SupervisorState, slot: SlotState) -> float:
    return _limit_s(state, slot) - state.settings.second_look_s


def _limit_s(state: SupervisorState, slot: SlotState) -> float:
    """Return when a trainer that is up has been silent, or without progress, for too long."""
    settings = state.settings
    return min(slot.alive_at_s + settings.silence_s, slot.progress_at_s + settings.hang_s)


def _look_due_s(state: SupervisorState, slot: SlotState) -> float:
    """Return when a trainer that is up has to be looked at next."""
    missed_at_s = _missed_at_s(state, slot)
    if missed_at_s is None:
        return _first_look_s(state, slot)
    return max(_limit_s(state, slot), missed_at_s + state.settings.second_look_s)


def _advance(state: SupervisorState, now_s: float, nonce: str) -> Transition:
    """Fork the trainers that are due. Leave when nothing is left to wait for."""
    if state.ending:
        alive = with_phase(state, SlotPhase.FORKING, SlotPhase.UP, SlotPhase.ENDING)
        if alive or state.left:
            return Transition(state)
        return Transition(replace(state, left=True), (Leave(state.exit_code),), state.ending)
    if state.leaving is not None:
        return release(state)
    if not (state.launcher_up and state.registered):
        return Transition(state)
    actions: list[Action] = []
    for slot in state.slots:
        restart = slot.phase is SlotPhase.BACKOFF
        if not (slot.phase is SlotPhase.DOWN or (restart and now_s >= slot.restart_at_s)):
            continue
        incarnation = Incarnation(f"{nonce}-{slot.index}")
        actions.append(Fork(slot.index, incarnation))
        state = put(
            state,
            replace(
                slot,
                phase=SlotPhase.FORKING,
                incarnation=incarnation,
                restarts=slot.restarts + restart,
                pid=0,
                status=None,
                killed_for="",
                lost_at_s=0.0,
                crash=None,
                new_steps=0,
                parked=None,
                final=slot.final if isinstance(slot.final, Finished) else None,
            ),
        )
    return Transition(state, tuple(actions))


def readiness(state: SupervisorState) -> str:
    """Return why the pod is not ready; empty if every slot has a trainer that is up.

    Only the pod itself counts, neither the api nor a quorum.
    """
    if state.ending or state.leaving is not None:
        return state.ending or "it leaves"
    if not state.launcher_up:
        return "no launcher is connected"
    down = [s for s in state.slots if s.phase is not SlotPhase.UP and not s.has_failed]
    return ", ".join(f"slot {s.index} is {s.phase}" for s in down)


def next_due_s(state: SupervisorState) -> float | None:
    """Return when the next ``Tick`` is due at the latest; None if none is."""
    times = [slot.restart_at_s for slot in state.slots if slot.phase is SlotPhase.BACKOFF]
    if state.leaving is not None and not state.ending:
        times.append(state.leave_by_s)
    if state.ending and not state.left:
        times.append(state.ending_at_s + state.settings.stop_grace_s)
    for index in with_phase(state, SlotPhase.UP):
        slot = state.slots[index]
        if slot.later is not None:
            times.append(slot.later_due_s)
        if not slot.killed_for:
            times.append(_look_due_s(state, slot))
    return min(times, default=None)


_PROMISED = (SlotPhase.ENDING, SlotPhase.BACKOFF)
"""Phases of a slot whose last end was told with the promise of another trainer."""

_PodHandler = Callable[[SupervisorState, Any, float], Transition]

_POD: dict[type, _PodHandler] = {
    LauncherUp: _launcher_up,
    LauncherLost: _launcher_lost,
    Registered: _registered,
    PlanReceived: _plan_received,
    Ended: _ended,
    LeaveRequested: _leave_asked,
    LeaveAcknowledged: leave_acknowledged,
    HeartbeatDue: _heartbeat_due,
    Tick: _tick,
}
