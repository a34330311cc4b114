"""Squared norms of flat gradients, added in an order of ours and not of a kernel's.

A chunk's squares are added like this, in fp64, zeros behind a short one's end: its 65,536 squares
are four rows of 16,384; the rows are added one by one, element by element; then the second half
of what is left is added to the first, until one is left. A square of fp32 is exact in fp64. Each
step is elementwise, so a kernel has no order to choose: the bits are the same on every device,
and however many chunks are read together. A block's chunks are added from the first to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from mainstay_core.base.digest import CHUNK
from mainstay_train.sums import compiled
from mainstay_train.sums.rows import Piece, Rows, read, scratch

COLUMNS = CHUNK // 4
"""Elements of a row, to which the rows behind it are added."""

_BATCH_ON_CPU = 8 * CHUNK
"""Elements that are widened at a time: fewer, and the starts of operations show."""


def fold(values: Iterable[float]) -> float:
    """Plain left-to-right sum: ``sum`` compensates for rounding from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


class FlatNorms:
    """The squared norms of the pieces of a flat buffer, for all buffers of one layout.

    Args:
        pieces: what lies in the buffer; the rest of it does not count.
        device: where the buffers are.
        batch: elements that are widened at a time, unless as many as suit the device.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        device: torch.device | str = "cpu",
        batch: int | None = None,
    ) -> None:
        self._device = torch.device(device)
        on_cpu = self._device.type == "cpu"
        self._rows = Rows(pieces, self._device, batch or (_BATCH_ON_CPU if on_cpu else None))
        longest = self._rows.rows[0].length if self._rows.rows else 0
        self._columns = min(COLUMNS, 1 << max(0, longest - 1).bit_length())
        self._end = max((row.start + row.length for row in self._rows.rows), default=0)
        self._compiled: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """Start, length and columns of each row, where compiled code squares them."""
        if on_cpu and compiled.load() is not None:
            each = [(r.start, r.length, compiled.columns_of(r.length)) for r in self._rows.rows]
            numbers = torch.tensor(each, dtype=torch.int64).view(-1, 3)
            starts, lengths, widths = numbers.t().contiguous()
            self._compiled = starts, lengths, widths
        self._order = [(number, self._rows.rows[number].piece) for number in self._rows.in_order()]

    def squares(self, flat: torch.Tensor) -> torch.Tensor:
        """The squared norm of each chunk, fp64 [chunks], where the buffer is.

        Args:
            flat: fp32, contiguous, a whole number of granules.
        """
        num_rows, columns = len(self._rows.rows), self._columns
        if not num_rows:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        if self._compiled is not None:
            assert flat.numel() >= self._end, "compiled code looks at no size"
            return compiled.squares(flat.detach(), *self._compiled)
        words = flat.detach().view(torch.int32)
        left = scratch("columns", self._device, torch.float64, num_rows * columns)
        left = left.view(num_rows, columns)
        for batch in self._rows.batches:
            values = read(words, batch).view(torch.float32)
            wide = scratch("squares", self._device, torch.float64, values.numel())
            wide = wide.view(values.shape).copy_(values)
            _add_rows(wide, left[batch.first : batch.stop])
        return _halved(left).clone()

    def by_piece(self, squares: Sequence[float]) -> list[tuple[int, list[float]]]:
        """(Which piece, what its chunks have, in order) for each that has any.

        Args:
            squares: what :meth:`squares` returned.
        """
        in_order = ((piece, squares[number]) for number, piece in self._order)
        return [
            (piece, [value for _, value in chunks])
            for piece, chunks in groupby(in_order, key=lambda chunk: chunk[0])
        ]


def _add_rows(wide: torch.Tensor, into: torch.Tensor) -> None:
    """Square, and add from the first row of each chunk to the last.

    Args:
        wide: [chunks, elements].
        into: [chunks, columns].
    """
    columns = into.shape[1]
    for number, row in enumerate(wide.tensor_split([*range(columns, wide.shape[1], columns)], 1)):
        full = row.shape[1] == columns
        sums = into if full else into[:, : row.shape[1]]
        if number:
            # A kernel may round once or twice here: a square has nothing to round.
            sums.addcmul_(row, row)
            continue
        if not full:
            into.zero_()
        torch.mul(row, row, out=sums)


def _halved(left: torch.Tensor) -> torch.Tensor:
    """Add halves of [chunks, columns], a power of two, in place, until there is one column."""
    while left.shape[1] > 1:
        left, second = left.tensor_split(2, 1)
        left.add_(second)
    return left[:, 0]
