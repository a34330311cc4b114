"""One api replica: load, decide, compare-and-set, publish; streams and the ticker.

As ``mainstay_api.service``, ``.ticker``, ``.streams`` and the agent routes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mainstay_core import coordinator
from mainstay_core.coordinator_events import (
    EndJob,
    Event,
    FactsLearnt,
    PlanDurable,
    PodRegistered,
    PublishPlan,
    StepsCommitted,
    Tick,
    Transition,
)
from mainstay_core.errors import RemoteProtocolError, StoreConflictError
from mainstay_core.facts import Fact, PodRegistration
from mainstay_core.jobstate import CoordinatorState, uid_of
from mainstay_core.learning import UnregisteredPodError
from mainstay_core.messages import LedgerEntry, Plan
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.network import End, Exchange, Listener
from mainstay_core.sim.store import Change, Data, Item, StoreUnavailableError

if TYPE_CHECKING:
    from mainstay_core.sim.world import World

TICK_PENDING_S = 0.1
TICK_IDLE_S = 1.0
LEASE_S = 3.0
MAX_CONFLICTS = 64
RETRY_S = 0.2
MAX_GAP_BEATS = 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a supervisor or the provider asks."""

    route: str
    body: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer: a status, and a plan where there is one."""

    status: int
    plan: Plan | None = None
    error: str = ""
    body: Any = None


class Silence:
    """How far the pods are behind the job's newest heartbeat (``mainstay_api.ticker``)."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._behind_s: dict[str, float] = {}
        self._newest_s = 0.0

    def update(self, seen_s: dict[str, float], heartbeat_s: float) -> dict[str, float]:
        """Return the silence of each pod in seconds, after another look."""
        newest_s = max(seen_s.values(), default=0.0)
        passed_s = newest_s - self._newest_s if self._newest_s else 0.0
        passed_s = min(max(passed_s, 0.0), MAX_GAP_BEATS * heartbeat_s)
        self._behind_s = {
            pod: self._behind_s.get(pod, 0.0) + passed_s if self._seen.get(pod) == at_s else 0.0
            for pod, at_s in seen_s.items()
        }
        self._seen, self._newest_s = dict(seen_s), newest_s
        return self._behind_s


class Api(Process):
    """One replica, one life of it."""

    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world.engine, f"{name}.{life}", name)
        self.world, self.store = world, world.store
        self._busy = False
        self._turns: deque[Signal] = deque()
        self._streams: dict[End, int] = {}
        self._reading = False
        self._life = life
        listener = Listener(self, accept=self._accept, serve=self._serve)
        world.network.listen(name, listener)
        self.spawn(self._tick())

    def now_s(self) -> float:
        """Wall clock of this replica."""
        return self.world.clock(self.node)

    def _call(self, work: Callable[[Data], Any]) -> Steps[Any]:
        return (yield from self.store.call(self.node, work))

    # Requests ---------------------------------------------------------------

    def _serve(self, exchange: Exchange, request: Request) -> None:
        self.spawn(self._answer(exchange, request))

    def _answer(self, exchange: Exchange, request: Request) -> Steps[None]:
        try:
            reply = yield from self._route(request)
        except UnregisteredPodError as error:
            reply = Reply(409, error="unregistered", body=str(error))
        except RemoteProtocolError as error:
            reply = Reply(409, error="conflict", body=str(error))
        except (StoreConflictError, StoreUnavailableError) as error:
            reply = Reply(503, error=str(error))
        exchange.reply(reply)

    def _route(self, request: Request) -> Steps[Reply]:
        body = request.body
        if request.route == "pods":
            return (yield from self._register(body))
        if request.route == "heartbeats":
            beat = yield from self._call(self.store.beat(body))
            if not beat.known:
                raise UnregisteredPodError(f"pod {body} is unknown or counts as gone")
            return Reply(200, body=beat)
        if request.route == "facts":
            return (yield from self._learn(body))
        if request.route == "ledger":
            yield from self._add_to_ledger(body)
            return Reply(200)
        return Reply(200, plan=(yield from self._call(lambda data: data.plan)))

    def _register(self, registration: PodRegistration) -> Steps[Reply]:
        yield from self.apply(PodRegistered(registration=registration))
        plan, cursor = yield from self._call(lambda data: (data.plan, len(data.stream)))
        yield from self._call(lambda data: data.version)
        return Reply(200, plan=plan, body=cursor)

    def _learn(self, facts: tuple[Fact, ...]) -> Steps[Reply]:
        outcome = yield from self.apply(FactsLearnt(facts=facts))
        return Reply(409 if outcome.stale else 200, plan=outcome.state.plan)

    def _add_to_ledger(self, entries: tuple[LedgerEntry, ...]) -> Steps[None]:
        keys = [e.key for e in entries]
        known = yield from self._call(lambda data: {k: data.ledger.get(k) for k in keys})
        fresh = []
        for entry in entries:
            old = known[entry.key]
            if old == entry or (old is not None and old.quorum.id > entry.quorum.id):
                continue
            if old is not None:
                self.world.checks.same_entry(old, entry)
            fresh.append(entry)
        yield from self._call(lambda data: data.ledger.update({e.key: e for e in fresh}))
        for step in sorted({e.step for e in fresh}):
            yield from self._commit_step(step)

    def _commit_step(self, step: int) -> Steps[None]:
        keys = [(step, *position) for position in self.world.config.shape.positions]
        found = yield from self._call(lambda data: [data.ledger.get(key) for key in keys])
        if any(entry is None for entry in found):
            return
        newest = max(found, key=lambda e: (e.quorum.id, e.stage, e.inner))
        at_s = max(e.committed_at_s for e in found)
        yield from self.apply(
            StepsCommitted(
                step=step, quorum=newest.quorum, committed_at_s=at_s, step_s=newest.step_s
            )
        )

    # Decisions --------------------------------------------------------------

    def apply(self, event: Event) -> Steps[Transition]:
        """Decide on an event and make the outcome durable; one at a time in this process.

        Raises:
            RemoteProtocolError: the job does not accept the event.
            StoreConflictError: others decided first, too often in a row.
            StoreUnavailableError: the store is away.
        """
        while self._busy:
            turn = Signal()
            self._turns.append(turn)
            yield turn
        self._busy = True
        try:
            outcome = yield from self._decide(event)
        finally:
            self._busy = False
            if self._turns:
                self._turns.popleft().fire()
        if outcome.plan is not None:
            self.spawn(self._note_durable(outcome.plan))
        return outcome

    def _decide(self, event: Event) -> Steps[Transition]:
        for _ in range(MAX_CONFLICTS):
            version, before = yield from self._call(lambda data: (data.version, data.state))
            outcome = self._step(before, event)
            if not outcome.actions and outcome.state == before:
                return outcome
            self.world.faults.reach_api(self, outcome, "api-decided")
            try:
                yield from self._call(self.store.commit(version, change_of(before, outcome)))
            except StoreConflictError:
                continue
            self.world.faults.reach_api(self, outcome, "api-committed")
            if self.engine.tracing and outcome.actions:
                self.engine.say(self.name, outcome.reason)
            return outcome
        raise StoreConflictError("too many races lost in a row")

    def _step(self, before: CoordinatorState, event: Event) -> Transition:
        outcome = coordinator.step(before, event, self.now_s(), self.world.draw_name())
        self.world.checks.decided(before, outcome)
        return outcome

    def _note_durable(self, plan: Plan) -> Steps[None]:
        with suppress(RemoteProtocolError, StoreConflictError, StoreUnavailableError):
            yield from self.apply(PlanDurable(quorum=plan.quorum, at_s=self.now_s()))

    # Silence ----------------------------------------------------------------

    def _tick(self) -> Steps[None]:
        silence, renew_at_s, look_at_s = Silence(), 0.0, 0.0
        while True:
            now_s = self.engine.now_s
            try:
                holds = True
                if now_s >= renew_at_s:
                    holds = yield from self._call(self.store.hold_lease(self.name, LEASE_S))
                    if holds:
                        renew_at_s = now_s + LEASE_S / 3
                    else:
                        silence = Silence()
                if holds and now_s >= look_at_s:
                    seen_s = yield from self._call(lambda data: dict(data.seen_s))
                    behind_s = silence.update(seen_s, self.world.config.heartbeat_s)
                    outcome = yield from self.apply(Tick(behind_s=behind_s))
                    if outcome.state.terminal:
                        return
                    pending = coordinator.is_pending(outcome.state)
                    look_at_s = now_s + (0.0 if pending else TICK_IDLE_S)
            except (StoreConflictError, StoreUnavailableError):
                pass
            yield TICK_PENDING_S

    # Streams ----------------------------------------------------------------

    def _accept(self, end: End) -> None:
        def opened(cursor: int) -> None:
            self.spawn(self._follow(end, cursor))

        def ended(why: str) -> None:
            del why
            self._streams.pop(end, None)

        end.on_message, end.on_end = opened, ended

    def _follow(self, end: End, cursor: int) -> Steps[None]:
        """Send the current plan, what was missed, and then what comes."""
        try:
            plan, upto, ended = yield from self._call(
                lambda data: (data.plan, len(data.stream), data.state.terminal)
            )
            if plan is not None:
                end.send(Item(0, "plan", plan))
            missed = yield from self._call(lambda data: data.stream[cursor:upto])
            for item in missed:
                end.send(item)
            if ended:
                end.send(Item(0, "stop", None))
        except StoreUnavailableError:
            end.close()
            return
        if end.open:
            self._streams[end] = upto
            if not self._reading:
                self._reading = True
                self.spawn(self._read(upto))

    def _read(self, cursor: int) -> Steps[None]:
        while True:
            try:
                items = yield from self._call(partial(_after, cursor))
            except StoreUnavailableError:
                yield RETRY_S
                continue
            for item in items:
                cursor = item.number
                for end, upto in self._streams.items():
                    if item.number > upto:
                        end.send(item)
            if not items:
                yield self.store.changed


def _after(cursor: int, data: Data) -> list[Item]:
    return data.stream[cursor:]


def change_of(before: CoordinatorState, outcome: Transition) -> Change:
    """Return what a transition makes visible (``mainstay_api.service.change_of``)."""
    was_gone = {uid_of(p) for p in before.pods if p.gone}
    was_there = {uid_of(p) for p in before.pods} - was_gone
    is_gone = {uid_of(p) for p in outcome.state.pods if p.gone}
    is_there = {uid_of(p) for p in outcome.state.pods} - is_gone
    items: list[tuple[str, object]] = []
    for action in outcome.actions:
        if isinstance(action, PublishPlan):
            items.append(("plan", action.plan))
        elif isinstance(action, EndJob):
            items.append(("stop", action.state))
    return Change(
        state=outcome.state,
        plan=outcome.plan,
        items=tuple(items),
        arrived=tuple(sorted(is_there - was_there)),
        gone=tuple(sorted(is_gone - was_gone)),
    )
