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
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.base.values import replace
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
    without_parked,
)
from mainstay_core.supervisor.state import (
    SECOND_LOOK,
    SIGKILL,
    SlotPhase,
    SlotState,
    SupervisorState,
)
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
    if after is None:
        return done
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
    return without_parked(replace(slot, parked=None))


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
    slots = tuple(without_parked(slot) for slot in state.slots)
    if slots != state.slots:  # what has parked is told by this
        state = replace(state, slots=slots)
    return Transition(state, (*unheard, *repeated(state)))


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
        if slot.later and now_s >= slot.later_due_s:
            actions += [SendFact(fact) for fact in slot.later]
            slot = replace(slot, later=())
            state = put(state, slot)
        why, lost_at_s = _overdue(state, slot, now_s)
        if why and not slot.killed_for:
            assert slot.incarnation is not None
            actions.append(Signal(slot.index, slot.incarnation, SIGKILL))
            state = put(state, replace(slot, killed_for=why, lost_at_s=lost_at_s))
            reasons.append(f"slot {slot.index}: {why}")
        elif slot.phase is SlotPhase.UP:
            state = put(state, _looked_at(state, slot, now_s))
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
    if slot.phase is not SlotPhase.UP:
        return "", 0.0
    silence, hang = _limits(state, slot)
    if silence.is_over(now_s):
        return f"killed: no sign of life for {silence.length_s:g} s", silence.since_s
    if hang.is_over(now_s):
        status = slot.status
        where = f" in step {status.step}, {status.phase}" if status is not None else ""
        return f"killed: no progress for {hang.length_s:g} s{where}", hang.since_s
    return "", 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A bound on how long a trainer that is up may lack signs of life, or progress.

    It is killed only a while after a look has found that they lack. The supervisor may have stood
    still together with it, as when all of a pod is stopped and goes on later: then nobody has read
    what the trainer said. It may hold a state that nobody else has.
    """

    since_s: float
    """The last sign."""
    length_s: float
    looked_at_s: float | None
    """When a look found that one is missed; it may have come since."""

    @property
    def first_look_s(self) -> float:
        return self.since_s + self.length_s - self.length_s / SECOND_LOOK

    @property
    def missed_at_s(self) -> float | None:
        """When a look found that what still lacks is missed; None: no look has."""
        seen_s = self.looked_at_s
        return seen_s if seen_s is not None and seen_s >= self.first_look_s else None

    @property
    def due_s(self) -> float:
        """When the trainer has to be looked at next."""
        if self.missed_at_s is None:
            return self.first_look_s
        return max(self.since_s + self.length_s, self.missed_at_s + self.length_s / SECOND_LOOK)

    def is_over(self, now_s: float) -> bool:
        seen_s = self.missed_at_s
        if seen_s is None or now_s < seen_s + self.length_s / SECOND_LOOK:
            return False
        return now_s - self.since_s > self.length_s

    def looked(self, now_s: float) -> float | None:
        """Return when a look has found something to lack, after one at this time."""
        is_first = self.missed_at_s is None and now_s >= self.first_look_s
        return now_s if is_first else self.looked_at_s


def _limits(state: SupervisorState, slot: SlotState) -> tuple[_Limit, _Limit]:
    """Return the limits of silence and of standing still."""
    settings = state.settings
    silence = _Limit(
        since_s=slot.alive_at_s, length_s=settings.silence_s, looked_at_s=slot.missed_at_s
    )
    hang = _Limit(
        since_s=slot.progress_at_s, length_s=settings.hang_s, looked_at_s=slot.stalled_at_s
    )
    return silence, hang


def _looked_at(state: SupervisorState, slot: SlotState, now_s: float) -> SlotState:
    silence, hang = _limits(state, slot)
    return replace(slot, missed_at_s=silence.looked(now_s), stalled_at_s=hang.looked(now_s))


def _advance(state: SupervisorState, now_s: float, nonce: str) -> Transition | None:
    """Fork the trainers that are due. Leave when nothing is left to wait for. None: neither."""
    if state.ending:
        alive = with_phase(state, SlotPhase.FORKING, SlotPhase.UP, SlotPhase.ENDING)
        if alive or state.left:
            return None
        return Transition(replace(state, left=True), (Leave(state.exit_code),), state.ending)
    if state.leaving is not None:
        return release(state)
    if not (state.launcher_up and state.registered):
        return None
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
    return Transition(state, tuple(actions)) if actions else None


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
    times = []
    if state.leaving is not None and not state.ending:
        times.append(state.leave_by_s)
    if state.ending and not state.left:
        times.append(state.ending_at_s + state.settings.stop_grace_s)
    for slot in state.slots:
        if slot.phase is SlotPhase.BACKOFF:
            times.append(slot.restart_at_s)
        elif slot.phase is SlotPhase.UP:
            if slot.later:
                times.append(slot.later_due_s)
            if not slot.killed_for:
                times += [limit.due_s for limit in _limits(state, slot)]
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
