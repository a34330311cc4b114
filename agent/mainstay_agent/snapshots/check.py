"""Reads every segment of a store once, a piece at a time, and computes its checksum.

The digest in a segment's header is its writer's: it depends on the types of the tensors, which a
store does not know. So a store computes a checksum of the bytes, which must be equal in all copies
of a segment (:mod:`mainstay_core.snapshots.checks` compares them).
"""

from __future__ import annotations

import time
import zlib

from mainstay_agent.snapshots.arena import Arena
from mainstay_core.segments.index import Segment, SegmentIndex
from mainstay_core.segments.status import Checksums
from mainstay_core.wire.segments import SegmentKey
from mainstay_core.wire.stores import StoreCheck

PIECE_BYTES = 4 << 20
"""Read before the connections have their turn: about 2 ms."""


class SegmentCheck:
    """One check of a store. What is dropped meanwhile is not read; what comes later neither.

    Args:
        number: which check was asked for.
        index: what is in the store.
        arena: its memory.
        sums: of the store's checks before.
    """

    def __init__(self, number: int, index: SegmentIndex, arena: Arena, sums: Checksums) -> None:
        self.number = number
        self._index, self._arena, self._sums = index, arena, sums
        self._lineage, self._began_s = index.lineage, time.monotonic()
        self._left: list[SegmentKey] = [segment.header.key for segment in index.segments()]
        self._segment: Segment | None = None
        self._sum = self._at = 0

    def advance(self) -> StoreCheck | None:
        """Read the next piece; return the outcome once all is read."""
        left = PIECE_BYTES
        while left > 0:
            segment = self._segment or self._next()
            if segment is None:
                seconds = time.monotonic() - self._began_s
                return self._sums.close(self.number, self._lineage, seconds)
            begin = segment.span.offset + self._at
            size = min(left, segment.span.size - self._at)
            self._sum = zlib.crc32(self._arena.view[begin : begin + size], self._sum)
            self._at += size
            left -= size or 1
            if self._at == segment.span.size:
                self._sums.add(segment.header, self._sum)
                self.give_up()
        return None

    def give_up(self) -> None:
        """Hold the segment at hand no more."""
        if self._segment is not None:
            self._index.release(self._segment)
            self._segment = None

    def _next(self) -> Segment | None:
        """Return the next segment that is still kept, from its beginning."""
        while self._left:
            segment = self._index.find(self._left.pop())
            if segment is not None:
                self._index.hold(segment)
                self._segment, self._sum, self._at = segment, 0, 0
                return segment
        return None
