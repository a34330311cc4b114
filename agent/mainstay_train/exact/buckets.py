"""Cuts the flat gradient of a stage into buckets, and each bucket into shares of the cells."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from mainstay_core.job.sizes.reduction_sizes import IN_FLIGHT, chunks_in, keeps_own, share_edges


class Bucket(NamedTuple):
    """A run of a stage's chunks that is reduced together."""

    number: int
    start: int
    """First element in the stage's flat buffer."""
    stop: int
    edges: tuple[int, ...]
    """Where the cells' shares of it begin, counted from its start, and where the last one ends."""

    @property
    def slot(self) -> int:
        """Which set of scratch it uses."""
        return self.number % IN_FLIGHT

    @property
    def within(self) -> slice:
        """Where it lies in a flat buffer of the stage."""
        return slice(self.start, self.stop)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the cells' shares."""
        return tuple(stop - start for start, stop in pairwise(self.edges))

    def share(self, rank: int) -> slice:
        """Where a cell's share lies in a flat buffer of the stage."""
        return slice(self.start + self.edges[rank], self.start + self.edges[rank + 1])

    def exchanged(self, rank: int) -> slice:
        """What a cell exchanges: the others' shares, with its own only if that lies between."""
        first = rank == 0 and keeps_own(rank, len(self.sizes))
        last = rank == len(self.sizes) - 1 and keeps_own(rank, len(self.sizes))
        return slice(self.start + self.edges[first], self.start + self.edges[-1 - last])

    def exchanged_sizes(self, rank: int) -> tuple[int, ...]:
        """Elements of the shares in what a cell exchanges; none of its own where that stays."""
        keeps = keeps_own(rank, len(self.sizes))
        return tuple(0 if keeps and cell == rank else n for cell, n in enumerate(self.sizes))


def cut(lengths: Sequence[int], bucket_bytes: int, num_cells: int) -> tuple[Bucket, ...]:
    """Cut a stage's chunks into buckets, and each evenly into a share for every cell.

    A share is one run of elements, so nothing is packed: it is sent from where it lies, and
    received there. Whose share an element is in changes no bit of its sum.

    Args:
        lengths: elements of the chunks.
        bucket_bytes: of a bucket at most, unless one chunk is larger.
        num_cells: cells that share the stage.
    """
    return tuple(
        Bucket(number, start, stop, share_edges(stop - start, num_cells))
        for number, (start, stop) in enumerate(bounds(lengths, bucket_bytes))
    )


def bounds(lengths: Sequence[int], bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """(first element, one past the last) of each bucket; arguments as of :func:`cut`."""
    starts = [*accumulate(lengths, initial=0)]
    return tuple(pairwise([*starts[: -1 : chunks_in(bucket_bytes)], starts[-1]]))
