"""The connections of an HTTP server: bounded until one of their requests was admitted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from mainstay_core.base.admission import Bounds
from mainstay_net.acceptor import address_of, listen
from mainstay_net.http import HttpEntrance

HOST = "127.0.0.1"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Call = Callable[[], Awaitable[Streams]]


class Echo(asyncio.Protocol):
    """A library's protocol: says back what it hears, and notes what happens to it."""

    def __init__(self, told: list[str]) -> None:
        self._told = told
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._told.append("made")

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it so
        self._told.append("lost")


def play(
    bounds: Bounds,
    story: Callable[[HttpEntrance, Call, list[str]], Awaitable[None]],
    max_bytes: int | None = None,
) -> None:
    async def run() -> None:
        told: list[str] = []
        listener = listen(HOST)
        host, _, port = address_of(listener).rpartition(":")
        entrance = HttpEntrance(listener, lambda: Echo(told), bounds, max_bytes)
        open_: list[asyncio.StreamWriter] = []

        async def call() -> Streams:
            streams = await asyncio.open_connection(host, int(port))
            open_.append(streams[1])
            return streams

        await story(entrance, call, told)
        entrance.close()
        for writer in open_:
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))


async def say(streams: Streams, text: bytes = b"hello") -> bytes:
    streams[1].write(text)
    return await streams[0].readexactly(len(text))


def name_of(streams: Streams) -> tuple[str, int]:
    sock: socket.socket = streams[1].get_extra_info("socket")
    host, port = sock.getsockname()
    return host, port


def test_who_sends_no_request_is_closed_in_time() -> None:
    async def story(entrance: HttpEntrance, call: Call, told: list[str]) -> None:
        reader, _ = await call()
        assert await reader.read() == b""
        while told != ["made", "lost"]:
            await asyncio.sleep(0)
        assert entrance.num_unproved == 0

    play(Bounds(prove_s=0.05), story)


def test_who_was_admitted_stays() -> None:
    async def story(entrance: HttpEntrance, call: Call, told: list[str]) -> None:
        admitted, stranger = await call(), await call()
        assert await say(admitted) == b"hello"
        entrance.asked(name_of(admitted))
        entrance.admitted(name_of(admitted))
        assert await stranger[0].read() == b""
        assert await say(admitted) == b"hello"
        assert entrance.num_unproved == 0
        assert told == ["made", "made", "lost"]

    play(Bounds(prove_s=0.2), story)


def test_who_has_asked_is_given_the_time_of_an_answer() -> None:
    async def story(entrance: HttpEntrance, call: Call, told: list[str]) -> None:
        waits, stranger = await call(), await call()
        assert await say(waits) == b"hello"
        entrance.asked(name_of(waits))
        assert await stranger[0].read() == b""
        assert await say(waits) == b"hello"
        assert await waits[0].read() == b"", "but no longer"

    play(Bounds(prove_s=0.1, answer_s=0.5), story)


def test_many_idle_connections_are_not_held_and_the_next_one_is_served() -> None:
    async def story(entrance: HttpEntrance, call: Call, told: list[str]) -> None:
        idle = [await call() for _ in range(100)]
        assert await say(await call()) == b"hello"
        assert entrance.num_unproved <= 8
        assert told.count("made") - told.count("lost") <= 16
        for reader, _ in idle[:80]:
            assert await reader.read() == b""

    play(Bounds(total=8, per_address=8, prove_s=60.0), story)


def test_a_connection_that_its_caller_ends_is_forgotten() -> None:
    async def story(entrance: HttpEntrance, call: Call, told: list[str]) -> None:
        streams = await call()
        assert await say(streams) == b"hello"
        assert entrance.num_unproved == 1
        streams[1].close()
        while entrance.num_unproved:
            await asyncio.sleep(0.001)

    play(Bounds(), story)


def test_who_sends_more_than_anybody_has_reason_to_is_closed() -> None:
    async def story(entrance: HttpEntrance, call: Call, told: list[str]) -> None:
        brief, long = await call(), await call()
        assert await say(brief) == await say(long) == b"hello"
        long[1].write(b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            assert await long[0].read() == b""
        assert await say(brief) == b"hello"

    play(Bounds(), story, max_bytes=16)


class ForeignTransport:
    """A transport of another loop, which does not inherit from asyncio's, as uvloop's do not."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_a_loop_may_bring_transports_of_its_own() -> None:
    class Receiver(Echo):
        def connection_made(self, _: asyncio.BaseTransport) -> None:
            self._told.append("made")

    async def run() -> None:
        told: list[str] = []
        made: list[ForeignTransport] = []
        loop = asyncio.get_running_loop()

        async def connect(make: Callable[[], asyncio.Protocol], _: socket.socket) -> None:
            made.append(ForeignTransport())
            make().connection_made(cast(asyncio.BaseTransport, made[0]))

        loop.connect_accepted_socket = connect  # type: ignore[method-assign, assignment]
        listener = listen(HOST)
        host, _, port = address_of(listener).rpartition(":")
        entrance = HttpEntrance(listener, lambda: Receiver(told), Bounds(prove_s=0.05))
        _, writer = await asyncio.open_connection(host, int(port))
        while not (made and made[0].is_aborted):
            await asyncio.sleep(0)
        assert told == ["made"]
        entrance.close()
        writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
