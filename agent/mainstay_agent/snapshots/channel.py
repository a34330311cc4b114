"""Carries frames over one socket that does not block.

Heads are small and lie in memory. A body is received straight into the arena and sent straight from
it (sendfile), so its bytes are never copied in Python. The kernel sends the arena's own pages: they
must not be written before the other side has said that it has them.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, parse_head, parse_prefix
from mainstay_core.segments.spans import Span
from mainstay_core.wire.segments import MAX_SEGMENT_BYTES

TURN_BYTES = 4 << 20
"""Moved over one connection before the others have their turn."""
SCRATCH_BYTES = 256 << 10
"""Read at a time of a body that nobody keeps."""

_scratch = memoryview(bytearray(SCRATCH_BYTES))


class _Part(Enum):
    """A part of a frame that is being read."""

    PREFIX = 0
    HEAD = 1
    BODY = 2


class Channel(ABC):
    """One connection of a store, with what is read of it and what is still to be sent.

    Args:
        connection: does not block.
        arena_fd: descriptor of the arena, from which bodies are sent.
        max_head: bound on a frame's head, in bytes.
        clock: never jumps, in seconds.
    """

    reads_always = False
    """Whether it is read while something is unsent. If not, a peer that does not take its answers
    cannot have the store hold more and more of them."""
    max_body = MAX_SEGMENT_BYTES
    """Bound on a frame's body; what the body may be is checked with the head."""

    def __init__(
        self,
        connection: socket.socket,
        arena_fd: int,
        max_head: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = connection
        self._arena_fd, self._max_head, self._clock = arena_fd, max_head, clock
        self._unsent: deque[memoryview | Span] = deque()
        self._part, self._body_size, self._skipped = _Part.PREFIX, 0, 0
        self._want(bytearray(PREFIX.size))
        self.moved_at_s = clock()
        """When bytes last came or went."""
        self.registered = 0
        """Events for which the store's selector has the socket now."""

    # What subclasses say ---------------------------------------------------------

    @abstractmethod
    def begin(self, head: dict[str, Any], body_size: int) -> memoryview | None:
        """Take a frame's head.

        Returns:
            Memory for the body, of its size; None if nobody keeps the body.

        Raises:
            RemoteProtocolError: the peer is to be cut off.
        """

    @abstractmethod
    def finish(self) -> None:
        """Go on: the frame's body is all there, or all of it was skipped."""

    @abstractmethod
    def ended(self, why: str) -> None:
        """Give up what was held for this connection, which has ended."""

    @abstractmethod
    def due_s(self) -> float | None:
        """Return when the connection is to be ended if nothing moves; None: never."""

    @property
    def has_more(self) -> bool:
        """Whether there is something to send."""
        return bool(self._unsent)

    def refill(self) -> bool:
        """Queue what is to be sent next, now that nothing is unsent; return whether there was."""
        return False

    # What the store does ---------------------------------------------------------

    @property
    def interest(self) -> int:
        """The events to wait for."""
        reads = selectors.EVENT_READ if self.reads_always or not self._unsent else 0
        return reads | (selectors.EVENT_WRITE if self.has_more else 0)

    def turn(self, events: int) -> None:
        """Move what can be moved.

        Raises:
            OSError: the connection has ended.
            RemoteProtocolError: the peer does not keep to the protocol.
        """
        if events & selectors.EVENT_WRITE:
            self.flush()
        if events & selectors.EVENT_READ:
            self._read()

    def send(self, head: bytes, body: Span | None = None) -> None:
        """Send a frame's head, and its body from the arena, as soon as the kernel takes them.

        Raises:
            OSError: the connection has ended.
        """
        idle = not self._unsent
        self.queue(head, body)
        if idle:
            self.flush()

    def queue(self, head: bytes, body: Span | None = None) -> None:
        """Have a frame's head, and its body from the arena, sent in its turn."""
        self._unsent.append(memoryview(head))
        if body is not None and body.size:
            self._unsent.append(body)

    def flush(self) -> None:
        """Give the kernel what is unsent, as far as it takes it, and at most ``TURN_BYTES``.

        Raises:
            OSError: the connection has ended.
        """
        left = TURN_BYTES
        while left > 0 and (self._unsent or self.refill()):
            part = self._unsent[0]
            try:
                if isinstance(part, Span):
                    count = min(left, part.size)
                    moved = os.sendfile(self.socket.fileno(), self._arena_fd, part.offset, count)
                    rest: memoryview | Span = Span(part.offset + moved, part.size - moved)
                    size = part.size
                else:
                    # A body that follows begins in the same packet.
                    more = socket.MSG_MORE if len(self._unsent) > 1 else 0
                    moved = self.socket.send(part, more)
                    rest, size = part[moved:], part.nbytes
            except BlockingIOError:
                return
            left -= moved
            self.moved_at_s = self._clock()
            if moved == size:
                self._unsent.popleft()
            else:
                self._unsent[0] = rest

    # Reading ---------------------------------------------------------------------

    def _want(self, buffer: bytearray | memoryview) -> None:
        self._buffer, self._view = buffer, memoryview(buffer)

    def _read(self) -> None:
        left = TURN_BYTES
        while left > 0 and (self.reads_always or not self._unsent):
            try:
                count = self.socket.recv_into(self._view[:left])
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("the connection has ended")
            left -= count
            self.moved_at_s = self._clock()
            self._view = self._view[count:]
            if not self._view.nbytes:
                self._filled()

    def _filled(self) -> None:
        match self._part:
            case _Part.PREFIX:
                sizes = parse_prefix(bytes(self._buffer), self._max_head, self.max_body)
                head_size, self._body_size = sizes
                if not head_size:
                    raise RemoteProtocolError("a frame without a head")
                self._part = _Part.HEAD
                self._want(bytearray(head_size))
            case _Part.HEAD:
                into = self.begin(parse_head(bytes(self._buffer)), self._body_size)
                self._part, self._skipped = _Part.BODY, 0
                if not self._body_size:
                    self._finish()
                elif into is not None:
                    assert into.nbytes == self._body_size
                    self._want(into)
                else:
                    self._skip()
            case _Part.BODY:
                if 0 < self._skipped < self._body_size:
                    self._skip()
                else:
                    self._finish()

    def _skip(self) -> None:
        """Have the next part of a body read that nobody keeps."""
        count = min(SCRATCH_BYTES, self._body_size - self._skipped)
        self._skipped += count
        self._want(_scratch[:count])

    def _finish(self) -> None:
        self._part = _Part.PREFIX
        self._want(bytearray(PREFIX.size))
        self.finish()
