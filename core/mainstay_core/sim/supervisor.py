"""A simulated supervisor: the shell of ``mainstay_agent.supervisor`` around the state machine.

With its outboxes, heartbeats and stream (``mainstay_agent.outbox``, ``.api_line``)
and the pod's gather server.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.sim.engine import Steps
from mainstay_core.sim.gather import GatherServer
from mainstay_core.sim.launcher import Launcher
from mainstay_core.sim.line import ApiLine
from mainstay_core.sim.network import End, Listener
from mainstay_core.supervisor import machine
from mainstay_core.supervisor.events import (
    Action,
    Committed,
    Ended,
    Event,
    Exited,
    FactSeen,
    Fork,
    Forked,
    Forward,
    Hello,
    LauncherLost,
    LauncherUp,
    Leave,
    Release,
    SendFact,
    SlotPhase,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    Tick,
)
from mainstay_core.supervisor.events import Signal as SignalSlot
from mainstay_core.wire.facts import PodRegistration

if TYPE_CHECKING:
    from mainstay_core.sim.world import World


class Supervisor(ApiLine):
    """One life of a pod's supervisor.

    Args:
        world: everything around it.
        pod: the pod's UID.
        number: of this life: a restarted supervisor has another pid.
    """

    def __init__(self, world: World, pod: PodUid, number: int) -> None:
        super().__init__(world, pod, f"{pod}~{number}")
        self.number = number
        self.left: int | None = None
        self._gather_address = f"gather@{pod}.{number}"
        self._gather = GatherServer(
            self, world.network, self._gather_address, world.checks, self.passed
        )
        world.network.listen(f"socket@{pod}.{number}", Listener(self, accept=self._accept))
        self.launcher: Launcher | None = None
        self._launcher_end: End | None = None
        self._trainers: dict[int, tuple[Incarnation, End]] = {}
        self._known = False
        self._timer_s: float | None = None

    # The state machine ------------------------------------------------------

    def _now_s(self) -> float:
        return self.world.clock(self.pod)

    def feed(self, event: Event) -> None:
        """Have the state machine decide."""
        if self.left is not None or not self.alive:
            return
        held = self.state.plan
        done = machine.step(self.state, event, self._now_s(), self.world.draw_name())
        self.state = done.state
        if done.state.plan is not None and done.state.plan is not held:
            self._gather.hold(done.state.plan)
            self.passing.hold(done.state.plan)
        if self.engine.tracing and done.reason:
            self.engine.say(self.name, done.reason)
        for action in done.actions:
            self._act(action)
        self._set_timer()

    def _set_timer(self) -> None:
        due_s = machine.next_due_s(self.state)
        if due_s is None or (self._timer_s is not None and self._timer_s <= due_s):
            return
        self._timer_s = due_s
        self.after(max(0.0, due_s - self._now_s()) + 0.001, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        if self._timer_s == due_s:
            self._timer_s = None
        now_due_s = machine.next_due_s(self.state)
        if now_due_s is not None and now_due_s <= self._now_s():
            self.feed(Tick())
        else:
            self._set_timer()

    def _act(self, action: Action) -> None:
        if isinstance(action, SendFact):
            self.tell(action.fact)
        elif isinstance(action, Forward):
            for slot in action.slots:
                if slot in self._trainers:
                    self._trainers[slot][1].send(("plan", action.plan))
        elif isinstance(action, StopTrainers):
            for slot in action.slots:
                if slot in self._trainers:
                    self._trainers[slot][1].send(("stop", None))
        elif isinstance(action, Fork):
            self._tell_launcher(("fork", action.slot, action.incarnation))
        elif isinstance(action, SignalSlot):
            self._tell_launcher(("signal", action.slot, action.incarnation))
        elif isinstance(action, Release):
            self.spawn(self._end_when_quiet())
        elif isinstance(action, Leave):
            self.left = action.exit_code
            self._tell_launcher(("stop", 0, ""))
            self.after(0.1, self.world.left, self)

    def _end_when_quiet(self) -> Steps[None]:
        while not self._gather.is_quiet:
            yield self._gather.quiet
        self.feed(Ended("its work is handed over"))

    def _tell_launcher(self, message: tuple[str, int, str]) -> None:
        if self._launcher_end is not None:
            self._launcher_end.send(message)

    # Launcher and trainers --------------------------------------------------

    def _accept(self, end: End) -> None:
        end.on_message = lambda hello: self._on_hello(end, hello)

    def _on_hello(self, end: End, hello: tuple[str, Any, Any]) -> None:
        kind, slot, incarnation = hello
        if kind == "launcher":
            self._launcher_end = end
            end.on_message = self._on_launcher
            end.on_end = lambda _: self._on_launcher_end()
            self.feed(LauncherUp())
            self.spawn(self.work() if not self._known else self.register_again())
            self._known = True
            return
        end.on_message = lambda frame: self._on_first(end, slot, incarnation, frame)

    def _on_first(
        self, end: End, slot: int, incarnation: Incarnation, frame: tuple[str, Any]
    ) -> None:
        if frame[0] != "hello":
            return
        expected = self.state.slots[slot]
        if expected.incarnation != incarnation or expected.phase is not SlotPhase.FORKING:
            end.close()
            return
        self._trainers[slot] = (incarnation, end)
        end.on_message = lambda frame: self._on_trainer(slot, incarnation, frame)
        end.on_end = lambda _: self._on_trainer_end(slot, incarnation)
        self.feed(Hello(slot, incarnation, 1, {}))

    def _on_launcher(self, message: tuple[str, int, Incarnation, Any]) -> None:
        kind, slot, incarnation, how = message
        if kind == "forked":
            self.feed(Forked(slot, incarnation, 1))
        else:
            code, signal = how
            self.feed(Exited(slot, incarnation, code, signal))

    def _on_launcher_end(self) -> None:
        self._launcher_end = None
        self.feed(LauncherLost())

    def _on_trainer_end(self, slot: int, incarnation: Incarnation) -> None:
        if slot in self._trainers and self._trainers[slot][0] == incarnation:
            del self._trainers[slot]
        self.feed(SocketEnded(slot, incarnation))

    def _on_trainer(self, slot: int, incarnation: Incarnation, frame: tuple[Any, ...]) -> None:
        kind = frame[0]
        if kind == "status":
            self.feed(StatusSeen(slot, incarnation, frame[1]))
        elif kind == "fact":
            self.feed(FactSeen(slot, incarnation, frame[1]))
        elif kind == "plan":
            self.passed(frame[1])
        elif kind == "ledger":
            self.record(frame[1], post=frame[2])
            with suppress(LocalProtocolError):  # as the real shell does: the end was seen first
                self.feed(Committed(slot, incarnation))

    def registration(self) -> PodRegistration:
        """Return what the pod introduces itself with."""
        assert self.launcher is not None
        return PodRegistration(
            pod=self.pod,
            name=self.pod,
            address=self.pod,
            gather=self._gather_address,
            store=self.launcher.store_address,
            num_slots=self.world.slots_per_pod,
            pid=self.number,
        )
