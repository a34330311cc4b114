"""A pod's supervisor in scenarios: what its trainers, its launcher and the api tell it.

The pod is ``demo-1``. The lives of a slot's trainer are numbered; commands speak of
the newest one unless ``life`` names another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.scenarios.scenario_files import Call, Command, Driver
from tests.worlds.facts import make_fact

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.supervisor import machine
from mainstay_core.supervisor.events import (
    Action,
    Committed,
    Crashed,
    Ended,
    Event,
    Exited,
    FactSeen,
    Fork,
    Forked,
    Forward,
    HeartbeatDue,
    Hello,
    LauncherLost,
    LauncherUp,
    Leave,
    LeaveAcknowledged,
    LeaveRequested,
    PlanReceived,
    Registered,
    Release,
    SendFact,
    Signal,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    Tick,
)
from mainstay_core.supervisor.state import SupervisorLimits, SupervisorState
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import FactKind, SlotStatus
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous

POD = PodUid("demo-1")


class SupervisorDriver(Driver):
    """One pod's supervisor."""

    def __init__(self) -> None:
        self._state = SupervisorState(pod=POD)
        self._now_s = 0.0
        self._names: dict[Incarnation, str] = {}
        self._lives: dict[int, list[Incarnation]] = {}
        self._events = 0
        self._unplanned = 0

    def commands(self) -> dict[str, Command]:
        return {
            "pod": self._pod,
            "launcher-up": lambda call: self._send(call, LauncherUp()),
            "launcher-lost": lambda call: self._send(call, LauncherLost()),
            "registered": self._registered,
            "forked": self._forked,
            "hello": self._hello,
            "status": self._status,
            "says": self._says,
            "committed": self._committed,
            "crashed": self._crashed,
            "socket-ended": lambda call: self._send(call, SocketEnded(*self._life(call))),
            "exited": self._exited,
            "plan": self._plan,
            "job-ended": self._job_ended,
            "told-to-end": self._told_to_end,
            "leave-heard": lambda call: self._send(call, LeaveAcknowledged()),
            "nobody-meets-here": self._nobody_meets_here,
            "heartbeat": lambda call: self._send(call, HeartbeatDue()),
            "tick": self._tick,
        }

    def _pod(self, call: Call) -> list[str]:
        num_slots = call.count("slots", 1)
        self._state = machine.initial(POD, num_slots)
        return [f"a pod of {num_slots} {'slot' if num_slots == 1 else 'slots'} begins"]

    def _registered(self, call: Call) -> list[str]:
        usual = SupervisorLimits()
        settings = SupervisorLimits(
            max_restarts=call.count("max-restarts", usual.max_restarts),
            hang_s=call.number("hang", usual.hang_s),
            silence_s=call.number("silence", usual.silence_s),
            backoff_s=call.number("backoff", usual.backoff_s),
            backoff_max_s=call.number("backoff-max", usual.backoff_max_s),
            stop_grace_s=call.number("stop-grace", usual.stop_grace_s),
            handover_s=call.number("handover", usual.handover_s),
        )
        return self._send(call, Registered(settings))

    def _committed(self, call: Call) -> list[str]:
        return self._send(call, Committed(*self._life(call), call.count("step")))

    def _crashed(self, call: Call) -> list[str]:
        """It tells the exception that ends it: ``crashed 0 type=OSError line=data.py:3 step=5``."""
        crash = Crash(type=call.need("type"), frames=(call.need("line"),), step=call.count("step"))
        return self._send(call, Crashed(*self._life(call), crash))

    def _forked(self, call: Call) -> list[str]:
        slot, life = self._life(call)
        return self._send(call, Forked(slot, life, call.count("pid", 10 + slot)))

    def _hello(self, call: Call) -> list[str]:
        slot, life = self._life(call)
        return self._send(call, Hello(slot, life, call.count("pid", 10 + slot), {"torch": "2"}))

    def _status(self, call: Call) -> list[str]:
        slot, life = self._life(call)
        status = SlotStatus(
            index=slot,
            incarnation=life,
            phase=call.get("phase", "computing"),
            waiting=call.flag("waiting"),
            step=call.count("step"),
            progress=call.count("progress"),
            quorum=self._quorum(call) if call.has("in") else None,
        )
        return self._send(call, StatusSeen(slot, life, status))

    def _says(self, call: Call) -> list[str]:
        """A trainer has learnt something: ``says 0 parked in=3``."""
        slot, life = self._life(call)
        fact = make_fact(
            FactKind(call.word()),
            pod=POD,
            slot=slot,
            incarnation=life,
            quorum=self._quorum(call) if call.has("in") else None,
            evidence=call.get("why"),
        )
        return self._send(call, FactSeen(slot, life, fact))

    def _exited(self, call: Call) -> list[str]:
        slot, life = self._life(call)
        number = call.count("signal") if call.has("signal") else None
        code = None if number is not None else call.count("code", 1)
        return self._send(call, Exited(slot, life, code, number))

    def _plan(self, call: Call) -> list[str]:
        """A plan with an id and, of this pod, the newest lives on the slots named."""
        number, planned = int(call.word()), call.flag("planned")
        members = [
            (Slot(pod=POD, index=int(name)), self._lives[int(name)][-1]) for name in call.words()
        ]
        self._unplanned = self._unplanned if planned else number
        return self._send(call, PlanReceived(_make_plan(number, members, self._unplanned)))

    def _job_ended(self, call: Call) -> list[str]:
        return self._send(call, Ended(call.get("why", "the job is complete")))

    def _told_to_end(self, call: Call) -> list[str]:
        return self._send(call, LeaveRequested(call.get("why", "SIGTERM")))

    def _nobody_meets_here(self, call: Call) -> list[str]:
        """The shell's answer to a release: nobody is connected to its gather server any more."""
        return self._send(call, Ended("its work is handed over", handed_over=True))

    def _tick(self, call: Call) -> list[str]:
        self._now_s += float(call.word())
        return self._send(call, Tick())

    # Helpers ------------------------------------------------------------------------

    def _life(self, call: Call) -> tuple[int, Incarnation]:
        slot = int(call.word())
        lives = self._lives.get(slot, [])
        number = call.count("life", len(lives))
        if not 0 < number <= len(lives):
            raise call.error(f"slot {slot} has had {len(lives)} trainers")
        return slot, lives[number - 1]

    def _quorum(self, call: Call) -> QuorumId:
        return QuorumId(id=call.count("in"), nonce="a")

    def _send(self, call: Call, event: Event) -> list[str]:
        if call.at_s is not None:
            if call.at_s < self._now_s:
                raise call.error(f"it is {self._now_s:g} s already")
            self._now_s = call.at_s
        self._events += 1
        try:
            done = machine.step(self._state, event, self._now_s, f"e{self._events}")
        except MainstayError as error:
            return [f"refused ({type(error).__name__}): {error}"]
        self._state = done.state
        for action in done.actions:
            if isinstance(action, Fork):
                lives = self._lives.setdefault(action.slot, [])
                lives.append(action.incarnation)
                self._names[action.incarnation] = f"{POD}/{action.slot}.{len(lives)}"
        said = [f"* {self._say(action)}" for action in done.actions]
        first = [done.reason] if done.reason else []
        return [*first, *said] or ["nothing follows"]

    def _say(self, action: Action) -> str:
        match action:
            case Fork(slot=slot, incarnation=life):
                return f"has its launcher fork {self._names[life]} on slot {slot}"
            case Signal(incarnation=life, number=number):
                return f"sends signal {number} to {self._names[life]}"
            case SendFact(fact=fact):
                return f"tells {self._say_fact(fact)}"
            case Forward(plan=plan, slots=slots):
                return f"passes {plan.quorum} on to slot {_list(slots)}"
            case StopTrainers(slots=slots):
                return f"tells slot {_list(slots)} that nothing is left to do"
            case Release():
                return "may end as soon as nobody meets at its gather server"
            case Leave(exit_code=code):
                return f"dismisses the launcher and exits with code {code}"

    def _say_fact(self, fact: Any) -> str:
        life = getattr(fact, "incarnation", None)
        who = f" of {self._names[life]}" if life in self._names else ""
        said = f"{fact.kind}{who}"
        if getattr(fact, "quorum", None) is not None:
            said += f" in {fact.quorum}"
        if fact.kind is FactKind.TRAINER_DOWN:
            said += ", another one follows" if fact.restarting else ", no other one follows"
            said += ", its work handed over" if fact.handed_over else ""
        if getattr(fact, "grace_s", 0.0):
            said += f", within {fact.grace_s:g} s"
        return said + (f": {fact.evidence}" if fact.evidence else "")

    def show(self) -> list[str]:
        state = self._state
        slots = []
        for slot in state.slots:
            said = f"slot {slot.index} {slot.phase}"
            said += f", {slot.restarts} restarts since it worked" if slot.restarts else ""
            slots.append(said + (", has failed" if slot.has_failed else ""))
        notes = []
        if state.plan is not None:
            notes.append(f"holds {state.plan.quorum}")
        if state.leaving is not None and not state.ending:
            heard = "heard by the api" if state.leave_acknowledged else "not heard yet"
            released = ", released" if state.released else ""
            notes.append(f"leaves until {state.leave_by_s:g} s, {heard}{released}")
        if state.ending:
            notes.append(f"ends: {state.ending}")
        return [f"= at {self._now_s:g} s {'; '.join([*slots, *notes])}"]


def _list(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots))


def _make_plan(number: int, members: Sequence[tuple[Slot, Incarnation]], unplanned: int) -> Plan:
    """A plan as a supervisor looks at it: who of its pod is a member, and what it interrupts."""
    quorum = QuorumId(id=number, nonce="a")
    seated = tuple(
        Member(
            index=index,
            rank=RankId(replica=index, stage=0),
            slot=slot,
            incarnation=life,
            address="host",
            since=number,
        )
        for index, (slot, life) in enumerate(members)
    )
    return Plan(
        job=JobUid("job"),
        quorum=quorum,
        planned=unplanned < number,
        unplanned_id=unplanned,
        method=Method.JOIN if unplanned < number else Method.MASK,
        members=seated,
        chains=tuple(Chain(replica=m.index, cells=(m.index,), formed_in=quorum) for m in seated),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod=POD, gather="demo-1:1"),
        reason="as the api decided",
    )
