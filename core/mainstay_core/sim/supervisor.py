"""A simulated supervisor: the shell of ``mainstay_agent.supervisor`` around the state machine.

With its outboxes, heartbeats and stream (``mainstay_agent.outbox``, ``.api_line``)
and the pod's gather server.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mainstay_core import supervision
from mainstay_core.errors import LocalProtocolError
from mainstay_core.facts import Fact, PodRegistration
from mainstay_core.ids import Incarnation, PodUid, QuorumId
from mainstay_core.messages import LedgerEntry, Plan
from mainstay_core.sim.api import Reply, Request
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.launcher import Launcher
from mainstay_core.sim.network import End, Listener, Unreachable
from mainstay_core.sim.rooms import GatherServer
from mainstay_core.sim.store import Item
from mainstay_core.supervision_events import (
    Action,
    Committed,
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
    PlanLearnt,
    Registered,
    SlotPhase,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    SupervisionSettings,
    Tell,
    Tick,
)
from mainstay_core.supervision_events import (
    Signal as SignalSlot,
)

if TYPE_CHECKING:
    from mainstay_core.sim.world import World

RETRY_FIRST_S = 0.01
RETRY_MAX_S = 1.0
REQUEST_TIMEOUT_S = 10.0


class Backoff:
    """Delays between attempts, doubled up to a bound."""

    def __init__(self) -> None:
        self.next_s = RETRY_FIRST_S

    def wait(self) -> Steps[None]:
        """Sleep for the next delay."""
        delay_s, self.next_s = self.next_s, min(RETRY_MAX_S, self.next_s * 2)
        yield delay_s


class Refused(Exception):  # noqa: N818 - an answer, not a mistake
    """The api understood and said no."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"{reply.error}: {reply.body}")
        self.reply = reply

    @property
    def is_unknown(self) -> bool:
        """Whether the api does not know the pod: register again."""
        return self.reply.error == "unregistered"


class Supervisor(Process):
    """One life of a pod's supervisor.

    Args:
        world: everything around it.
        pod: the pod's UID.
        number: of this life: a restarted supervisor has another pid.
    """

    def __init__(self, world: World, pod: PodUid, number: int) -> None:
        super().__init__(world.engine, f"{pod}~{number}", pod)
        self.world, self.pod, self.number = world, pod, number
        self.state = supervision.initial(pod, world.slots_per_pod)
        self.left: int | None = None
        self._gather_address = f"gather@{pod}.{number}"
        GatherServer(self, world.network, self._gather_address, world.checks)
        world.network.listen(f"socket@{pod}.{number}", Listener(self, accept=self._accept))
        self.launcher: Launcher | None = None
        self._launcher_end: End | None = None
        self._trainers: dict[int, tuple[Incarnation, End]] = {}
        self._known = False
        self._cursor: int | None = None
        self._timer_s: float | None = None
        self._facts: deque[Fact] = deque()
        self._facts_changed = Signal()
        self._fact_backoff = Backoff()
        self._ledger: deque[LedgerEntry] = deque()
        self._ledger_changed = Signal()

    # The state machine ------------------------------------------------------

    def _now_s(self) -> float:
        return self.world.clock(self.pod)

    def feed(self, event: Event) -> None:
        """Have the state machine decide."""
        if self.left is not None or not self.alive:
            return
        done = supervision.step(self.state, event, self._now_s(), self.world.draw_name())
        self.state = done.state
        if self.engine.tracing and done.reason:
            self.engine.say(self.name, done.reason)
        for action in done.actions:
            self._act(action)
        self._set_timer()

    def _set_timer(self) -> None:
        due_s = supervision.next_due_s(self.state)
        if due_s is None or (self._timer_s is not None and self._timer_s <= due_s):
            return
        self._timer_s = due_s
        self.after(max(0.0, due_s - self._now_s()) + 0.001, self._tick, due_s)

    def _tick(self, due_s: float) -> None:
        if self._timer_s == due_s:
            self._timer_s = None
        now_due_s = supervision.next_due_s(self.state)
        if now_due_s is not None and now_due_s <= self._now_s():
            self.feed(Tick())
        else:
            self._set_timer()

    def _act(self, action: Action) -> None:
        if isinstance(action, Tell):
            if action.fact not in self._facts:
                self._facts.append(action.fact)
                self._facts_changed.fire()
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
        elif isinstance(action, Leave):
            self.left = action.exit_code
            self._tell_launcher(("stop", 0, ""))
            self.after(0.1, self.world.left, self)

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
            self.spawn(self._work() if not self._known else self._register_again())
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
        elif kind == "ledger":
            if frame[2]:
                self._ledger.append(frame[1])
                self._ledger_changed.fire()
            with suppress(LocalProtocolError):  # as the real shell does: the end was seen first
                self.feed(Committed(slot, incarnation))

    # The api ----------------------------------------------------------------

    def _request(self, route: str, body: object) -> Steps[Reply]:
        reply: Reply = yield from self.world.network.request(
            self, self.world.pick_api(), Request(route, body), REQUEST_TIMEOUT_S
        )
        if reply.status == 503:
            raise Unreachable(reply.error)
        if reply.status != 200:
            raise Refused(reply)
        return reply

    def _until_answered(self, route: str, body: object) -> Steps[Reply]:
        backoff = Backoff()
        while True:
            try:
                return (yield from self._request(route, body))
            except Unreachable:
                yield from backoff.wait()

    def _work(self) -> Steps[None]:
        yield from self._register()
        for steps in (self._post_facts(), self._post_ledger(), self._beat(), self._follow()):
            self.spawn(steps)

    def _register(self) -> Steps[None]:
        assert self.launcher is not None
        registration = PodRegistration(
            pod=self.pod,
            name=self.pod,
            address=self.pod,
            gather=self._gather_address,
            store=self.launcher.store_address,
            num_slots=self.world.slots_per_pod,
            pid=self.number,
        )
        reply = yield from self._until_answered("pods", registration)
        if self._cursor is None:
            self._cursor = reply.body
        if reply.plan is not None:
            self.feed(PlanLearnt(reply.plan))
        config = self.world.config
        settings = SupervisionSettings(
            max_restarts=config.max_restarts,
            hang_s=config.hang_s,
            silence_s=config.heartbeat_timeout_s,
        )
        self.feed(Registered(settings))

    def _register_again(self) -> Steps[None]:
        try:
            yield from self._register()
        except Refused as refusal:
            self.engine.say(self.name, f"registration refused: {refusal}")

    def _beat(self) -> Steps[None]:
        interval_s = self.world.config.heartbeat_s
        due_s = self.engine.now_s
        while True:
            self.feed(HeartbeatDue())
            held = self.state.plan.quorum if self.state.plan else None
            try:
                reply = yield from self._request("heartbeats", self.pod)
                yield from self._on_beat(held, reply)
            except Unreachable:
                pass
            except Refused as refusal:
                if refusal.is_unknown:
                    yield from self._register_again()
            due_s = max(due_s + interval_s, self.engine.now_s)
            yield due_s - self.engine.now_s

    def _on_beat(self, held: QuorumId | None, reply: Reply) -> Steps[None]:
        beat = reply.body
        if beat.phase in ("complete", "failed", "stopped"):
            self.feed(Ended(f"the job is {beat.phase}"))
        elif beat.quorum is not None and (held is None or beat.quorum.id > held.id):
            answer = yield from self._request("plan", None)
            if answer.plan is not None:
                self.feed(PlanLearnt(answer.plan))

    def _post_facts(self) -> Steps[None]:
        while True:
            while self._facts:
                yield from self._post(tuple(self._facts))
            yield self._facts_changed

    def _post(self, facts: tuple[Fact, ...]) -> Steps[bool]:
        """Post once; return whether it was heard."""
        plan: Plan | None
        try:
            plan = (yield from self._request("facts", facts)).plan
        except Unreachable:
            yield from self._fact_backoff.wait()
            return False
        except Refused as refusal:
            if refusal.is_unknown:
                yield from self._register_again()
                yield from self._fact_backoff.wait()
                return False
            if len(facts) > 1:
                for fact in facts:
                    if not (yield from self._post((fact,))):
                        return False
                return True
            plan = refusal.reply.plan
        self._fact_backoff = Backoff()
        for fact in facts:
            self._facts.remove(fact)
        if plan is not None:
            self.feed(PlanLearnt(plan))
        return True

    def _post_ledger(self) -> Steps[None]:
        while True:
            while self._ledger:
                batch = tuple(self._ledger)
                self._ledger.clear()
                try:
                    yield from self._until_answered("ledger", batch)
                except Refused as refusal:
                    self.engine.say(self.name, f"ledger refused: {refusal}")
            yield self._ledger_changed

    def _follow(self) -> Steps[None]:
        """Read the stream; it goes on where it broke off."""
        backoff = Backoff()
        changed = Signal()
        while True:
            ended: list[str] = []

            def over(why: str, ended: list[str] = ended) -> None:
                ended.append(why)
                changed.fire()

            def opened(end: End, over: Any = over) -> None:
                end.on_message, end.on_end = self._on_item, over
                end.send(self._cursor)
                backoff.next_s = RETRY_FIRST_S

            self.world.network.connect(self, self.world.pick_api(), opened, over, 10.0)
            while not ended:
                yield changed
            yield from backoff.wait()

    def _on_item(self, item: Item) -> None:
        self._cursor = max(self._cursor or 0, item.number)
        if item.kind == "plan":
            assert isinstance(item.body, Plan)
            self.feed(PlanLearnt(item.body))
        else:
            self.feed(Ended("the job is over"))
