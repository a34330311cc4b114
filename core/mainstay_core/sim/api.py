"""One api replica: load, decide, compare-and-set, publish; streams and the ticker.

As ``mainstay_api.transactions``, ``.ticker``, ``.streams`` and the agent routes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mainstay_core.base.errors import (
    InvalidSpecError,
    MainstayError,
    RemoteProtocolError,
    StoreConflictError,
)
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    DrainRequested,
    Event,
    FactsReported,
    PlanReported,
    PlanStored,
    PodRegistered,
    StepsCommitted,
    StoreReopened,
    SuspendRequested,
    Tick,
    Transition,
)
from mainstay_core.coordinator.heartbeats import HeartbeatLag
from mainstay_core.coordinator.intake import UnregisteredPodError
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.coordinator.store_recovery import StoreBehindError, is_behind, refuse_behind
from mainstay_core.job.phase import JobPhase
from mainstay_core.sim.deciding import (
    Reply,
    Request,
    Snapshot,
    UnknownJobError,
    change_of,
)
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.network import End, Exchange, Listener
from mainstay_core.sim.store import Data, Item, StoreUnavailableError
from mainstay_core.wire.facts import PodRegistration
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

if TYPE_CHECKING:
    from mainstay_core.sim.world import World

TICK_PENDING_S = 0.1
TICK_IDLE_S = 1.0
LEASE_S = 3.0
MAX_CONFLICTS = 64
RETRY_S = 0.2


class Api(Process):
    """One replica, one life of it."""

    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world.engine, f"{name}.{life}", name)
        self.world, self.store = world, world.store
        self._busy = False
        self._turns: deque[Signal] = deque()
        self._streams: dict[End, int] = {}
        self._reading = False
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
        except StoreBehindError as error:
            reply = Reply(409, error="store-behind", body=str(error))
        except UnknownJobError as error:
            reply = Reply(404, error="unknown-job", body=str(error))
        except RemoteProtocolError as error:
            reply = Reply(409, error="conflict", body=str(error))
        except InvalidSpecError as error:
            reply = Reply(422, error="invalid-spec", body=str(error))
        except (StoreConflictError, StoreUnavailableError) as error:
            reply = Reply(503, error=str(error))
        exchange.reply(reply)

    def _route(self, request: Request) -> Steps[Reply]:
        body, held = request.body, request.held
        if request.route == "pods":
            return (yield from self._register(body, held))
        if request.route == "heartbeats":
            return (yield from self._beat(body, held))
        if request.route == "facts":
            outcome = yield from self.apply(FactsReported(facts=body), held)
            return Reply(409 if outcome.stale else 200, plan=outcome.state.plan)
        if request.route == "ledger":
            yield from self._add_to_ledger(body, held)
            return Reply(200)
        if request.route == "restore":
            return (yield from self._restore(body))
        if request.route == "drain":
            yield from self.apply(DrainRequested(pod=body))
            return Reply(200)
        if request.route == "scale":
            yield from self.apply(body)
            return Reply(200)
        if request.route == "suspend":
            yield from self.apply(SuspendRequested(suspend=body))
            return Reply(200)
        return Reply(200, plan=(yield from self._call(lambda data: data.plan)))

    def _register(self, registration: PodRegistration, held: QuorumId | None) -> Steps[Reply]:
        yield from self.apply(PodRegistered(registration=registration), held)
        plan, cursor = yield from self._call(lambda data: (data.plan, data.cursor))
        state = (yield from self._load()).state
        return Reply(200, plan=plan, body=(cursor, state.restored_at_s))

    def _beat(self, pod: str, held: QuorumId | None) -> Steps[Reply]:
        beat = yield from self._call(self.store.beat(pod, held))
        if beat.phase is None:
            raise UnknownJobError("the job has vanished from the store")
        if held is not None and held != beat.quorum:
            refuse_behind((yield from self._load()).state, held)
        if not beat.known and beat.phase is not JobPhase.SUSPENDED:
            raise UnregisteredPodError(f"pod {pod} is unknown or counts as gone")
        return Reply(200, body=beat)

    def _restore(self, report: PlanReported | None) -> Steps[Reply]:
        state = machine.initial(self.world.config, self.now_s())
        yield from self._call(self.store.create(state))
        if report is None:
            return Reply(200)
        outcome = yield from self.apply(report)
        return Reply(200, plan=outcome.state.plan)

    def _load(self) -> Steps[Snapshot]:
        found = yield from self._call(lambda d: (d.version, d.state, d.server))
        if found[1] is None:
            raise UnknownJobError("the job has vanished from the store")
        return Snapshot(*found)

    def _add_to_ledger(
        self, entries: tuple[LedgerEntry, ...], held: QuorumId | None
    ) -> Steps[None]:
        refuse_behind((yield from self._load()).state, held)
        keys = [e.key for e in entries]
        known = yield from self._call(lambda data: {k: data.ledger.get(k) for k in keys})
        fresh = []
        for entry in entries:
            old = known[entry.key]
            if old is not None and (old.agrees_with(entry) or old.quorum.id > entry.quorum.id):
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

    def apply(self, event: Event, held: QuorumId | None = None) -> Steps[Transition]:
        """Decide on an event and make the outcome durable; one at a time in this process.

        Args:
            event: what was learnt.
            held: the quorum of the newest plan that the teller holds.

        Raises:
            StoreBehindError: the teller's plan is not known here.
            UnknownJobError: the store has lost the job.
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
            outcome = yield from self._decide(event, held)
        finally:
            self._busy = False
            if self._turns:
                self._turns.popleft().fire()
        if outcome.plan is not None:
            self.spawn(self._note_durable(outcome.plan))
        return outcome

    def _decide(self, event: Event, held: QuorumId | None) -> Steps[Transition]:
        for _ in range(MAX_CONFLICTS):
            try:
                before = yield from self._load()
                if before.state.server != before.server:
                    yield from self._commit(before, StoreReopened(server=before.server))
                    before = yield from self._load()
                refuse_behind(before.state, held)
                return (yield from self._commit(before, event))
            except StoreConflictError:
                continue
        raise StoreConflictError("too many races lost in a row")

    def _commit(self, before: Snapshot, event: Event) -> Steps[Transition]:
        outcome = self._step(before.state, event)
        if not outcome.actions and outcome.state == before.state:
            return outcome
        self.world.faults.reach_api(self, outcome, "api-decided")
        change = change_of(before.state, outcome)
        yield from self._call(self.store.commit(before.revision, change))
        self.world.faults.reach_api(self, outcome, "api-committed")
        if self.engine.tracing and outcome.actions:
            self.engine.say(self.name, outcome.reason)
        return outcome

    def _step(self, before: CoordinatorState, event: Event) -> Transition:
        outcome = machine.step(before, event, self.now_s(), self.world.draw_name())
        self.world.checks.decided(before, outcome)
        return outcome

    def _note_durable(self, plan: Plan) -> Steps[None]:
        with suppress(MainstayError):
            yield from self.apply(PlanStored(quorum=plan.quorum, at_s=self.now_s()))

    # Silence ----------------------------------------------------------------

    def _tick(self) -> Steps[None]:
        silence, renew_at_s, look_at_s = HeartbeatLag(), 0.0, 0.0
        while True:
            now_s = self.engine.now_s
            try:
                holds = True
                if now_s >= renew_at_s:
                    holds = yield from self._call(self.store.hold_lease(self.name, LEASE_S))
                    if holds:
                        renew_at_s = now_s + LEASE_S / 3
                    else:
                        silence = HeartbeatLag()
                if holds and now_s >= look_at_s:
                    outcome = yield from self._look(silence)
                    if outcome.state.terminal:
                        return
                    pending = machine.is_pending(outcome.state)
                    look_at_s = now_s + (0.0 if pending else TICK_IDLE_S)
            except (StoreConflictError, StoreUnavailableError, UnknownJobError):
                pass
            yield TICK_PENDING_S

    def _look(self, silence: HeartbeatLag) -> Steps[Transition]:
        state = (yield from self._load()).state
        seen_s, beats = yield from self._call(lambda data: (dict(data.seen_s), dict(data.beats)))
        seen_us = {PodUid(pod): round(at_s * 1e6) for pod, at_s in seen_s.items()}
        behind_s = silence.update(seen_us, self.world.config.heartbeat_s)
        wanted = silence.heard.intersection(state.unheard)
        heard = sorted(p for p in wanted if p in beats and not is_behind(state, beats[p]))
        return (yield from self.apply(Tick(behind_s=behind_s, heard=tuple(heard))))

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
                lambda data: (data.plan, data.cursor, data.state and data.state.terminal)
            )
            if plan is not None:
                end.send(Item(0, "plan", plan))
            missed = yield from self._call(
                lambda data: [i for i in data.after(cursor) if i.number <= upto]
            )
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
    return data.after(cursor)
