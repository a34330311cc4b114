"""Opens connections that belong to no group of ranks, and reads frames from them.

A group takes the sockets that appear while it connects for its own, and shuts them when it ends. So
every other socket of a trainer is registered from the moment there is one.
"""

from __future__ import annotations

import socket
from typing import Any

from mainstay_core.base.frames import FIRST_HEAD_BYTES, PREFIX, parse_head, parse_prefix
from mainstay_train.base import network_cut
from mainstay_train.base.sockets import socket_lock
from mainstay_train.comm.group import foreign_sockets


class Registered:
    """Opens and closes connections that belong to no group."""

    def accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        """Take a caller; return its connection and address."""
        # accept() and the registration must be one: a group that connects meanwhile
        # would take the new socket for its own and shut it with the group.
        with socket_lock:
            connection, peer = listener.accept()
            foreign_sockets.add(connection.fileno())
        return connection, (str(peer[0]), int(peer[1]))

    def close(self, connection: socket.socket) -> None:
        """Close a connection."""
        close_registered(connection)


def close_registered(connection: socket.socket) -> None:
    """Close a socket of :func:`open_registered` or of the server, and forget its number."""
    with socket_lock:
        foreign_sockets.discard(connection.fileno())
        connection.close()


def open_registered(peer: str, local: str, timeout_s: float | None = None) -> socket.socket:
    """Connect to ``host:port`` from ``local`` with a socket that belongs to no group.

    Args:
        peer: the address.
        local: address to call from.
        timeout_s: of this and every later call on the socket; None: they block.

    Raises:
        OSError: nobody is there.
    """
    host, _, port = peer.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket_lock:
        connection = socket.socket(family, socket.SOCK_STREAM)
        foreign_sockets.add(connection.fileno())
    try:
        network_cut.refuse()
        connection.settimeout(timeout_s)
        connection.bind((local, 0))
        connection.connect((host, int(port)))
        # A request follows the proof: it would wait 40 ms for the peer's delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        close_registered(connection)
        raise
    return connection


def read_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view`` from the socket.

    Raises:
        OSError: the connection ended first.
    """
    while view.nbytes:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        view = view[count:]


def read_frame(
    connection: socket.socket, max_body: int, max_head: int = FIRST_HEAD_BYTES
) -> tuple[dict[str, Any], int]:
    """Read a frame's head; returns it with the size of the body that follows.

    Args:
        connection: to read from.
        max_body: bound on the body, in bytes.
        max_head: bound on the head, in bytes.

    Raises:
        OSError: the connection ended first.
        RemoteProtocolError: it is no frame, or larger than one may be here.
    """
    prefix = bytearray(PREFIX.size)
    read_exactly(connection, memoryview(prefix))
    head_size, body_size = parse_prefix(bytes(prefix), max_head, max_body)
    head = bytearray(head_size)
    read_exactly(connection, memoryview(head))
    return parse_head(bytes(head)), body_size
