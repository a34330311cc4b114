"""The standing conversation with the api: registration, heartbeats, the stream of plans.

The stream brings plans in milliseconds; heartbeats find out within an interval
what a broken stream has missed. Both feed the same events: a plan that comes
twice is no news.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mainstay_agent.api_client import (
    ApiClient,
    ApiRefused,
    ApiUnavailable,
    HeartbeatReply,
    Registration,
    StreamEvent,
)
from mainstay_agent.injection import FAULT_EVENTS, is_stopped
from mainstay_agent.outbox import Backoff, until_answered
from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import QuorumId
from mainstay_core.supervisor.events import Ended, Event, PlanReceived, SlotPhase, SlotState
from mainstay_core.wire.facts import Heartbeat, PodRegistration, SlotStatus
from mainstay_core.wire.plan import Plan

logger = logging.getLogger(__name__)

UNKNOWN_JOB_S = 60.0
"""How long a pod that knows nothing of its job waits for a store that has lost it to be told."""


class Patience:
    """A backoff that ends some time."""

    def __init__(self, limit_s: float) -> None:
        self._ends_s = time.monotonic() + limit_s
        self._backoff = Backoff()

    @property
    def ended(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self._ends_s

    async def wait(self) -> None:
        """Sleep for the next delay."""
        await self._backoff.wait()


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
        self._restored_at_s = 0.0
        self.stands = False
        """Whether the stream is open."""

    async def register(
        self, registration: PodRegistration, hold: Callable[[], dict[str, Any] | None]
    ) -> Registration:
        """Introduce the pod, however long it takes; return the api's answer.

        Args:
            registration: the pod.
            hold: returns what is held of the job, for an api that has lost it; None if nothing.

        Raises:
            ApiRefused: the api does not accept this pod.
        """
        patience = Patience(UNKNOWN_JOB_S)
        while True:
            try:
                answer = await until_answered(
                    lambda: self._client.register(registration), "registration"
                )
                break
            except ApiRefused as refusal:
                held = hold()
                if not refusal.is_unknown or (held is None and patience.ended):
                    raise
                logger.warning("registration refused: %s", refusal)
                if held is not None:
                    await until_answered(partial(self._client.restore, held), "restoration")
            await patience.wait()
        self._cursor = self._cursor or answer.cursor
        self._restored_at_s = answer.restored_at_s
        if answer.plan is not None:
            self._feed(PlanReceived(answer.plan))
        return answer

    async def beat(
        self,
        heartbeat: Callable[[], Heartbeat],
        register_again: Callable[[], Awaitable[None]],
        on_away: Callable[[], None],
        interval_s: float,
    ) -> None:
        """Send heartbeats, for ever; they are dropped, not queued, while the api is away.

        Args:
            heartbeat: returns what to say.
            register_again: introduces the pod to an api that has forgotten it.
            on_away: called when a heartbeat was not heard.
            interval_s: seconds from one to the next.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            message = heartbeat()
            try:
                reply = await self._client.post_heartbeat(message)
                await self._on_reply(message.quorum, reply)
                if reply.restored_at_s != self._restored_at_s:
                    await register_again()
            except ApiUnavailable as error:
                logger.debug("heartbeat dropped: %s", error)
                on_away()
            except ApiRefused as refusal:
                logger.warning("heartbeat refused: %s", refusal)
                if refusal.is_deleted:
                    self._feed(Ended("the job was deleted"))
                elif refusal.is_unknown:
                    await register_again()
            due_s = max(due_s + interval_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    async def _on_reply(self, held: QuorumId | None, reply: HeartbeatReply) -> None:
        if reply.state != "running":
            self._feed(Ended(f"the job is {reply.state}"))
        elif reply.quorum is not None and (held is None or reply.quorum.id > held.id):
            plan = await self._client.fetch_plan()
            if plan is not None:
                self._feed(PlanReceived(plan))

    async def follow_stream(self, on_fault: Callable[[str, str], None]) -> None:
        """Read the stream, for ever; it goes on where it broke off.

        Args:
            on_fault: called with name and data of what concerns injected faults.
        """
        backoff = Backoff()
        while True:
            try:
                async for event in self._client.stream(self._cursor):
                    self.stands = True
                    backoff.reset()
                    self._cursor = event.id or self._cursor
                    self._on_event(event, on_fault)
            except (ApiUnavailable, ApiRefused) as error:
                logger.info("%s; opening the stream again", error)
            self.stands = False
            await backoff.wait()

    def _on_event(self, event: StreamEvent, on_fault: Callable[[str, str], None]) -> None:
        try:
            if event.name == "plan":
                self._feed(PlanReceived(codec.loads(Plan, event.data)))
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
