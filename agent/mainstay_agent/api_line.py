"""The standing conversation with the api: registration, heartbeats, the stream of plans.

The stream brings plans in milliseconds; heartbeats find out within an interval
what a broken stream has missed. Both feed the same events: a plan that comes
twice is no news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from mainstay_agent.client import (
    ApiClient,
    ApiRefused,
    ApiUnavailable,
    HeartbeatReply,
    StreamEvent,
)
from mainstay_agent.injection import FAULT_EVENTS, is_stopped
from mainstay_agent.outbox import Backoff, until_answered
from mainstay_core import codec
from mainstay_core.errors import RemoteProtocolError
from mainstay_core.facts import Heartbeat, PodRegistration, SlotStatus
from mainstay_core.ids import QuorumId
from mainstay_core.jobspec import JobConfig
from mainstay_core.messages import Plan
from mainstay_core.supervision_events import Ended, Event, PlanLearnt, SlotPhase, SlotState

logger = logging.getLogger(__name__)


class ApiLine:
    """Keeps one pod in touch with the api.

    Args:
        client: the api.
        feed: called with every event that follows from what the api says.
    """

    def __init__(self, client: ApiClient, feed: Callable[[Event], None]) -> None:
        self._client = client
        self._feed = feed
        self._cursor = ""

    async def register(self, registration: PodRegistration) -> JobConfig:
        """Introduce the pod, however long it takes; return the job's settings.

        Raises:
            ApiRefused: the api does not accept this pod.
        """
        answer = await until_answered(lambda: self._client.register(registration), "registration")
        self._cursor = self._cursor or answer.cursor
        if answer.plan is not None:
            self._feed(PlanLearnt(answer.plan))
        return answer.config

    async def beat(
        self,
        heartbeat: Callable[[], Heartbeat],
        register_again: Callable[[], Awaitable[None]],
        interval_s: float,
    ) -> None:
        """Send heartbeats, for ever; they are dropped, not queued, while the api is away."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            message = heartbeat()
            try:
                reply = await self._client.post_heartbeat(message)
                await self._on_reply(message.quorum, reply)
            except ApiUnavailable as error:
                logger.debug("heartbeat dropped: %s", error)
            except ApiRefused as refusal:
                logger.warning("heartbeat refused: %s", refusal)
                if refusal.is_unknown:
                    await register_again()
            due_s = max(due_s + interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _on_reply(self, held: QuorumId | None, reply: HeartbeatReply) -> None:
        if reply.state != "running":
            self._feed(Ended(f"the job is {reply.state}"))
        elif reply.quorum is not None and (held is None or reply.quorum.id > held.id):
            plan = await self._client.fetch_plan()
            if plan is not None:
                self._feed(PlanLearnt(plan))

    async def follow_stream(self, on_fault: Callable[[str, str], None]) -> None:
        """Read the stream, for ever; it goes on where it broke off.

        Args:
            on_fault: called with name and data of what concerns injected faults.
        """
        backoff = Backoff()
        while True:
            try:
                async for event in self._client.stream(self._cursor):
                    backoff.reset()
                    self._cursor = event.id or self._cursor
                    self._on_event(event, on_fault)
            except (ApiUnavailable, ApiRefused) as error:
                logger.info("%s; opening the stream again", error)
            await backoff.wait()

    def _on_event(self, event: StreamEvent, on_fault: Callable[[str, str], None]) -> None:
        try:
            if event.name == "plan":
                self._feed(PlanLearnt(codec.loads(Plan, event.data)))
            elif event.name == "stop":
                self._feed(Ended(f"the job is over: {event.data}"))
            elif event.name in FAULT_EVENTS:
                on_fault(event.name, event.data)
        except (RemoteProtocolError, KeyError, ValueError) as error:
            logger.error("an event of the stream cannot be used: %r", error)


def slot_status(slot: SlotState) -> SlotStatus:
    """Return a slot's line in the heartbeat."""
    status = slot.status
    if slot.phase is not SlotPhase.UP or status is None:
        phase = "starting" if slot.phase is SlotPhase.UP else slot.phase.value
        return SlotStatus(index=slot.index, incarnation=slot.incarnation, pid=slot.pid, phase=phase)
    if status.pid and is_stopped(status.pid):
        # Sure evidence, from the kernel: the process cannot say so itself.
        return replace(status, phase="stopped", waiting=False)
    return status
