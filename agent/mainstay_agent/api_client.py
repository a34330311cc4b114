"""The supervisor's client of the api: carries requests by httpx, and reads the stream.

``ApiUnavailable`` means try again (no connection, 5xx, Redis away): training goes
on without the api, so nothing here is fatal. ``ApiRefused`` means that repeating
the request will not help; its answer says what will. What is said when is decided by
:mod:`mainstay_core.supervisor.conversation`, whose ``ApiPort`` the client is.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import logging
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from mainstay_agent.network_cut import NetworkCut
from mainstay_agent.settings import SupervisorSettings
from mainstay_agent.token import Token
from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import QuorumId
from mainstay_core.supervisor.events import Ended, Event, PlanReceived
from mainstay_core.wire.api import ApiUnavailable, Failure
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.routes import Request, SupervisorApi, read_failure, read_object

logger = logging.getLogger(__name__)

FAULT_EVENTS = ("inject", "faults", "fired")
"""Events of the job's stream: a fault on a spare, due now; faults that a running job is given;
that one fires."""
REQUEST_TIMEOUT_S = 10.0
"""An api that holds a request for longer is as good as away; every request may be repeated."""
STREAM_SILENCE_S = 60.0
"""A stream that says nothing for this long is opened anew: half-open connections look like that."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One server-sent event."""

    name: str
    data: str
    id: str


class ApiClient(SupervisorApi):
    """Connection of one pod to its job's agent routes. Close it after use.

    With several urls (replicas of the api on one store) a request that one does
    not answer goes to the next when it is repeated.

    Args:
        settings: where the api is, and who asks.
        network: of the pod; while it is cut the api is not reached.
    """

    def __init__(self, settings: SupervisorSettings, network: NetworkCut | None = None) -> None:
        super().__init__(settings.job, secrets.token_hex(8))
        self._network = network or NetworkCut()
        self._http = httpx.AsyncClient(
            timeout=REQUEST_TIMEOUT_S,
            # The api is inside: a proxy for the outside world is never meant for it.
            trust_env=False,
            verify=_certificates(),
            # Whose token it is: one that was mixed up is refused, on every route.
            headers={"Mainstay-Pod": settings.pod},
        )
        self._token = Token(settings)
        self._urls = settings.api_urls
        self._turn = 0
        self._newest: tuple[Plan, str] | None = None
        """The newest plan that the stream has brought, and its JSON."""
        self.held: QuorumId | None = None
        """Quorum of the newest plan held here; every request names it (protocol section 9)."""
        self.on_fault: Callable[[str, str], None] = lambda _name, _data: None
        """Called with name and data of what the stream says of injected faults.

        Raises:
            RemoteProtocolError: it cannot be read.
        """

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def follow(
        self, cursor: str, opened: Callable[[], None], take: Callable[[str, Event | None], None]
    ) -> None:
        """Read the stream until it ends, as the conversation wants it.

        Raises:
            ApiUnavailable: it cannot be opened or broke.
            ApiRefused: the api will not stream to this pod.
        """
        async for event in self.stream(cursor):
            opened()
            take(event.id, self._read(event))

    def _read(self, event: StreamEvent) -> Event | None:
        try:
            if event.name == "plan":
                plan = codec.loads(Plan, event.data)
                self._newest = (plan, event.data)
                return PlanReceived(plan)
            if event.name == "stop":
                return Ended(f"the job is over: {event.data}")
            if event.name in FAULT_EVENTS:
                self.on_fault(event.name, event.data)
        except (RemoteProtocolError, KeyError, ValueError) as error:
            logger.error("an event of the stream cannot be used: %r", error)
        return None

    def json_of(self, plan: Plan) -> str:
        """Return a plan as JSON: as it came, if the stream has brought it."""
        newest = self._newest
        return newest[1] if newest is not None and newest[0] is plan else codec.dumps(plan)

    async def stream(self, cursor: str) -> AsyncIterator[StreamEvent]:
        """Yield the job's events after ``cursor``, until the connection ends.

        Raises:
            ApiUnavailable: it cannot be opened or broke.
            ApiRefused: the api will not stream to this pod.
        """
        headers = {"Accept": "text/event-stream", "Authorization": self._token.header}
        if cursor:
            headers["Last-Event-ID"] = cursor
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=STREAM_SILENCE_S)
        self._require_network()
        try:
            async with self._http.stream(
                "GET", f"{self._url}{self.base}/stream", headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._raise_for(response)
                async for event in parse_events(response.aiter_lines()):
                    yield event
        except httpx.TransportError as error:
            self._turn += 1
            raise ApiUnavailable(f"stream: {error!r}") from error

    async def sleep(self, delay_s: float) -> None:
        """Let time pass."""
        await asyncio.sleep(delay_s)

    def now_s(self) -> float:
        """Return a clock that never jumps, in seconds."""
        return time.monotonic()

    def flag(self) -> asyncio.Event:
        """Return something that one task sets and another waits for."""
        return asyncio.Event()

    def lock(self) -> asyncio.Lock:
        """Return something that one task at a time holds."""
        return asyncio.Lock()

    def say(self, level: str, text: str) -> None:
        """Log what the conversation has come to."""
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)

    @property
    def _url(self) -> str:
        return self._urls[self._turn % len(self._urls)]

    async def send(self, request: Request) -> dict[str, Any]:
        """Send a request to the api whose turn it is."""
        self._require_network()
        body = request.body
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Authorization": self._token.header}
        if content:
            headers["Content-Type"] = "application/json"
        if self.held is not None:
            headers["Mainstay-Quorum"] = str(self.held)
        try:
            response = await self._http.request(
                request.method, self._url + request.path, content=content, headers=headers
            )
        except httpx.TransportError as error:
            self._turn += 1
            raise ApiUnavailable(f"{request.method} {request.path}: {error!r}") from error
        self._raise_for(response)
        return read_object(response.content)

    def _require_network(self) -> None:
        if self._network.is_cut:
            raise ApiUnavailable("the network is cut")

    def _raise_for(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == 401:
            self._token.read_again()  # the caller tries again
            raise ApiUnavailable("401: the token was refused", Failure.UNAUTHORIZED)
        if status >= 400:
            failure = read_failure(status, response.content, response.headers.get("retry-after"))
            # A replica that wants to be asked less is there; another one would only be asked more.
            self._turn += isinstance(failure, ApiUnavailable) and not failure.is_busy
            raise failure


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return what certificates are checked by. To read those that are trusted takes a while."""
    return httpx.create_ssl_context(trust_env=False)


def warm_up() -> None:
    """Import, and read, what a client and its first request need: for a process that forks.

    It takes 50 ms. The pod that takes a lost one's place starts just when the job recovers.
    """
    httpx.AsyncClient(trust_env=False, verify=_certificates())  # has httpx import its transport
    for name in ("anyio._backends._asyncio", "httpcore._backends.anyio"):
        importlib.import_module(name)  # chosen by name at the first request


async def parse_events(lines: AsyncIterator[str]) -> AsyncIterator[StreamEvent]:
    """Yield server-sent events (WHATWG HTML, section 9.2.6) from lines of text."""
    name, last_id = "", ""
    data: list[str] = []
    async for line in lines:
        if not line:
            if data:
                yield StreamEvent(name or "message", "\n".join(data), last_id)
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            last_id = value
