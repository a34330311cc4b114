"""Connections of launcher and trainers: frames over the pod's Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from mainstay_core.base.errors import ProtocolError
from mainstay_core.base.frames import (
    FIRST_HEAD_BYTES,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Frame,
    FrameParser,
    pack,
)
from mainstay_core.base.ids import Incarnation

logger = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")


class Peers(Protocol):
    """The supervisor, as it handles what comes over the socket."""

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """Handle one frame; a ProtocolError ends the connection."""

    def on_end(self, peer: Peer) -> None:
        """A connection has ended: so has its process, or it soon will."""


class Peer(asyncio.Protocol):
    """One process of the pod: the launcher once it said so, or one life of a trainer."""

    def __init__(self, owner: Peers) -> None:
        self._owner = owner
        self._parser = FrameParser(max_head=FIRST_HEAD_BYTES, max_body=0)
        self._transport: asyncio.Transport | None = None
        self.is_launcher = False
        self.slot = -1
        self.incarnation: Incarnation | None = None
        self.pid = 0
        """As the kernel names it in our process namespace; 0 if it is not visible here."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock: socket.socket = transport.get_extra_info("socket")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.pid = _UCRED.unpack(credentials)[0]

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._parser.drain(data):
                self._owner.on_frame(self, frame)
                if self.is_launcher or self.incarnation is not None:
                    self._parser.max_head = MAX_HEAD_BYTES
                    self._parser.max_body = MAX_BODY_BYTES
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            logger.error("%s does not keep to the protocol and is cut off: %r", self, error)
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it so
        self._transport = None
        self._owner.on_end(self)

    def send(self, head: dict[str, Any]) -> None:
        """Send a frame if the connection still stands."""
        self.send_packed(pack(head))

    def send_packed(self, message: bytes) -> None:
        """Send a frame that was packed before, e.g. one plan for many."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(message)

    def end(self) -> None:
        """Close after what was written."""
        if self._transport is not None:
            self._transport.close()

    def __str__(self) -> str:
        if self.is_launcher:
            return f"launcher (pid {self.pid})"
        return f"trainer {self.incarnation} of slot {self.slot} (pid {self.pid})"


async def listen(path: Path, owner: Peers) -> asyncio.Server:
    """Serve the pod's Unix socket, replacing one that a former supervisor left."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with own_mode(path.parent):
        return await asyncio.get_running_loop().create_unix_server(
            lambda: Peer(owner), str(path), backlog=128
        )


@contextlib.contextmanager
def own_mode(directory: Path) -> Iterator[None]:
    """Have Unix sockets made in a pod's directory with the rights that they are to have.

    They are the supervisor's user's alone, unless the directory hands its group on (setgid, as
    a cluster's volume with an fsGroup): then that group's as well, for a trainer container of
    another user.
    """
    shared = bool(directory.stat().st_mode & stat.S_ISGID)
    old = os.umask(0o007 if shared else 0o077)
    try:
        yield
    finally:
        os.umask(old)
