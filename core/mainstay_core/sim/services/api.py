"""One simulated api replica: its requests and streams over a network that is played."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.errors import MainstayError, StoreConflictError
from mainstay_core.base.ids import JobUid, QuorumId
from mainstay_core.control_plane.answers import StaleFactsError, SupervisorAnswers
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.control_plane.job_store import (
    Change,
    StoreUnavailableError,
    UnknownJobError,
)
from mainstay_core.control_plane.problems import problem_of
from mainstay_core.control_plane.watch import Watch
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    DrainRequested,
    Event,
    SuspendRequested,
    Transition,
)
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.sim.engine import Process, Sleep, Turn
from mainstay_core.sim.network import Exchange, Listener
from mainstay_core.sim.services.streams import Stream
from mainstay_core.sim.store import Reached
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.wire.api import HeldJob
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

TICK_PENDING_S = 0.1
TICK_IDLE_S = 1.0
LEASE_S = 3.0
MAX_CONFLICTS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a supervisor or of the provider."""

    route: str
    body: Any
    held: QuorumId | None = None
    """Of the newest plan that the asker holds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer: a status, and a plan where there is one."""

    status: int
    plan: Plan | None = None
    error: str = ""
    body: Any = None


class Api(Process, SupervisorAnswers):
    """One replica, one life of it."""

    def __init__(self, world: Surroundings, name: str, life: int) -> None:
        Process.__init__(self, world.engine, f"{name}.{life}", name)
        self.world = world
        self._store_here = _FaultyStore(world.store, self)
        SupervisorAnswers.__init__(self, self._store_here, MAX_CONFLICTS)
        self._turn = Turn()
        stream = Stream(self, self._store_here)
        listener = Listener(self, accept=stream.accept, serve=self._serve)
        world.network.listen(name, listener)
        self.spawn(self._tick())

    # What transactions ask of their process ------------------------------------------

    def now_s(self) -> float:
        return self.world.clock(self.node)

    async def step(self, state: CoordinatorState, event: Event) -> Transition:
        outcome = machine.step(state, event, self.now_s(), self.world.draw_name())
        self.world.checks.decided(state, outcome)
        return outcome

    def decided(self, before: CoordinatorState, outcome: Transition) -> None:
        del before
        if self.engine.tracing and outcome.actions:
            self.engine.say(self.name, outcome.reason)

    def conflicted(self) -> None:
        """Nobody counts lost races here."""

    def turn(self) -> AbstractAsyncContextManager[object]:
        return self._turn

    def note_later(self, procedure: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.spawn(procedure())

    def warn(self, text: str) -> None:
        self.engine.say(self.name, text)

    async def contradicted(self, old: LedgerEntry, new: LedgerEntry) -> None:
        self.world.checks.same_entry(old, new)

    def entered(self, state: CoordinatorState, entries: Sequence[LedgerEntry]) -> None:
        del state
        self.world.checks.entered(entries)

    def unknown_job(self) -> UnknownJobError:
        return UnknownJobError("the job has vanished from the store")

    # Requests ------------------------------------------------------------------------

    def _serve(self, exchange: Exchange, request: Request) -> None:
        self.spawn(self._answer(exchange, request))

    async def _answer(self, exchange: Exchange, request: Request) -> None:
        try:
            reply = await self._route(request)
        except MainstayError as error:
            answer = problem_of(error)
            if answer is None:
                raise
            status, name = answer
            plan = error.plan if isinstance(error, StaleFactsError) else None
            reply = Reply(status, plan, name, str(error))
        exchange.reply(reply)

    async def _route(self, request: Request) -> Reply:
        body, held = request.body, request.held
        match request.route:
            case "pods":
                return Reply(200, body=await self.register(body, held))
            case "heartbeats":
                return Reply(200, body=await self.take_heartbeat(body))
            case "facts":
                return Reply(200, plan=await self.take_facts(body, "", held))
            case "ledger":
                await self.add_to_ledger(body, held)
                return Reply(200)
            case "restore":
                return await self._restore(body)
            case "drain":
                await self.apply(DrainRequested(pod=body))
            case "scale" | "approximate":
                await self.apply(body)
            case "suspend":
                await self.apply(SuspendRequested(suspend=body))
        return Reply(200, plan=(await self._store_here.fetch_plan())[0])

    async def _restore(self, held: HeldJob | None) -> Reply:
        await self._store_here.create(machine.initial(self.world.config, self.now_s()))
        return Reply(200, plan=None if held is None else await self.take_held(held))

    # HeartbeatLag -------------------------------------------------------------------------

    async def _tick(self) -> None:
        async def list_uids() -> tuple[JobUid, ...]:
            return (self.world.config.job,)

        async def look(uid: JobUid, silence: HeartbeatLag) -> Transition | None:
            del uid
            return await self.look(silence)

        async def begin(look: Callable[[], Coroutine[Any, Any, None]]) -> None:
            await look()  # there is one job

        def failed(uid: JobUid, error: Exception) -> None:
            del uid
            raise error

        watch = Watch(
            lease_s=LEASE_S,
            idle_s=TICK_IDLE_S,
            hold_lease=lambda: self._store_here.hold_lease(self.name, LEASE_S),
            list_uids=list_uids,
            look=look,
            begin=begin,
            failed=failed,
        )
        while not self.world.store.last.terminal:
            with suppress(StoreConflictError, StoreUnavailableError, UnknownJobError):
                await watch.round(self.engine.now_s)
            await Sleep(TICK_PENDING_S)


class _FaultyStore(Reached):
    """The store as this replica reaches it; faults strike before and after a commit."""

    def __init__(self, store: Any, api: Api) -> None:
        super().__init__(store, api.node)
        self._api = api

    async def commit(self, version: int, change: Change) -> None:
        faults = self._api.world.faults
        faults.reach_api(self._api, change, "api-decided")
        await super().commit(version, change)
        faults.reach_api(self._api, change, "api-committed")
