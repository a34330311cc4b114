"""Bounds the connections of an HTTP server that runs in an event loop.

A server of a library speaks HTTP, and knows nothing of who asks. Here its connections are accepted
and counted until somebody says that one of their requests was admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from mainstay_core.base.admission import Bounds
from mainstay_net.acceptor import Accepted, Acceptor
from mainstay_net.turns import Turns

HEAD_BYTES = 16 * 1024
"""Longest head of a request that is read: two tokens of 4 KiB, and what proxies add."""

MakeProtocol = Callable[[], asyncio.Protocol]


class HttpEntrance:
    """The way into an HTTP server: bounds what has not been admitted, in number and in time.

    Args:
        listener: listens already; closed by :meth:`close`.
        make_protocol: returns the library's protocol for one connection.
        bounds: on connections without an admitted request.
        max_bytes: of one connection, where nobody has reason to send more; None: the library's
            protocol bounds what it holds.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: MakeProtocol,
        bounds: Bounds,
        max_bytes: int | None = None,
    ) -> None:
        self._make_protocol = make_protocol
        self._max_bytes = max_bytes
        self._acceptor = Acceptor(listener, self._drop, bounds)
        self._strangers: dict[int, _Watched] = {}
        self._keys: dict[tuple[str, int], int] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._turns = Turns(self._acceptor, self._turn)

    @property
    def num_unproved(self) -> int:
        """Number of connections without an admitted request."""
        return self._acceptor.num_unproved

    def asked(self, peer: tuple[str, int]) -> None:
        """A whole request has come from this address and port, and is looked at."""
        key = self._keys.get(peer)
        if key is not None:
            self._acceptor.asked(key)

    def admitted(self, peer: tuple[str, int]) -> None:
        """A request from this address and port was admitted: its connection may stay."""
        key = self._keys.get(peer)
        if key is not None:
            self._acceptor.proved(key)
            self._forget(key)

    def close(self) -> None:
        """Stop listening; what is connected stays."""
        self._turns.close()
        self._acceptor.close()

    def _turn(self) -> None:
        for accepted in self._acceptor.turn():
            watched = _Watched(self, accepted, self._make_protocol(), self._max_bytes)
            self._strangers[accepted.key] = watched
            self._keys[accepted.address, accepted.port] = accepted.key
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._hand_over(accepted, watched))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _hand_over(self, accepted: Accepted, watched: _Watched) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: watched, accepted.socket)
        except OSError:
            self._lost(accepted.key)
            with contextlib.suppress(OSError):  # a loop that took it may have closed it
                accepted.socket.close()

    def _drop(self, key: int) -> None:
        self._strangers[key].abort()
        self._forget(key)

    def _lost(self, key: int) -> None:
        if key in self._strangers:
            self._acceptor.ended(key)
            self._forget(key)

    def _forget(self, key: int) -> None:
        accepted = self._strangers.pop(key).accepted
        self._keys.pop((accepted.address, accepted.port), None)


class _Watched(asyncio.Protocol):
    """Passes everything on to the library's protocol, and tells when the connection ends."""

    def __init__(
        self,
        entrance: HttpEntrance,
        accepted: Accepted,
        inner: asyncio.Protocol,
        max_bytes: int | None,
    ) -> None:
        self.accepted = accepted
        self._entrance, self._inner = entrance, inner
        self._transport: asyncio.Transport | None = None
        self._is_over = False
        self._num_left = max_bytes
        if max_bytes is None:
            self.data_received = inner.data_received  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def abort(self) -> None:
        """Close without another word."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Of a socket that was accepted; uvloop's own do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._inner.connection_made(transport)
        if self._is_over:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._num_left is not None
        self._num_left -= len(data)
        if self._num_left < 0:
            # The library's parser would keep it, and quote it in an error.
            self.abort()
        else:
            self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._entrance._lost(self.accepted.key)
        self._inner.connection_lost(exc)
