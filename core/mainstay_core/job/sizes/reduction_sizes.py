"""Computes the memory in which one rank reduces gradients (``mainstay_train.exact.reduction``)."""

from __future__ import annotations

from collections.abc import Sequence

CHUNK = 65_536
"""Elements of a chunk: buckets are made of whole ones (``mainstay_train.exact.layout``)."""
WIDE_BYTES = 4
"""Gradients are fp32."""
PAD = 32
"""Parameters, and shares of a bucket, begin at multiples of so many elements."""
IN_FLIGHT = 2
"""Buckets that have scratch of their own: one may be on its way while the one before is summed."""


def chunk_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the elements of a stage's chunks, of which each block begins one."""
    chunks: list[int] = []
    for size in sizes:
        whole, rest = divmod(size, CHUNK)
        chunks += [CHUNK] * whole + [rest] * bool(rest)
    return chunks


def chunks_in(bucket_bytes: int) -> int:
    """Return the chunks of a bucket: one at least."""
    return max(1, bucket_bytes // (CHUNK * WIDE_BYTES))


def share_edges(length: int, num_cells: int) -> tuple[int, ...]:
    """Cut a bucket evenly: return where each cell's share begins, and where the last one ends.

    Args:
        length: elements of the bucket, a multiple of :data:`PAD`.
        num_cells: cells that share it.
    """
    granules = length // PAD
    return tuple(granules * cell // num_cells * PAD for cell in range(num_cells + 1))


def keeps_own(index: int, num_cells: int) -> bool:
    """Return whether a cell leaves its own share of a bucket where it lies, and sends the rest.

    What is exchanged is one run of elements. The shares of the first and of the last cell lie at
    its ends; that of another one lies between those of others, so it is copied along.

    Args:
        index: of the cell in its stage.
        num_cells: cells of the stage.
    """
    return index in (0, num_cells - 1)


def owned_elements(sizes: Sequence[int], index: int, num_cells: int, bucket_bytes: int) -> int:
    """Return the elements that a cell adds up: its share of each bucket.

    Args:
        sizes: elements of each block of the stage; chunks begin anew at each.
        index: of the cell in its stage.
        num_cells: cells of the stage.
        bucket_bytes: what is reduced at a time.
    """
    return sum(_own(length, index, num_cells) for length in _bucket_lengths(sizes, bucket_bytes))


def _own(length: int, index: int, num_cells: int) -> int:
    edges = share_edges(length, num_cells)
    return edges[index + 1] - edges[index]


def _bucket_lengths(sizes: Sequence[int], bucket_bytes: int) -> list[int]:
    chunks, step = chunk_sizes(sizes), chunks_in(bucket_bytes)
    return [sum(chunks[first : first + step]) for first in range(0, len(chunks), step)]


def reduction_bytes(
    sizes: Sequence[int],
    index: int,
    num_partials: Sequence[int],
    *,
    num_lanes: int,
    bucket_bytes: int,
) -> int:
    """Return what a cell receives and adds up, and the copies of its sums that it sends.

    Args:
        sizes: elements of each block of the stage.
        index: of the cell.
        num_partials: of each cell.
        num_lanes: of the job.
        bucket_bytes: what is reduced at a time.
    """
    cells = len(num_partials)
    keeps = keeps_own(index, cells)
    # Lanes with several partials are added up apart, but for the first.
    has_lane_sum = sum(num_partials) > num_lanes
    scratch: dict[tuple[str, int, int], int] = {}
    for number, length in enumerate(_bucket_lengths(sizes, bucket_bytes)):
        own, slot = _own(length, index, cells), number % IN_FLIGHT
        wanted = {("lane", 0, 0): own * has_lane_sum}
        if cells > 1:
            # With one other cell the sums are sent from where they belong.
            copies = cells - keeps if cells > 2 else 0
            wanted |= {("sums", slot, 0): own * copies}
            for turn in range(max(num_partials)):
                senders = sum(n > turn for n in num_partials)
                senders -= keeps and num_partials[index] > turn
                wanted |= {("received", slot, turn): own * senders}
        for name, elements in wanted.items():
            scratch[name] = max(scratch.get(name, 0), elements)
    return WIDE_BYTES * sum(scratch.values())
