"""A simulated supervisor's way to the api: requests that may be lost, and the stream."""

from __future__ import annotations

from collections.abc import Callable

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import QuorumId
from mainstay_core.control_plane.stream import StreamItem
from mainstay_core.sim.engine import Awaited, Flag, Process, Signal, Sleep, Turn
from mainstay_core.sim.network import End, Unreachable
from mainstay_core.sim.services.api import Reply, Request
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.supervisor.events import Ended, Event, PlanReceived
from mainstay_core.wire.api import (
    ApiRefused,
    ApiUnavailable,
    HeartbeatReply,
    HeldJob,
    Registration,
)
from mainstay_core.wire.facts import Fact, Heartbeat, PodRegistration
from mainstay_core.wire.findings import ToldFinding
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

REQUEST_TIMEOUT_S = 10.0


class ApiClient:
    """Carries a supervisor's conversation with the api (the conversation's ``ApiPort``).

    Args:
        world: everything around it.
        process: the supervisor.
        held: returns the quorum of the newest plan that it holds.
    """

    def __init__(
        self, world: Surroundings, process: Process, held: Callable[[], QuorumId | None]
    ) -> None:
        self._world, self._process, self._held = world, process, held

    async def _ask(self, route: str, body: object) -> Reply:
        world = self._world
        request = Request(route, body, self._held())
        try:
            reply: Reply = await Awaited(
                world.network.request(self._process, world.pick_api(), request, REQUEST_TIMEOUT_S)
            )
        except Unreachable as error:
            raise ApiUnavailable(str(error)) from error
        if reply.status == 503:
            raise ApiUnavailable(reply.error)
        if reply.status != 200:
            raise ApiRefused(reply.status, reply.error, reply.body, reply.plan)
        return reply

    async def register(self, registration: PodRegistration) -> Registration:
        answer = (await self._ask("pods", registration)).body
        return Registration(
            config=answer.config,
            plan=answer.plan,
            cursor=answer.cursor,
            restored_at_s=answer.restored_at_s,
        )

    async def recover_store(self, held: HeldJob) -> None:
        await self._ask("restore", held)

    async def post_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        answer: HeartbeatReply = (await self._ask("heartbeats", heartbeat)).body
        return answer

    async def post_facts(self, facts: tuple[Fact, ...]) -> Plan | None:
        return (await self._ask("facts", facts)).plan

    async def post_ledger(self, entries: tuple[LedgerEntry, ...]) -> None:
        await self._ask("ledger", entries)

    async def post_findings(self, findings: tuple[ToldFinding, ...]) -> None:
        raise LocalProtocolError(f"no simulated trainer finds anything, and there are {findings}")

    async def fetch_plan(self) -> Plan | None:
        return (await self._ask("plan", None)).plan

    async def follow(
        self, cursor: str, opened: Callable[[], None], take: Callable[[str, Event | None], None]
    ) -> None:
        changed, ended = Signal(), False

        def over(why: str) -> None:
            nonlocal ended
            del why
            ended = True
            changed.fire()

        def came(item: StreamItem) -> None:
            is_plan = isinstance(item.data, Plan)
            take(item.id, PlanReceived(item.data) if is_plan else Ended("it is over"))

        def connected(end: End) -> None:
            end.on_message, end.on_end = came, over
            end.send(cursor)
            opened()

        network, address = self._world.network, self._world.pick_api()
        network.connect(self._process, address, connected, over, REQUEST_TIMEOUT_S)
        while not ended:
            await changed

    async def sleep(self, delay_s: float) -> None:
        await Sleep(delay_s)

    def now_s(self) -> float:
        return self._world.engine.now_s

    def flag(self) -> Flag:
        return Flag()

    def lock(self) -> Turn:
        return Turn()

    def say(self, level: str, text: str) -> None:
        if level != "debug":
            self._world.engine.say(self._process.name, text)
