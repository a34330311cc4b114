"""The units of a stage's state and gradient, as bytes of segments.

A segment is the tensors of one unit, one behind the other. Each begins at a multiple of 64 bytes,
so that it can be read where it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.wire.segments import SegmentKind
from mainstay_train.exact.layout import ALIGNMENT_BYTES
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model.blocks import Block
from mainstay_train.sums import digests


class Piece(NamedTuple):
    """One tensor of a unit."""

    id: str
    """Identity in digests."""
    tensor: torch.Tensor
    """Flat; a view of the state or of the reduced gradient."""
    offset: int
    """Of its first byte in the segment."""


class UnitBytes:
    """The segments of one stage.

    Units are numbered in model order: block after block, and in a block as it names them.

    Args:
        state: of the stage.
        reduced: its reduced gradient, flat.
    """

    def __init__(self, state: StageState, reduced: torch.Tensor) -> None:
        self._state, self._reduced = state, reduced
        self.parameters = tuple(names for block in state.blocks for names in block.units.values())
        """Model-wide names of each unit's parameters."""
        self.names = tuple(name for block in state.blocks for name in block.units)
        self._pieces = {
            SegmentKind.STATE: [_laid_out(tensors) for tensors in self._state_tensors()],
            SegmentKind.GRADIENT: [_laid_out(tensors) for tensors in self._gradient_tensors()],
            SegmentKind.COMPUTE: [_laid_out(tensors) for tensors in self._compute_tensors()],
        }
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.prices = tuple(
            UnitPrice(
                name=name,
                full_bytes=self.size_bytes(number, SegmentKind.STATE),
                compute_bytes=0,
            )
            for number, name in enumerate(self.names)
        )
        """Of the units, by number: gradients are divided by them. Compute weights play no part."""

    def skippable(self, block: int, frozen: Collection[str]) -> tuple[str, ...]:
        """Return the frozen units of a block whose weight gradients can be left out.

        Args:
            block: its number in the stage.
            frozen: names of units.
        """
        part = self._state.blocks[block]
        assert isinstance(part, Block), "a user's own loop computes nothing again"
        return tuple(name for name in part.units if name in frozen and part.can_skip(name))

    def size_bytes(self, unit: int, kind: SegmentKind) -> int:
        """Return the size of a unit's segment."""
        pieces = self._pieces[kind][unit]
        return _end(pieces[-1]) if pieces else 0

    def write(self, unit: int, kind: SegmentKind, memory: memoryview) -> None:
        """Copy a unit into the memory of its segment; waits for a device."""
        target = _tensor_of(memory)
        for piece in self._pieces[kind][unit]:
            source = piece.tensor.view(torch.uint8)
            target[piece.offset : piece.offset + source.numel()].copy_(source)

    def read(self, unit: int, kind: SegmentKind, memory: memoryview) -> None:
        """Copy a segment's memory to where the unit lies; waits for a device."""
        source = _tensor_of(memory)
        for piece in self._pieces[kind][unit]:
            target = piece.tensor.view(torch.uint8)
            target.copy_(source[piece.offset : piece.offset + target.numel()])

    def digest(self, unit: int, kind: SegmentKind, memory: memoryview) -> str:
        """Return the digest of a unit's bytes, as they lie in the memory of a segment."""
        source, total = _tensor_of(memory), Digest.zero()
        for piece in self._pieces[kind][unit]:
            size = piece.tensor.numel() * piece.tensor.element_size()
            there = source[piece.offset : piece.offset + size].view(piece.tensor.dtype)
            total += digests.tensor_digest(piece.id, there)
        return total.hex()

    def _state_tensors(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        tensors = self._state.state_tensors()
        flats = self._state.flats()
        for block in self._state.blocks:
            for names in block.units.values():
                of_unit = frozenset(names)
                # A whole block lies in a few buffers, a part of it in a tensor for each parameter.
                chosen = (
                    [t for t in flats if t.name == block.name]
                    if len(block.units) == 1
                    else [t for t in tensors if t.name in of_unit]
                )
                yield [(t.id, t.tensor.detach().reshape(-1)) for t in chosen]

    def _compute_tensors(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for block in self._state.blocks:
            views, masters = block.layout.views(block.compute), block.layout.views(block.masters)
            for names in block.units.values():
                # What changes in commit alone is computed with as it is.
                found = [(n, (masters if n in block.committed else views)[n]) for n in names]
                if len(block.units) == 1 and block.committed.isdisjoint(names):
                    found = [(block.name, block.compute)]
                yield [(f"compute:{name}", tensor.reshape(-1)) for name, tensor in found]

    def _gradient_tensors(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        blocks = zip(self._state.blocks, self._state.layout.block_views(self._reduced), strict=True)
        for block, flat in blocks:
            views = block.layout.views(flat)
            for names in block.units.values():
                if len(block.units) == 1:
                    yield [(f"gradient:{block.name}", flat)]
                else:
                    yield [(f"gradient:{name}", views[name].reshape(-1)) for name in names]


def _laid_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    offset = 0
    for identity, tensor in tensors:
        pieces.append(Piece(identity, tensor, offset))
        offset = -(-_end(pieces[-1]) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(pieces)


def _end(piece: Piece) -> int:
    return piece.offset + piece.tensor.numel() * piece.tensor.element_size()


def _tensor_of(memory: memoryview) -> torch.Tensor:
    if not memory.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)
