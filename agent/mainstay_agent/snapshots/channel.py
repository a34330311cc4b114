"""Carries frames over one socket that does not block.

Heads are small and lie in memory. A body is received straight into the arena and sent straight from
it (sendfile), so its bytes are not copied in Python. The kernel sends the arena's own pages: they
must not be written before the other side has said that it has them.

Each call into the kernel, and each time that a thread is woken, costs as much as copying tens of
kilobytes. So what comes behind a body is received with its end, as far as it is there
(``AHEAD_BYTES``): the next heads, small bodies, and the beginning of a large one, which alone are
copied from there. Heads that wait to be sent leave in one call. While a body comes, a store is
woken for many bytes of it at a time (``LEAST_BYTES``).
"""

from __future__ import annotations

import itertools
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
AHEAD_BYTES = 16 << 10
"""Received at most behind what is wanted now. It is the room of each connection, and what is copied
of a large body."""
LEAST_BYTES = 512 << 10
"""Of a body that comes: a store is not woken for less, or for less than the rest of it. A peer that
sends less than this while its connection may be idle counts as one that sends nothing."""
MAX_HEADS = 64
"""Heads that leave in one call; the kernel takes 1024 (UIO_MAXIOV)."""

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
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._least = 1
        """Bytes with which the socket is readable; its end always is."""
        self._taken = self._received = 0
        """Bytes of it that were taken, and that were received."""
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
        # What was received ahead waits for no event of the socket.
        if events & selectors.EVENT_READ or self._taken < self._received:
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
                    left -= self._send_body(part, left)
                else:
                    left -= self._send_heads()
            except BlockingIOError:
                return
            self.moved_at_s = self._clock()

    def _send_body(self, body: Span, most: int) -> int:
        """Send at most so many bytes of a body that is first; return how many left."""
        count = min(most, body.size)
        moved = os.sendfile(self.socket.fileno(), self._arena_fd, body.offset, count)
        if moved == body.size:
            self._unsent.popleft()
        else:
            self._unsent[0] = Span(body.offset + moved, body.size - moved)
        return moved

    def _send_heads(self) -> int:
        """Send the heads that are first, up to the next body; return how many bytes left."""
        heads: list[memoryview] = []
        for part in itertools.islice(self._unsent, MAX_HEADS):
            if isinstance(part, Span):
                break
            heads.append(part)
        # A body that follows begins in the same packet.
        more = socket.MSG_MORE if len(self._unsent) > len(heads) else 0
        moved = left = self.socket.sendmsg(heads, (), more)
        for head in heads:
            if left < head.nbytes:
                self._unsent[0] = head[left:]
                break
            left -= head.nbytes
            self._unsent.popleft()
        return moved

    # Reading ---------------------------------------------------------------------

    def _want(self, buffer: bytearray | memoryview) -> None:
        self._buffer, self._view = buffer, memoryview(buffer)

    def _read(self) -> None:
        self._read_what_is_there()
        self._wait_for_more()

    def _read_what_is_there(self) -> None:
        left = TURN_BYTES
        while self.reads_always or not self._unsent:
            self._take_ahead()
            if not self._view.nbytes:
                self._filled()
                continue
            if left <= 0:
                return
            try:
                left -= self._receive(left)
            except BlockingIOError:
                return

    def _wait_for_more(self) -> None:
        """Have the kernel say that there is something to read once it is worth it.

        Whatever ended the reading: what is left of a body must not be less than what is waited for.
        """
        is_body = self._part is _Part.BODY
        least = min(LEAST_BYTES, self._view.nbytes) if is_body else 1
        if least != self._least:
            self._least = least
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _take_ahead(self) -> None:
        """Fill what is wanted, as far as it was received already."""
        count = min(self._view.nbytes, self._received - self._taken)
        if count:
            self._view[:count] = self._ahead[self._taken : self._taken + count]
            self._view = self._view[count:]
            self._taken += count

    def _receive(self, most: int) -> int:
        """Receive at most so many bytes of what is wanted, and what is there behind it."""
        wanted = self._view[:most]
        # All that was received before is taken, or less would be wanted.
        into = [wanted, self._ahead] if wanted.nbytes == self._view.nbytes else [wanted]
        count = self.socket.recvmsg_into(into)[0]
        if count == 0:
            raise ConnectionResetError("the connection has ended")
        self.moved_at_s = self._clock()
        here = min(count, wanted.nbytes)
        self._view = self._view[here:]
        self._taken, self._received = 0, count - here
        return count

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
