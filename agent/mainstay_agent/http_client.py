"""Requests over HTTP/1.1 on connections that are kept: a socket, h11, and nothing between them.

A supervisor's requests are small and many. With a pod for each rank they cost more than the api's
answers where a library for all the world carries them, and a recovery waits for the processors.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 28
"""Longest body of an answer that is read: ten times the plan of the largest jobs."""
MAX_IDLE = 8
"""Connections to one server that are kept between requests: a supervisor has fewer under way."""
IDLE_S = 5.0
"""A connection that was not used for so long is not used again: a server that closes idle ones, or
what stands between, may be about to."""
FALLBACK_S = 0.25
"""After so long the next address of a server's name is tried beside the first (RFC 8305)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """By name in small letters; of several with one name the last."""
    content: bytes


@dataclass(frozen=True, slots=True)
class _Origin:
    """A server, as a url names it."""

    host: str
    port: int
    is_https: bool
    authority: str
    """For the header ``Host``."""


@dataclass(slots=True)
class _Connection:
    """One connection, which carries one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))
    idle_since_s: float = 0.0

    def may_serve(self, now_s: float) -> bool:
        """Return whether another request can be sent on this connection, which is idle."""
        closed = self.writer.transport.is_closing() or self.reader.at_eof()
        return not closed and now_s - self.idle_since_s < IDLE_S

    def renew(self) -> bool:
        """Prepare for another request; False if the server, or we, want no other."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True


class HttpClient:
    """Sends requests to any server, from one event loop. Close it after use.

    Args:
        timeout_s: of each wait for the other end.
        certificates: by what servers with TLS are checked.
        max_answer_bytes: of the body of one answer.
    """

    def __init__(
        self,
        timeout_s: float,
        certificates: Callable[[], ssl.SSLContext],
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._timeout_s, self._certificates = timeout_s, certificates
        self._max_answer_bytes = max_answer_bytes
        self._idle: defaultdict[_Origin, list[_Connection]] = defaultdict(list)

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes = b""
    ) -> Response:
        """Send a request and return the answer, whatever its status.

        Raises:
            OSError: there is no connection, or it ended or stood still before all of the answer
                had come, or what came is no HTTP.
            ValueError: the url names no server.
        """
        origin, target = _parse(url)
        told = {"Host": origin.authority, **headers}
        if content or method != "GET":
            told["Content-Length"] = str(len(content))
        asked = h11.Request(method=method, target=target, headers=[*told.items()])
        connection = self._kept(origin) or await self._connect(origin)
        may_stay = False
        try:
            answer = await self._exchange(connection, asked, content)
            may_stay = connection.renew()
        except h11.ProtocolError as error:
            raise ConnectionError(f"{origin.authority}: {error}") from error
        finally:
            if may_stay:
                self._keep(origin, connection)
            else:  # also when whoever asks is cancelled: what is still to come is nobody's answer
                connection.writer.close()
        return answer

    async def aclose(self) -> None:
        """Close all connections between requests."""
        for connections in self._idle.values():
            for connection in connections:
                connection.writer.close()
        self._idle.clear()

    def _kept(self, origin: _Origin) -> _Connection | None:
        """Return the connection that was used last, if it can serve still."""
        kept, now_s = self._idle[origin], asyncio.get_running_loop().time()
        while kept:
            connection = kept.pop()
            if connection.may_serve(now_s):
                return connection
            connection.writer.close()
        return None

    def _keep(self, origin: _Origin, connection: _Connection) -> None:
        connection.idle_since_s = asyncio.get_running_loop().time()
        kept = self._idle[origin]
        kept.append(connection)
        while len(kept) > MAX_IDLE:
            kept.pop(0).writer.close()

    async def _connect(self, origin: _Origin) -> _Connection:
        tls = self._certificates() if origin.is_https else None
        async with asyncio.timeout(self._timeout_s):
            reader, writer = await asyncio.open_connection(
                origin.host, origin.port, ssl=tls, happy_eyeballs_delay=FALLBACK_S
            )
        return _Connection(reader, writer)

    async def _exchange(
        self, connection: _Connection, asked: h11.Request, content: bytes
    ) -> Response:
        http, writer = connection.http, connection.writer
        head_of_request = http.send(asked) or b""
        body = http.send(h11.Data(data=content)) if content else b""
        writer.write(head_of_request + (body or b"") + (http.send(h11.EndOfMessage()) or b""))
        async with asyncio.timeout(self._timeout_s):
            await writer.drain()
        head: h11.Response | None = None
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(self._timeout_s):
                    http.receive_data(await connection.reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                num_bytes += len(parts[-1])
                if num_bytes > self._max_answer_bytes:
                    longest = self._max_answer_bytes
                    raise ConnectionError(f"the answer is longer than {longest} bytes")
            elif isinstance(event, h11.EndOfMessage):
                break
        assert head is not None, "an answer ends after its head"
        return Response(
            status=head.status_code,
            headers={name.decode(): value.decode("latin-1") for name, value in head.headers},
            content=b"".join(parts),
        )


def _parse(url: str) -> tuple[_Origin, str]:
    """Return the server that a url names, and what is asked of it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no url of a server; must be http://HOST[:PORT] or https://")
    is_https = parts.scheme == "https"
    host, port = parts.hostname, parts.port or (443 if is_https else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    authority = parts.netloc.rpartition("@")[2]
    return _Origin(host, port, is_https, authority), target
