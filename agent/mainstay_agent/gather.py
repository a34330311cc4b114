"""The gather server of one pod: sockets around :mod:`mainstay_core.gather.server`.

Supervisors speak here as well (:mod:`mainstay_agent.gossip`). Who calls proves the job's secret
before anything is said (:mod:`mainstay_net.entrance`), and says for which of the two it comes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from mainstay_core.base.admission import Bounds
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.proofs import Purpose
from mainstay_core.gather.frames import decode_for_server, encode
from mainstay_core.gather.server import Actions, Send, ServerProtocol
from mainstay_core.wire.plan import Plan
from mainstay_net.acceptor import listen
from mainstay_net.entrance import Entrance
from mainstay_net.turns import Turns

PURPOSES = (Purpose.MEET, Purpose.GOSSIP)
BOUNDS = Bounds()
"""On connections that have proved nothing: those of any listener."""


class GatherServer:
    """Rooms of all quorums that meet at this pod. Runs in the supervisor's event loop.

    Args:
        is_cut: whether the pod's network is cut: then nobody gets in.
        answer: answers another supervisor's frame.
        secret: the job's; whoever cannot prove to know it is closed. Empty for a job without one.
    """

    def __init__(
        self,
        is_cut: Callable[[], bool] = lambda: False,
        answer: Callable[[Frame], dict[str, Any]] | None = None,
        secret: str = "",
    ) -> None:
        self._is_cut = is_cut
        self._answer = answer
        self._secret = secret
        self._protocol: ServerProtocol[_Connection, bytes] = ServerProtocol()
        self._connections: set[_Connection] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._entrance: Entrance | None = None
        self._turns: Turns | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> str:
        """Listen on ``address`` and an ephemeral port; return ``host:port``.

        Raises:
            OSError: the address is not one of this host.
        """
        self._entrance = Entrance(listen(address), self._secret, PURPOSES, BOUNDS)
        self._turns = Turns(self._entrance, self._take)
        return self._entrance.address

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._entrance is not None and self._turns is not None:
            self._turns.close()
            self._entrance.close()
            self._turns = None
        for connection in tuple(self._connections):
            connection.end()

    async def wait_quiet(self) -> None:
        """Wait until nobody is connected: the quorums that met here have moved on."""
        await self._quiet.wait()

    def hold(self, plan: Plan) -> None:
        """Give this plan to whoever joins an older quorum from now on."""
        self._protocol.hold(plan.quorum.id, plan)

    def _take(self) -> None:
        """Let those in who have proved themselves now."""
        assert self._entrance is not None
        for proved in self._entrance.turn():
            if self._is_cut():
                proved.socket.close()
                continue
            connection = _Connection(self, proved.purpose)
            # Counted from here on: it is on its way in, and the pod must not end before it.
            self._opened(connection)
            task = asyncio.get_running_loop().create_task(self._attach(connection, proved.socket))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _attach(self, connection: _Connection, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, sock)
        except OSError:
            sock.close()
            self._ended(connection)

    # What follows is called by connections.

    def _opened(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self._protocol.opened(connection)
        self._quiet.clear()

    def _received(self, connection: _Connection, frame: Frame) -> None:
        if connection.purpose is Purpose.GOSSIP and self._answer is not None:
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

    def __init__(self, server: GatherServer, purpose: Purpose) -> None:
        self._server = server
        self.purpose = purpose
        self._parser = FrameParser()
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_over:
            transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._parser.feed(data):
                self._server._received(self, frame)
        except RemoteProtocolError as error:
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
        self._is_over = True
        if self._transport is not None:
            self._transport.close()
