"""Cuts what lies in a flat buffer into rows, one for each chunk, and reads them in batches.

Digests and norms belong to chunks, and a stage may have a hundred thousand. So rows of like
lengths are read together, as the rows of a matrix, and the number of tensor operations grows with
the batches, never with the chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from mainstay_core.base.digest import CHUNK
from mainstay_train.base import device as devices

BATCH_ON_CPU = 4 * CHUNK
"""Elements that are read at a time: 2 MiB once they are widened, which a core's caches hold."""

BATCH = 64 * CHUNK
"""The same on other devices, 32 MiB: there the start of an operation is what costs."""

GRANULE = 32
"""Pieces of a flat buffer start at multiples of so many elements (``layout.PAD``)."""

_ALONE_ON_CPU = CHUNK // 4
"""A row of so many elements is read where it lies: to copy it costs more than to start for it."""


class Piece(NamedTuple):
    """A tensor that lies in a flat buffer, or a run of its chunks."""

    name: str
    """Its identity in digests."""
    start: int
    """Its first element in the buffer. Invariant: a multiple of :data:`GRANULE`."""
    numel: int
    first_chunk: int = 0
    """Of the tensor's chunks, the one that it begins with."""
    position: int = 0
    """Its first element's place in that chunk: 0 but for a part of a tensor."""


class Row(NamedTuple):
    """A chunk of a piece."""

    length: int
    start: int
    """Its first element in the buffer."""
    piece: int
    chunk: int
    """Which it is of the tensor's."""
    position: int = 0
    """Of its first element in the chunk."""


class Batch(NamedTuple):
    """Rows that are read together."""

    first: int
    stop: int
    width: int
    """Elements of each row as it is read."""
    start: int | None
    """First element in the buffer, of rows that lie there one behind the other."""
    granules: torch.Tensor
    """[rows, 1]: where they start in the buffer."""
    lengths: torch.Tensor | None
    """[rows, 1]; None where all are as long as the width."""


class Rows:
    """The rows of some pieces, longest first.

    Args:
        pieces: what lies in the buffer; the rest of it is not read.
        device: where the buffers are.
        batch: elements that are read at a time, unless as many as suit the device.
    """

    def __init__(
        self, pieces: Sequence[Piece], device: torch.device, batch: int | None = None
    ) -> None:
        self.rows = sorted(
            (row for number, piece in enumerate(pieces) for row in _rows_of(number, piece)),
            key=lambda row: (-row.length, row.start),
        )
        alone = _ALONE_ON_CPU if device.type == "cpu" else None
        self.batches = _batches(self.rows, batch or batch_for(device), alone, device)

    def in_order(self) -> list[int]:
        """The rows' numbers in the pieces' order, chunks ascending."""
        numbers = range(len(self.rows))
        return sorted(numbers, key=lambda i: (self.rows[i].piece, self.rows[i].chunk))


def _rows_of(number: int, piece: Piece) -> Iterator[Row]:
    """Cut a piece at the borders of its tensor's chunks."""
    begin, chunk, position = 0, piece.first_chunk, piece.position
    while begin < piece.numel:
        length = min(CHUNK - position, piece.numel - begin)
        yield Row(length, piece.start + begin, number, chunk, position)
        begin, chunk, position = begin + length, chunk + 1, 0


def batch_for(device: torch.device) -> int:
    """Elements that are read at a time there."""
    return BATCH_ON_CPU if device.type == "cpu" else BATCH


def read(words: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The rows of a batch side by side, [rows, width], and zero beyond their lengths.

    Args:
        words: a buffer as int32, contiguous, a whole number of granules.
        batch: which rows.

    Returns:
        A view of the buffer, or memory that the thread's next call writes to again.
    """
    rows = batch.stop - batch.first
    if batch.start is not None:
        return words[batch.start : batch.start + rows * batch.width].view(rows, batch.width)
    granules, positions = words.view(-1, GRANULE), _positions(words.device)
    index = batch.granules + positions[: batch.width // GRANULE]
    if batch.lengths is not None:  # a short row's tail: read from anywhere, then dropped
        index.clamp_(max=granules.shape[0] - 1)
    picked = scratch("picked", words.device, torch.int32, index.numel() * GRANULE)
    torch.index_select(granules, 0, index.view(-1), out=picked.view(-1, GRANULE))
    picked = picked.view(rows, batch.width)
    if batch.lengths is not None:
        picked.masked_fill_(positions[: batch.width] >= batch.lengths, 0)
    return picked


def stretches(count: int, start: int, batch: int) -> list[tuple[int, int, int, int]]:
    """Cut words into runs of chunks: (first chunk, chunks, first and one past the last position).

    Only the first and the last chunk may be there in part; chunks count from the first one.
    """
    stop, last = start % CHUNK + count, (start % CHUNK + count - 1) // CHUNK
    head = start % CHUNK != 0 or stop < CHUNK
    tail = stop % CHUNK != 0 and not (head and last == 0)
    stretches = [(0, 1, start % CHUNK, min(stop, CHUNK))] if head else []
    whole = range(int(head), last if tail else last + 1)
    step = batch // CHUNK
    stretches += [
        (row, min(step, whole.stop - row), 0, CHUNK) for row in range(whole.start, whole.stop, step)
    ]
    if tail:
        stretches.append((last, 1, 0, stop - last * CHUNK))
    return stretches


def _batches(
    rows: Sequence[Row], size: int, alone: int | None, device: torch.device
) -> list[Batch]:
    """Cut rows, longest first, so that a batch has at most ``size`` elements or one row.

    Args:
        rows: longest first; of one length, in the buffer's order.
        size: of a batch.
        alone: rows of so many elements are never copied; None: any may be.
        device: where the buffers are.
    """
    batches = []
    first = 0
    while first < len(rows):
        length = rows[first].length
        in_place = alone is not None and length >= alone
        width = length if in_place else -(-length // GRANULE) * GRANULE
        stop = min(len(rows), first + max(1, size // width))
        if in_place or length == CHUNK:  # rows of one length need no mask: they stay apart
            stop = _stop(rows, first, stop, in_place)
        within = rows[first:stop]
        uneven = any(row.length != width for row in within)
        consecutive = all(b.start - a.start == width for a, b in pairwise(within))
        granules = [[row.start // GRANULE] for row in within]
        lengths = [[row.length] for row in within]
        batches.append(
            Batch(
                first=first,
                stop=stop,
                width=width,
                start=None if uneven or not consecutive else within[0].start,
                granules=devices.sent(torch.tensor(granules), device),
                lengths=devices.sent(torch.tensor(lengths), device) if uneven else None,
            )
        )
        first = stop
    return batches


def _stop(rows: Sequence[Row], first: int, most: int, in_place: bool) -> int:
    """One past the last row that goes with the first, which has its length."""
    length = rows[first].length
    for number in range(first + 1, most):
        apart = rows[number].start - rows[number - 1].start != length
        if rows[number].length != length or (in_place and apart):
            return number
    return most


@lru_cache(maxsize=16)
def _positions(device: torch.device) -> torch.Tensor:
    """The positions in a chunk."""
    return torch.arange(CHUNK, device=device)


class _Scratches(threading.local):
    """Memory that a thread uses again and again: fresh pages cost more than the work."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}


_scratches = _Scratches()


def scratch(name: str, device: torch.device, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Memory of a thread, flat, the same at every call with that name on a CPU."""
    if device.type != "cpu":  # its allocator keeps memory by itself
        return torch.empty(numel, dtype=dtype, device=device)
    kept = _scratches.kept.get((name, device, dtype))
    if kept is None or kept.numel() < numel:
        kept = _scratches.kept[name, device, dtype] = torch.empty(numel, dtype=dtype)
    return kept[:numel]


def restricted(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """What of some pieces lies in a run of chunks of the buffer.

    Args:
        pieces: whole ones.
        start: where the run begins. Invariant: no chunk of a piece lies on both sides of it.
        stop: where it ends; likewise.
    """
    found = []
    for piece in pieces:
        begin, end = max(piece.start, start), min(piece.start + piece.numel, stop)
        if begin < end:
            chunks, position = divmod(piece.position + begin - piece.start, CHUNK)
            chunk = piece.first_chunk + chunks
            found.append(Piece(piece.name, begin, end - begin, chunk, position))
    return found
