"""A simulated supervisor's conversation with the api.

As ``mainstay_agent.api_connection`` and ``mainstay_agent.outbox``: registration, heartbeats,
facts until they are acknowledged, the ledger, the stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.sim.deciding import Reply, Request
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.network import End, Unreachable
from mainstay_core.sim.passing import Passing, restoration_of
from mainstay_core.sim.store import Item
from mainstay_core.supervisor import machine
from mainstay_core.supervisor.events import (
    Ended,
    Event,
    HeartbeatDue,
    LeaveAcknowledged,
    PlanReceived,
    Registered,
    SupervisorLimits,
)
from mainstay_core.wire.facts import Fact, Leaving, PodRegistration
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

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
        """Whether the api does not know the job, the pod or our plan: register again."""
        return self.reply.error in ("unregistered", "store-behind", "unknown-job")


class ApiLine(Process, ABC):
    """The part of a supervisor that talks to the api."""

    def __init__(self, world: World, pod: PodUid, name: str) -> None:
        super().__init__(world.engine, name, pod)
        self.world, self.pod = world, pod
        self.state = machine.initial(pod, world.slots_per_pod)
        self.passing = Passing(self)
        self.stands = False
        """Whether the stream is open."""
        self._cursor: int | None = None
        self._facts: deque[Fact] = deque()
        self._facts_changed = Signal()
        self._fact_backoff = Backoff()
        self._ledger: deque[LedgerEntry] = deque()
        self._held_ledger: list[LedgerEntry] = []
        self._ledger_changed = Signal()
        self._registering = False
        self._registered_once = False
        self._turn = Signal()
        self._restored_at_s = 0.0

    @abstractmethod
    def feed(self, event: Event) -> None:
        """Have the state machine decide."""

    @abstractmethod
    def registration(self) -> PodRegistration:
        """Return what the pod introduces itself with."""

    def passed(self, plan: Plan) -> None:
        """Another supervisor has given a plan."""
        self.feed(PlanReceived(plan))

    def tell(self, fact: Fact) -> None:
        """Post a fact until it is acknowledged."""
        if fact not in self._facts:
            self._facts.append(fact)
            self._facts_changed.fire()

    def record(self, entry: LedgerEntry, *, post: bool) -> None:
        """Hold a ledger entry; with ``post`` mirror it to the api."""
        self._held_ledger.append(entry)
        if post:
            self._ledger.append(entry)
            self._ledger_changed.fire()

    @property
    def _held(self) -> QuorumId | None:
        return self.state.plan.quorum if self.state.plan else None

    def _request(self, route: str, body: object) -> Steps[Reply]:
        reply: Reply = yield from self.world.network.request(
            self, self.world.pick_api(), Request(route, body, self._held), REQUEST_TIMEOUT_S
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

    def work(self) -> Steps[None]:
        """Introduce the pod, then talk to the api for ever."""
        yield from self._register()
        for steps in (self._post_facts(), self._post_ledger(), self._beat(), self._follow()):
            self.spawn(steps)

    def _register(self) -> Steps[None]:
        registration = self.registration()
        while self._registering:
            yield self._turn
        self._registering = True
        try:
            reply = yield from self._introduce(registration)
        finally:
            self._registering = False
            self._turn.fire()
        cursor, restored_at_s = reply.body
        if self._cursor is None:
            self._cursor = cursor
        if self._registered_once and restored_at_s != self._restored_at_s:
            self._ledger = deque(self._held_ledger)
            self._ledger_changed.fire()
        self._restored_at_s, self._registered_once = restored_at_s, True
        if reply.plan is not None:
            self.feed(PlanReceived(reply.plan))
        config = self.world.config
        settings = SupervisorLimits(
            max_restarts=config.max_restarts,
            hang_s=config.hang_s,
            silence_s=config.heartbeat_timeout_s,
            handover_s=config.handover_s,
        )
        self.feed(Registered(settings))

    def _introduce(self, registration: PodRegistration) -> Steps[Reply]:
        backoff = Backoff()
        while True:
            try:
                return (yield from self._until_answered("pods", registration))
            except Refused as refusal:
                if not refusal.is_unknown:
                    raise
                if self._registered_once and not self.state.ending:
                    yield from self._until_answered("restore", restoration_of(self.state))
            yield from backoff.wait()

    def register_again(self) -> Steps[None]:
        """Introduce the pod anew: its store has moved, or the api has forgotten it."""
        try:
            yield from self._register()
        except Refused as refusal:
            self.engine.say(self.name, f"registration refused: {refusal}")

    def _beat(self) -> Steps[None]:
        interval_s = self.world.config.heartbeat_s
        due_s = self.engine.now_s
        while True:
            self.feed(HeartbeatDue())
            held = self._held
            try:
                reply = yield from self._request("heartbeats", self.pod)
                yield from self._on_beat(held, reply)
                if reply.body.restored_at_s != self._restored_at_s:
                    yield from self.register_again()
            except Unreachable:
                self.passing.offer()
            except Refused as refusal:
                if refusal.is_unknown:
                    yield from self.register_again()
            due_s = max(due_s + interval_s, self.engine.now_s)
            yield due_s - self.engine.now_s

    def _on_beat(self, held: QuorumId | None, reply: Reply) -> Steps[None]:
        beat = reply.body
        if beat.phase in ("complete", "failed", "stopped", "suspended"):
            self.feed(Ended(f"the job is {beat.phase}"))
        elif beat.quorum is not None and (held is None or beat.quorum.id > held.id):
            answer = yield from self._request("plan", None)
            if answer.plan is not None:
                self.feed(PlanReceived(answer.plan))

    def _post_facts(self) -> Steps[None]:
        while True:
            while self._facts:
                yield from self._post(tuple(self._facts))
            yield self._facts_changed

    def _post(self, facts: tuple[Fact, ...]) -> Steps[bool]:
        """Post once; return whether it was heard."""
        plan: Plan | None
        refused = False
        try:
            plan = (yield from self._request("facts", facts)).plan
        except Unreachable:
            yield from self._fact_backoff.wait()
            return False
        except Refused as refusal:
            if refusal.is_unknown:
                yield from self.register_again()
                yield from self._fact_backoff.wait()
                return False
            if len(facts) > 1:
                for fact in facts:
                    if not (yield from self._post((fact,))):
                        return False
                return True
            plan = refusal.reply.plan
            refused = True
        self._fact_backoff = Backoff()
        for fact in facts:
            self._facts.remove(fact)
        if plan is not None:
            self.feed(PlanReceived(plan))
        if not refused and any(isinstance(fact, Leaving) for fact in facts):
            self.feed(LeaveAcknowledged())
        return True

    def _post_ledger(self) -> Steps[None]:
        while True:
            while self._ledger:
                batch = tuple(self._ledger)
                self._ledger.clear()
                backoff = Backoff()
                while not (yield from self._mirror(batch)):
                    yield from backoff.wait()
            yield self._ledger_changed

    def _mirror(self, batch: tuple[LedgerEntry, ...]) -> Steps[bool]:
        try:
            yield from self._until_answered("ledger", batch)
        except Refused as refusal:
            if refusal.is_unknown:
                yield from self.register_again()
                return False
            self.engine.say(self.name, f"ledger refused: {refusal}")
        return True

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
                self.stands = True
                backoff.next_s = RETRY_FIRST_S

            self.world.network.connect(self, self.world.pick_api(), opened, over, 10.0)
            while not ended:
                yield changed
            self.stands = False
            yield from backoff.wait()

    def _on_item(self, item: Item) -> None:
        self._cursor = max(self._cursor or 0, item.number)
        if item.kind == "plan":
            assert isinstance(item.body, Plan)
            self.feed(PlanReceived(item.body))
        else:
            self.feed(Ended("the job is over"))
