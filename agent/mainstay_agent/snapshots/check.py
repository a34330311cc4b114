"""Reads every segment of a store once, a piece at a time, and computes its checksum.

The digest in a segment's header is its writer's: it depends on the types of the tensors, which a
store does not know. So a store computes a checksum of the bytes, which must be equal in all copies
of a segment (:mod:`mainstay_core.snapshots.checks` compares them). A commit has a seal, which a
store checks by itself. So it does the keys by which it finds segments.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import replace

from mainstay_agent.snapshots.arena import Arena
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.segments.report_sizes import record_bytes
from mainstay_core.segments.status import Checksums
from mainstay_core.wire.segments import MAX_BAD, SegmentKey, cut_to_bounds
from mainstay_core.wire.stores import StoreCheck

PIECE_BYTES = 4 << 20
"""Read before the connections have their turn: about 2 ms."""
SEAL_COST = 64
"""Bytes of a segment that are read in the time in which one of a commit is checked, roughly."""


class SegmentCheck:
    """One check of a store. What is dropped meanwhile is not read; what comes later neither.

    Args:
        number: which check was asked for.
        index: what is in the store.
        arena: its memory.
        sums: of the store's checks before.
        lost: of a check before, which this one replaces: segments that no key found.
    """

    def __init__(
        self,
        number: int,
        index: SegmentIndex,
        arena: Arena,
        sums: Checksums,
        lost: Sequence[SegmentKey] = (),
    ) -> None:
        self.number = number
        self._index, self._arena, self._sums = index, arena, sums
        self._lineage, self._began_s = index.lineage, time.monotonic()
        self.lost = [*lost, *index.drop_lost()]
        """Segments that no key found. They are dropped."""
        self._left: list[SegmentKey] = [segment.header.key for segment in index.segments()]
        self._commits = index.commits
        self._steps = [*self._commits.steps]
        """Whose commits are left to check."""
        self._num_records, self._bad_records = 0, list[int]()
        self._segment: Segment | None = None
        self._sum = self._at = 0

    def advance(self) -> StoreCheck | None:
        """Read the next piece; return the outcome once all is read."""
        left = PIECE_BYTES
        while left > 0:
            segment = self._segment or self._next()
            if segment is not None:
                left -= self._read(segment, left)
            elif self._steps:
                left -= self._check_record(self._steps.pop())
            else:
                return self._close()
        return None

    def _read(self, segment: Segment, most: int) -> int:
        """Read at most so many bytes of the segment at hand; return what that counts for."""
        begin = segment.span.offset + self._at
        size = min(most, segment.span.size - self._at)
        self._sum = zlib.crc32(self._arena.view[begin : begin + size], self._sum)
        self._at += size
        if self._at == segment.span.size:
            self._sums.add(segment.header, self._sum, is_doubted=segment.is_doubted)
            self.give_up()
        return size or 1

    def _check_record(self, step: int) -> int:
        """Check the commit of a step, if it is still kept; return what that counts for."""
        record = self._commits.find(step)
        if record is None:
            return 1
        self._num_records += 1
        if self._commits.check(step):
            self._bad_records.append(step)
        return SEAL_COST * record_bytes(record)

    def _close(self) -> StoreCheck:
        seconds = time.monotonic() - self._began_s
        done = self._sums.close(self.number, self._lineage, seconds)
        bad = tuple(sorted(self._bad_records))
        lost = tuple(cut_to_bounds(key) for key in self.lost[:MAX_BAD])
        return replace(done, num_records=self._num_records, bad_records=bad, lost=lost)

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
