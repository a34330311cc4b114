"""The gather server of one pod: sockets around :mod:`mainstay_core.gather.server`.

Supervisors speak here as well (:mod:`mainstay_agent.gossip`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.gather.frames import decode_for_server, encode
from mainstay_core.gather.server import Actions, Send, ServerProtocol
from mainstay_core.wire.plan import Plan

GOSSIP = ("holds", "plan")
"""Kinds of frames that come from other supervisors."""


class GatherServer:
    """Rooms of all quorums that meet at this pod. Runs in the supervisor's event loop.

    Args:
        is_cut: whether the pod's network is cut: then nobody gets in.
        answer: answers another supervisor's frame.
        secret: the job's; whoever cannot prove to know it is refused. Empty: nobody is.
    """

    def __init__(
        self,
        is_cut: Callable[[], bool] = lambda: False,
        answer: Callable[[Frame], dict[str, Any]] | None = None,
        secret: str = "",
    ) -> None:
        self._is_cut = is_cut
        self._answer = answer
        self._protocol: ServerProtocol[_Connection, bytes] = ServerProtocol(secret)
        self._connections: set[_Connection] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen on ``address`` and an ephemeral port; return ``host:port``.

        Raises:
            OSError: the address is not one of this host.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), host=address, port=0, backlog=4096
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.end()

    async def wait_quiet(self) -> None:
        """Wait until nobody is connected: the quorums that met here have moved on."""
        await self._quiet.wait()

    def hold(self, plan: Plan) -> None:
        """Give this plan to whoever joins an older quorum from now on."""
        self._protocol.hold(plan.quorum.id, plan)

    # What follows is called by connections.

    def _opened(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self._protocol.opened(connection)
        self._quiet.clear()

    def _received(self, connection: _Connection, frame: Frame) -> None:
        if frame.kind in GOSSIP and self._answer is not None:
            connection.send(pack(self._answer(frame)))
        else:
            self._perform(self._protocol.received(connection, decode_for_server(frame)))

    def _refused(self, connection: _Connection, error: Exception) -> None:
        self._perform(self._protocol.refuse(connection, error))

    def _ended(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._perform(self._protocol.ended(connection))
        if self._protocol.is_quiet:
            self._quiet.set()

    def _perform(self, actions: Actions[_Connection, bytes]) -> None:
        for action in actions:
            if isinstance(action, Send):
                message = encode(action.message)
                for connection in action.to:
                    connection.send(message)
            else:
                action.connection.end()


class _Connection(asyncio.Protocol):
    """A member's or a supervisor's connection."""

    def __init__(self, server: GatherServer) -> None:
        self._server = server
        self._parser = FrameParser()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server._opened(self)
        if self._server._is_cut():
            transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._parser.feed(data):
                self._server._received(self, frame)
        except (RemoteProtocolError, KeyError, TypeError, ValueError) as error:
            # A peer that does not speak the protocol is refused; if it was a member its room ends.
            self._server._refused(self, error)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it so
        self._transport = None
        self._server._ended(self)

    def send(self, message: bytes) -> None:
        """Send bytes if the connection still stands."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message)

    def end(self) -> None:
        """Close after what was written."""
        if self._transport is not None:
            self._transport.close()
