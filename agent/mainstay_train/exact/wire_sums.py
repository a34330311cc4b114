"""Digests of what the cells of a stage send each other in a reduction, by sender and receiver.

Who sends states them in an exchange of their own, behind the last bucket; who receives compares.
Digests add up, so one for each sender and turn is enough, however many buckets there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mainstay_train.sums.digests import FlatDigest, drawn_twice
from mainstay_train.sums.rows import Piece

_WORDS = 4
"""fp32 numbers whose memory a digest takes: two sums of 8 bytes."""


class WireSums:
    """The digests of one reduction after the other.

    Args:
        device: where gradients live.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._digests: dict[tuple[int, int | None, tuple[int, ...]], FlatDigest] = {}
        self._counts: tuple[int, ...] = ()
        self._stated = self._received = torch.zeros(0, dtype=torch.int64, device=self._device)

    def begin(self, counts: Sequence[int]) -> None:
        """Begin with a reduction.

        Args:
            counts: partials that each cell sends.
        """
        if self._counts != tuple(counts):
            self._digests.clear()  # shares have other sizes, or come from others
            self._counts = tuple(counts)
        shape = (len(counts), max(counts, default=0), 2)
        self._stated, self._received = (
            torch.zeros(shape, dtype=torch.int64, device=self._device) for _ in range(2)
        )

    def send(self, bucket: int, turn: int, sent: torch.Tensor, sizes: Sequence[int]) -> None:
        """Take what goes to the cells of one bucket in one turn.

        Args:
            bucket: its number.
            turn: of the senders' partials.
            sent: flat, cut by receiver.
            sizes: elements by receiver.
        """
        self._add(self._stated, bucket, turn, sent, sizes, None)

    def receive(
        self, bucket: int, turn: int, received: torch.Tensor, sizes: Sequence[int], rank: int
    ) -> None:
        """Take what came from the cells of one bucket in one turn.

        Args:
            bucket: its number.
            turn: of the senders' partials.
            received: flat, cut by sender.
            sizes: elements by sender.
            rank: the cell that received it.
        """
        self._add(self._received, bucket, turn, received, sizes, rank)

    def stated(self) -> torch.Tensor:
        """Return what was sent to each cell, [cells x words], fp32 by name alone: it travels."""
        return self._stated.reshape(-1).view(torch.float32)

    def differing(self, theirs: torch.Tensor) -> torch.Tensor:
        """Return in how many turns what came from each cell is not what it says, [cells], int64.

        Args:
            theirs: what each cell has stated, as :meth:`stated` of the like.
        """
        said = theirs.view(torch.int64).view(self._received.shape)
        return (said != self._received).any(-1).sum(-1)

    @property
    def words(self) -> int:
        """Numbers of :meth:`stated` for each cell."""
        return _WORDS * int(self._stated.shape[1])

    def _add(
        self,
        sums: torch.Tensor,
        bucket: int,
        turn: int,
        flat: torch.Tensor,
        sizes: Sequence[int],
        receiver: int | None,
    ) -> None:
        """Add to the digests of each cell. A piece is called by its bucket and its receiver."""
        if not flat.numel():
            return
        key = bucket, receiver, tuple(sizes)
        if key not in self._digests:
            pieces = [
                Piece(f"{bucket}/{cell if receiver is None else receiver}", stop - size, size)
                for cell, (stop, size) in enumerate(zip(accumulate(sizes), sizes, strict=True))
            ]
            self._digests[key] = drawn_twice(pieces, self._device)
        sums[:, turn] += self._digests[key].sums_of_pieces(flat).t()
