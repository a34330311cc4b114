"""Requests over real sockets, to a server that says what a test wants it to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from mainstay_agent.http_client import HttpClient, Response

ADDRESS = "127.0.0.1"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
END = b""
"""In a server's answers: the connection ends."""


@dataclass
class Played:
    """A server: each connection answers its requests with the next of the answers."""

    answers: list[bytes | None]
    """None: it says nothing."""
    heard: list[bytes] = field(default_factory=list)
    """Heads and bodies of the requests."""
    num_connections: int = 0
    url: str = ""
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [line for line in head.lower().splitlines() if b"content-length" in line]
                size = int(sizes[0].split(b":")[1]) if sizes else 0
                self.heard.append(head + await reader.readexactly(size))
                self.asked.set()
                answer = self.answers.pop(0)
                if answer is None:
                    continue
                writer.write(answer)
                if answer == END or self.answers[:1] == [END]:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def played(*answers: bytes | None) -> AsyncIterator[Played]:
    there = Played([*answers])
    server = await asyncio.start_server(there.serve, ADDRESS, 0)
    there.url = f"http://{ADDRESS}:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield there


def no_certificates() -> ssl.SSLContext:
    raise AssertionError("no server here has TLS")


def ask(
    use: Callable[[HttpClient, Played], Awaitable[None]],
    *answers: bytes | None,
    timeout_s: float = 30.0,
    max_answer_bytes: int = 1000,
) -> None:
    async def run() -> None:
        async with played(*answers) as there:
            client = HttpClient(timeout_s, no_certificates, max_answer_bytes)
            await use(client, there)
            await client.aclose()

    asyncio.run(run())


async def post(client: HttpClient, there: Played, content: bytes = b"{}") -> Response:
    return await client.request("POST", f"{there.url}/v1/facts", {"A": "b"}, content)


def test_requests_share_a_connection_and_say_what_they_are_told() -> None:
    async def use(client: HttpClient, there: Played) -> None:
        assert (await post(client, there)).content == b"{}"
        assert (await client.request("GET", f"{there.url}/plan?x=1", {})).status == 404
        assert (await post(client, there, b"")).headers["retry-after"] == "3"
        assert there.num_connections == 1
        first, second, third = there.heard
        assert first.startswith(b"POST /v1/facts HTTP/1.1\r\n")
        assert b"A: b\r\n" in first
        assert f"Host: {there.url[7:]}\r\n".encode() in first
        assert first.endswith(b"\r\n\r\n{}")
        assert second.startswith(b"GET /plan?x=1 HTTP/1.1\r\n")
        assert b"ontent-" not in second
        assert b"Content-Length: 0\r\n" in third

    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 3\r\ncontent-length: 0\r\n\r\n"
    ask(use, OK, b"HTTP/1.1 404 None\r\ncontent-length: 0\r\n\r\n", busy)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    ],
)
def test_an_answer_may_come_in_pieces(answer: bytes) -> None:
    async def use(client: HttpClient, there: Played) -> None:
        assert (await post(client, there)).content == b"{}"
        assert (await post(client, there)).content == b"{}"
        assert there.num_connections == 1

    ask(use, answer, OK)


@pytest.mark.parametrize(
    "answers",
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", END, OK),  # as long as the connection stands
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}", OK),
        (OK, END, OK),  # the server closes what is idle
    ],
)
def test_a_connection_that_the_server_ends_is_not_used_again(answers: tuple[bytes, ...]) -> None:
    async def use(client: HttpClient, there: Played) -> None:
        assert (await post(client, there)).content == b"{}"
        there.answers[:] = [answer for answer in there.answers if answer != END]
        await asyncio.sleep(0)  # the end has come with the answer
        while True:
            with contextlib.suppress(ConnectionError):
                assert (await post(client, there)).content == b"{}"
                break
        assert there.num_connections == 2

    ask(use, *answers)


@pytest.mark.parametrize(
    "answers",
    [
        (b"", END),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}", END),
        (b"what is this\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001,),
    ],
)
def test_half_an_answer_or_none_is_an_error_of_the_connection(answers: tuple[bytes, ...]) -> None:
    async def use(client: HttpClient, there: Played) -> None:
        with pytest.raises(ConnectionError):
            await post(client, there)
        there.answers[:] = [OK]
        assert (await post(client, there)).status == 200
        assert there.num_connections == 2

    ask(use, *answers)


def test_a_server_that_says_nothing_is_waited_for_no_longer_than_allowed() -> None:
    async def use(client: HttpClient, there: Played) -> None:
        with pytest.raises(TimeoutError):
            await post(client, there)

    ask(use, None, timeout_s=0.05)


def test_an_answer_to_who_gave_up_is_nobody_elses() -> None:
    async def use(client: HttpClient, there: Played) -> None:
        given_up = asyncio.ensure_future(post(client, there))
        await there.asked.wait()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert (await post(client, there)).content == b"{}"
        assert there.num_connections == 2

    ask(use, None, OK)


def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async def use(client: HttpClient, there: Played) -> None:
        answers = await asyncio.gather(*(post(client, there) for _ in range(12)))
        assert [answer.status for answer in answers] == [200] * 12
        await post(client, there)
        assert there.num_connections <= 12

    ask(use, *[OK] * 13)


def test_who_is_not_there_is_an_error_of_the_connection() -> None:
    async def use(client: HttpClient, there: Played) -> None:
        del there
        with pytest.raises(OSError, match=r"refused|failed"):
            await client.request("GET", f"http://{ADDRESS}:1/", {})

    ask(use)


@pytest.mark.parametrize("url", ["ftp://host/", "/v1/jobs", "http://:8000/"])
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    async def use(client: HttpClient, there: Played) -> None:
        del there
        with pytest.raises(ValueError, match="url of a server"):
            await client.request("GET", url, {})

    ask(use)
