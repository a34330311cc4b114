"""Maps the memory of a pod's store of segments, and reads from it."""

from __future__ import annotations

import os
import socket

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, parse_head, parse_prefix
from mainstay_core.segments import frames

READ_BYTES = 1 << 16
"""Read at a time from a store; its heads are shorter."""


def receive_arena(connection: socket.socket) -> tuple[int, int]:
    """Return descriptor and size of the arena, the first thing that a store says.

    Raises:
        OSError: the connection ended first.
        RemoteProtocolError: it is something else.
    """
    data, fds = b"", []
    while len(data) < PREFIX.size or len(data) < sum(_sizes(data)):
        wanted = PREFIX.size if len(data) < PREFIX.size else sum(_sizes(data))
        more, found, _, _ = socket.recv_fds(connection, wanted - len(data), 1)
        fds += found
        if not more:
            raise ConnectionResetError("the pod's store of segments closed the connection")
        data += more
    message = frames.decode_to_trainer(parse_head(data[PREFIX.size :]))
    if not isinstance(message, frames.Arena) or len(fds) != 1:
        raise RemoteProtocolError("the pod's store of segments gave no arena")
    return fds[0], message.size


def _sizes(data: bytes) -> tuple[int, int]:
    """Return the sizes of a frame's prefix and head."""
    head_size, _ = parse_prefix(data[: PREFIX.size], READ_BYTES, 0)
    return PREFIX.size, head_size


def read_at(fd: int, offset: int, into: memoryview) -> None:
    """Copy bytes of the arena. The kernel does it, so other threads run meanwhile."""
    while into.nbytes:
        count = os.preadv(fd, [into], offset)
        into, offset = into[count:], offset + count
