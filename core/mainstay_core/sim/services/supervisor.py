"""A simulated supervisor: a pod with its sockets, on a network that is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.sim.engine import Process
from mainstay_core.sim.gather import GatherServer
from mainstay_core.sim.network import End, Listener
from mainstay_core.sim.segments import SegmentStore
from mainstay_core.sim.services.api_client import ApiClient
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.supervisor.events import (
    Event,
    Exited,
    FactSeen,
    Fork,
    Forked,
    Forward,
    Hello,
    Signal,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    Tick,
)
from mainstay_core.supervisor.gossip import OFFER_TIMEOUT_S, Holds, follow_up
from mainstay_core.supervisor.launcher import ForkAsked, SignalAsked, StopAsked
from mainstay_core.supervisor.machine import next_due_s
from mainstay_core.supervisor.pod import Pod
from mainstay_core.wire.api import ApiRefused, Registration
from mainstay_core.wire.facts import Named, PodRegistration
from mainstay_core.wire.plan import Plan


class Supervisor(Process, Pod):
    """One life of a pod's supervisor.

    Args:
        world: everything around it.
        pod: the pod's UID.
        number: of this life: a restarted supervisor has another pid.
    """

    def __init__(self, world: Surroundings, pod: PodUid, number: int) -> None:
        Process.__init__(self, world.engine, f"{pod}~{number}", pod)
        client = ApiClient(world, self, lambda: self.state.plan.quorum if self.state.plan else None)
        Pod.__init__(self, world.config.job, pod, world.slots_per_pod, client)
        self.world, self.pod, self.number = world, pod, number
        self.left: int | None = None
        self.heard_named: set[Slot] = set()
        """Devices that its trainers have named: it must not forget them while it lives."""
        self._gather_address = f"gather@{pod}.{number}"
        self._gather = GatherServer(
            self, world.network, self._gather_address, world.checks, self.learn_passed
        )
        world.network.listen(f"socket@{pod}.{number}", Listener(self, accept=self._accept))
        self.segments: SegmentStore | None = None
        if world.config.snapshots is not None:
            self.segments = SegmentStore(world, self, pod, f"segments@{pod}.{number}")
        self._trainers: dict[int, tuple[Incarnation, End]] = {}
        self._timer_s: float | None = None

    # What a pod asks of its shell --------------------------------------------------

    def feed(self, event: Event) -> None:
        """Have the state machine decide, unless this life is over."""
        if self.left is None and self.alive:
            super().feed(event)

    def now_s(self) -> float:
        return self.world.clock(self.pod)

    def draw_nonce(self) -> str:
        return self.world.draw_name()

    def log(self, reason: str) -> None:
        if self.engine.tracing and reason:
            self.engine.say(self.name, reason)

    def wake_at(self, due_s: float | None) -> None:
        """Feed a tick then; a timer that comes too early finds out by itself."""
        if due_s is None or (self._timer_s is not None and self._timer_s <= due_s):
            return
        self._timer_s = due_s
        self.after(max(0.0, due_s - self.now_s()) + 0.001, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        if self._timer_s == due_s:
            self._timer_s = None
        now_due_s = next_due_s(self.state)
        if now_due_s is not None and now_due_s <= self.now_s():
            self.feed(Tick())
        else:
            self.wake_at(now_due_s)

    def call_later(self, delay_s: float, call: Callable[[Plan], None], plan: Plan) -> None:
        self.after(delay_s, call, plan)

    def hold(self, plan: Plan) -> None:
        self._gather.hold(plan)
        if self.segments is not None:
            self.segments.adopt(plan)

    def offer_to(self, address: str, plan: Plan) -> None:

        def opened(end: End) -> None:
            def answered(answer: Any) -> None:
                after = follow_up(plan, answer)
                if after.give is not None:
                    end.send(after.give)
                    return
                if after.learn is not None:
                    self.learn_passed(after.learn)
                end.close()

            end.on_message = answered
            end.send(Holds(plan.quorum))
            self.after(OFFER_TIMEOUT_S, end.close)

        self.world.network.connect(self, address, opened, _ignore, OFFER_TIMEOUT_S)

    def send_trainers(self, action: Forward | StopTrainers) -> None:
        frame = ("plan", action.plan) if isinstance(action, Forward) else ("stop", None)
        for slot in action.slots:
            if slot in self._trainers:
                self._trainers[slot][1].send(frame)

    def send_launcher(self, action: Fork | Signal) -> None:
        if self.launcher is None:
            return
        if isinstance(action, Fork):
            self.launcher.send(ForkAsked(action.slot, action.incarnation))
        else:
            self.launcher.send(SignalAsked(action.slot, action.number))

    async def wait_quiet(self) -> None:
        while not self._gather.is_quiet:
            await self._gather.quiet

    def leave(self, exit_code: int) -> None:
        """End, a moment after the launcher is told to."""
        self.left = exit_code
        if self.launcher is not None:
            self.launcher.send(StopAsked())
        self.after(0.1, self.kill)

    def welcomed(self, answer: Registration) -> None:
        """Nothing is kept but what the conversation keeps."""

    async def work(self) -> None:
        try:
            await super().work()
        except ApiRefused as refusal:
            self.log(f"ends: {refusal}")
            self.kill()

    def registration(self) -> PodRegistration:
        return PodRegistration(
            pod=self.pod,
            name=self.pod,
            address=self.pod,
            gather=self._gather_address,
            num_slots=self.world.slots_per_pod,
            pid=self.number,
            domain=self.pod if self.segments else "",
            snapshots=self.segments.address if self.segments else "",
        )

    # Launcher and trainers ---------------------------------------------------------

    def _accept(self, end: End) -> None:
        end.on_message = lambda hello: self._on_hello(end, hello)

    def _on_hello(self, end: End, hello: tuple[str, int, Incarnation]) -> None:
        kind, slot, incarnation = hello
        if kind == "trainer":
            end.on_message = lambda frame: self._on_first(end, slot, incarnation, frame)
            return
        end.on_message = self._on_launcher
        end.on_end = lambda _: self.launcher_left()
        self.launcher_came(end)

    def _on_launcher(self, told: Forked | Exited) -> None:
        self.feed(told)

    def _on_first(
        self, end: End, slot: int, incarnation: Incarnation, frame: tuple[str, Any]
    ) -> None:
        if frame[0] != "hello":
            return
        try:
            self.check_hello(slot, incarnation)
        except RemoteProtocolError:
            end.close()
            return
        self._trainers[slot] = (incarnation, end)
        end.on_message = lambda frame: self._on_trainer(slot, incarnation, frame)
        end.on_end = lambda _: self._on_trainer_end(slot, incarnation)
        self.feed(Hello(slot, incarnation, 1, {}, frame[1]))

    def _on_trainer_end(self, slot: int, incarnation: Incarnation) -> None:
        if slot in self._trainers and self._trainers[slot][0] == incarnation:
            del self._trainers[slot]
        self.feed(SocketEnded(slot, incarnation))

    def _on_trainer(self, slot: int, incarnation: Incarnation, frame: tuple[Any, ...]) -> None:
        kind = frame[0]
        if kind == "status":
            self.feed(StatusSeen(slot, incarnation, frame[1]))
        elif kind == "fact":
            if isinstance(frame[1], Named):
                self.heard_named.add(frame[1].named)
            self.feed(FactSeen(slot, incarnation, frame[1]))
        elif kind == "plan":
            self.learn_passed(frame[1])
        elif kind == "ledger":
            self.record(slot, incarnation, frame[1], post=frame[2])


def _ignore(why: str) -> None:
    del why
