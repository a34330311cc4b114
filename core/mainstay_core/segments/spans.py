"""Gives away places in an arena of a fixed size, and takes them back.

First fit (Knuth, The Art of Computer Programming, vol. 1, section 2.5): of the free places the
first that is large enough. Neighbours that are free are one. A place begins and ends on a page, so
that no two segments share one: while the kernel still sends the pages of one segment, the next may
be written.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

PAGE_BYTES = 4096


class Span(NamedTuple):
    """A place in the arena."""

    offset: int
    """Of its first byte."""
    size: int
    """Bytes that were asked for; whole pages are taken."""


NOWHERE = Span(0, 0)
"""The place of a segment without bytes. It takes no room."""


def room_of(size: int) -> int:
    """Return how many bytes of the arena ``size`` bytes take: whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class SpanAllocator:
    """The free places of one arena.

    Invariant: free places do not touch and are in order.

    Each call takes time in proportion to the number of free places, of which there is at most one
    more than there are segments.

    Args:
        size_bytes: of the arena, whole pages.
    """

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes % PAGE_BYTES == 0
        self._offsets = [0] if size_bytes else []
        self._sizes = [size_bytes] if size_bytes else []
        self.free_bytes = size_bytes
        """Bytes in all free places together."""

    @property
    def largest(self) -> int:
        """The bytes of the largest place that is free."""
        return max(self._sizes, default=0)

    def copy(self) -> SpanAllocator:
        """Return an allocator of an arena in which the same places are free."""
        twin = SpanAllocator(0)
        twin._offsets, twin._sizes = [*self._offsets], [*self._sizes]
        twin.free_bytes = self.free_bytes
        return twin

    def allocate(self, size: int) -> Span | None:
        """Return a place for ``size`` bytes; None if no free place is large enough."""
        room = room_of(size)
        if not room:
            return NOWHERE
        for at, free in enumerate(self._sizes):
            if free >= room:
                offset = self._offsets[at]
                if free == room:
                    del self._offsets[at], self._sizes[at]
                else:
                    self._offsets[at] += room
                    self._sizes[at] -= room
                self.free_bytes -= room
                return Span(offset, size)
        return None

    def free(self, span: Span) -> None:
        """Take back a place that was given away."""
        offset, room = span.offset, room_of(span.size)
        if not room:
            return
        self.free_bytes += room
        at = bisect_left(self._offsets, offset)
        before = at > 0 and self._offsets[at - 1] + self._sizes[at - 1] == offset
        after = at < len(self._offsets) and offset + room == self._offsets[at]
        if after:
            room += self._sizes[at]
            del self._offsets[at], self._sizes[at]
        if before:
            self._sizes[at - 1] += room
        else:
            self._offsets.insert(at, offset)
            self._sizes.insert(at, room)
