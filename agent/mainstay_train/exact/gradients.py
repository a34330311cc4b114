"""Digest and norms of a stage's gradient, part by part.

On a CPU a part is a bucket of the reduction, and it is read while it is in a cache. Elsewhere the
start of an operation is what costs: there a part is as many buckets as make a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mainstay_core.base.digest import MIXER_SEEDS, Digest
from mainstay_train.exact.layout import CHUNK, BlockLayout, StageLayout
from mainstay_train.exact.unit_sums import Run, StageUnits, gather_units, whole_blocks, whole_of
from mainstay_train.sums import digests
from mainstay_train.sums.digests import FlatDigest
from mainstay_train.sums.norms import FlatNorms, fold
from mainstay_train.sums.readout import Later, Readout
from mainstay_train.sums.rows import Piece, batch_for, restricted

Bounds = tuple[int, int]
"""First element of a bucket in the stage's flat buffer, and one past its last."""


class Part(NamedTuple):
    """A run of buckets, and the digest and norms of what lies in it."""

    within: slice
    num_buckets: int
    digest: FlatDigest
    norms: FlatNorms
    digested: torch.Tensor
    """Which unit each piece of the digest is of, int64 [pieces], in host memory."""
    blocks: tuple[int, ...]
    """Which block each piece of the norms is of."""


class GradientSums:
    """Digest and norms of flat gradients of a stage.

    Args:
        layout: of the stage.
        bounds: of its buckets, which do not cut a chunk.
        place: the inner rank in names, where there are several.
        counts_copies: whether this rank's norms count what inner ranks hold in copies.
        device: where gradients are.
        units: of the stage; None: each block is one.
    """

    def __init__(
        self,
        layout: StageLayout,
        bounds: Sequence[Bounds],
        *,
        place: str = "",
        counts_copies: bool = True,
        device: torch.device | str = "cpu",
        units: StageUnits | None = None,
    ) -> None:
        device = torch.device(device)
        places = [*zip(layout.blocks, layout.offsets, strict=True)]
        units = units or whole_blocks(layout)
        self._num_blocks, self._blocks = len(places), units.blocks
        whole = [
            (Piece(identity(b, place), at + run.start, run.stop - run.start, *_in_chunks(run)), run)
            for (b, at), runs in zip(places, units.runs, strict=True)
            for run in runs
        ]
        counted = [
            Piece(str(number), offset, block.size if counts_copies else block.own)
            for number, (block, offset) in enumerate(places)
        ]
        self.parts: list[Part] = []
        """In the buffer's order."""
        self._part_of: dict[int, int] = {}
        for within in _grouped(bounds, 0 if device.type == "cpu" else batch_for(device)):
            start, stop = within[0][0], within[-1][1]
            self._part_of |= {first: len(self.parts) for first, _ in within}
            batch = None if device.type == "cpu" else stop - start
            of_digest = [
                (part, run.unit)
                for piece, run in whole
                if piece.start < stop and start < piece.start + piece.numel
                for part in restricted([piece], start, stop)
            ]
            of_norms = restricted(counted, start, stop)
            self.parts.append(
                Part(
                    slice(start, stop),
                    len(within),
                    FlatDigest(_from([piece for piece, _ in of_digest], start), device, batch),
                    FlatNorms(_from(of_norms, start), device, batch),
                    _numbers([unit for _, unit in of_digest]),
                    tuple(int(piece.name) for piece in of_norms),
                )
            )
        self._left: list[int] = []
        """Buckets of each part that are not complete."""
        self._reduced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> None:
        """Forget what was taken: another gradient is being reduced."""
        self._left = [part.num_buckets for part in self.parts]
        self._reduced.clear()

    def take(self, flat: torch.Tensor, start: int) -> None:
        """The bucket of the reduced gradient that begins there is complete.

        Args:
            flat: the stage's flat buffer.
            start: the bucket's first element.
        """
        number = self._part_of[start]
        self._left[number] -= 1
        if self._left[number] == 0:
            part = self.parts[number]
            of_part = flat[part.within]
            digested = part.digest.sums_of_pieces(of_part)
            self._reduced[number] = digested, part.norms.squares(of_part)

    def sums(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Of any gradient, now: sums of its parts, see :func:`digests.added`."""
        return [part.digest.sums(flat[part.within]) for part in self.parts]

    def digest(self, flat: torch.Tensor) -> Digest:
        """The digest of any gradient."""
        return digests.added(self.sums(flat))

    def read(self, readout: Readout) -> Read:
        """Have fetched what is known of the reduced gradient, all of whose buckets were taken."""
        fetched = []
        for number, part in enumerate(self.parts):
            sums, squares = self._reduced[number]
            fetched.append((part, readout.add(sums), readout.add(squares)))
        return Read(self._num_blocks, self._blocks, fetched)


class Read:
    """Digest and norms of a reduced gradient, once a readout is fetched.

    Args:
        num_blocks: of the stage.
        blocks: of each unit the number of its block.
        parts: of the gradient, with what was computed of each.
    """

    def __init__(
        self, num_blocks: int, blocks: Sequence[int], parts: Sequence[tuple[Part, Later, Later]]
    ) -> None:
        self._num_blocks, self._blocks, self._parts = num_blocks, blocks, parts
        self._units: torch.Tensor | None = None

    def digest(self) -> Digest:
        """Its digest."""
        return whole_of(self.unit_sums())

    def unit_sums(self) -> torch.Tensor:
        """Return both sums of each unit's part, int64 [mixers, units]."""
        if self._units is None:
            size = len(MIXER_SEEDS), len(self._blocks)
            self._units = torch.zeros(size, dtype=torch.int64, device="cpu")
            for part, sums, _ in self._parts:
                self._units.index_add_(1, part.digested, sums())
        return self._units

    def block_digests(self) -> tuple[Digest, ...]:
        """The digest of each block's part."""
        found = gather_units(self._num_blocks, _numbers(self._blocks), self.unit_sums())
        return tuple(digests.of_pieces(found))

    def norms_sq(self) -> tuple[float, ...]:
        """Squared norm of each block's part that counts: its chunks from the first to the last."""
        chunks: list[list[float]] = [[] for _ in range(self._num_blocks)]
        for part, _, squares in self._parts:
            for piece, values in part.norms.by_piece(squares().tolist()):
                chunks[part.blocks[piece]] += values
        return tuple(fold(values) for values in chunks)


def identity(block: BlockLayout, place: str = "") -> str:
    """Return the name of a block's gradient in digests.

    Args:
        block: whose flat buffer it is.
        place: the inner rank in names, where there are several.
    """
    return f"gradient:{block.name}{place}"


def _in_chunks(run: Run) -> tuple[int, int]:
    """Return the chunk of its block in which a run begins, and its place there."""
    return divmod(run.start, CHUNK)


def _numbers(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _from(pieces: Sequence[Piece], start: int) -> list[Piece]:
    """Pieces with their places in a part of the buffer."""
    return [piece._replace(start=piece.start - start) for piece in pieces]


def _grouped(bounds: Sequence[Bounds], least: int) -> list[list[Bounds]]:
    """Buckets side by side, of so many elements together if there are more."""
    groups: list[list[Bounds]] = []
    for bucket in bounds:
        if groups and groups[-1][-1][1] - groups[-1][0][0] < least:
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
    return groups
