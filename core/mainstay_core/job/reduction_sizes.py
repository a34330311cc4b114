"""Computes the memory in which one rank reduces gradients (``mainstay_train.exact.reduction``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

CHUNK = 65_536
"""Elements of a chunk: what has one owner in the reduction (``mainstay_train.exact.layout``)."""
WIDE_BYTES = 4
"""Gradients are fp32."""
PLACE_BYTES = 2 * 8
"""Of each granule its place on the way out and home."""
IN_FLIGHT = 2
"""Buckets that have scratch of their own."""


def chunk_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the elements of a stage's chunks, of which each block begins one."""
    chunks: list[int] = []
    for size in sizes:
        whole, rest = divmod(size, CHUNK)
        chunks += [CHUNK] * whole + [rest] * bool(rest)
    return chunks


def reduction_bytes(
    sizes: Sequence[int],
    index: int,
    num_partials: Sequence[int],
    *,
    num_lanes: int,
    bucket_bytes: int,
) -> int:
    """Return what a cell packs, receives and adds up, with the places of what it packs.

    Args:
        sizes: elements of each block of the stage.
        index: of the cell.
        num_partials: of each cell.
        num_lanes: of the job.
        bucket_bytes: what is reduced at a time.
    """
    cells, chunks = len(num_partials), chunk_sizes(sizes)
    step = max(1, bucket_bytes // (CHUNK * WIDE_BYTES))
    # Lanes with several partials are added up apart, but for the first.
    has_lane_sum = sum(num_partials) > num_lanes
    places: dict[tuple[int, ...], int] = {}
    scratch: dict[tuple[str, int, int], int] = {}
    for number, first in enumerate(range(0, len(chunks), step)):
        within, slot = chunks[first : first + step], number % IN_FLIGHT
        total = sum(within)
        own = sum(within[(index - first) % cells :: cells])
        places[(first % cells, *within)] = total // math.gcd(*within) * PLACE_BYTES
        wanted = {("lane", 0, 0): own * has_lane_sum}
        if cells > 1:
            wanted |= {("parts", slot, 0): total, ("sums", slot, 0): own * (cells - 1)}
            for turn in range(max(num_partials)):
                senders = sum(n > turn for i, n in enumerate(num_partials) if i != index)
                wanted |= {("packed", slot, turn): total, ("received", slot, turn): own * senders}
        for name, elements in wanted.items():
            scratch[name] = max(scratch.get(name, 0), elements)
    return sum(places.values()) + WIDE_BYTES * sum(scratch.values())
