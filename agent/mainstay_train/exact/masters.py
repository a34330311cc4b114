"""Digests of a stage's masters, of each unit by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from mainstay_core.base.digest import MIXER_SEEDS
from mainstay_train.exact import layout
from mainstay_train.exact.slices import Slice
from mainstay_train.exact.unit_sums import UnitsOfBlock, gather_units, units_of
from mainstay_train.sums import digests
from mainstay_train.sums.readout import Later, Readout
from mainstay_train.sums.rows import Piece


class MasterBlock(UnitsOfBlock, Protocol):
    """A block, as far as its masters are concerned."""

    @property
    def device(self) -> torch.device: ...
    @property
    def masters(self) -> torch.Tensor:
        """fp32, flat."""
        ...


class MasterPart(Protocol):
    """A master of which this rank holds a part."""

    @property
    def name(self) -> str: ...
    @property
    def part(self) -> Slice | None: ...
    @property
    def copy(self) -> bool: ...
    def sums(self) -> torch.Tensor:
        """Both sums of its part of the digest, [mixers], where the tensor is."""
        ...


class MasterSums(NamedTuple):
    """Sums of the units of a stage's masters, int64 [mixers, units], in host memory."""

    own: torch.Tensor
    """Of what this rank alone holds."""
    copies: torch.Tensor
    """Of what the inner ranks hold in copies."""


class StageMasters:
    """The digests of a stage's masters: keys come with the layout and are drawn once.

    Args:
        blocks: of the stage.
        masters: all of them; those that are parts of tensors have digests of their own.
    """

    def __init__(self, blocks: Sequence[MasterBlock], masters: Iterable[MasterPart]) -> None:
        self._num_units = len(units_of(blocks).blocks)
        units = (names for block in blocks for names in block.units.values())
        unit_of = {name: number for number, names in enumerate(units) for name in names}
        parts = [master for master in masters if master.part is not None]
        self._whole = [whole_masters(blocks, copies=copies) for copies in (False, True)]
        self._parts = [[p for p in parts if p.copy == copies] for copies in (False, True)]
        self._units = [
            torch.tensor(
                [
                    unit_of[name]
                    for name in (
                        *(p.name for b, _ in whole for p in whole_params(b, copies=copies)),
                        *(p.name for p in of_parts),
                    )
                ],
                dtype=torch.int64,
                device="cpu",
            )
            for copies, whole, of_parts in zip((False, True), self._whole, self._parts, strict=True)
        ]
        """Of each whole tensor and each part the number of its unit: own ones, and copies."""

    def sums(self) -> MasterSums:
        """Return the sums of all units; waits for the device once."""
        readout = Readout()
        found = [
            [
                *(readout.add(known.sums_of_pieces(block.masters)) for block, known in whole),
                *(readout.add(part.sums().unsqueeze(1)) for part in parts),
            ]
            for whole, parts in zip(self._whole, self._parts, strict=True)
        ]
        readout.fetch()
        own, copies = map(self._by_unit, self._units, found)
        return MasterSums(own, copies)

    def _by_unit(self, units: torch.Tensor, sums: Sequence[Later]) -> torch.Tensor:
        nothing = torch.zeros(len(MIXER_SEEDS), 0, dtype=torch.int64, device="cpu")
        return gather_units(self._num_units, units, torch.cat([nothing, *(s() for s in sums)], 1))


def whole_params(block: MasterBlock, *, copies: bool) -> list[layout.Param]:
    """Return the parameters of a block that are whole tensors, copies of them or not."""
    return [p for p in block.layout.params if p.part is None and p.copy == copies]


def whole_masters(
    blocks: Iterable[MasterBlock], *, copies: bool
) -> list[tuple[MasterBlock, digests.FlatDigest]]:
    """Return the digests of the blocks that hold whole tensors, copies of them or not."""
    by_block = (
        (
            block,
            [
                Piece(f"master:{param.name}", param.offset, param.numel)
                for param in whole_params(block, copies=copies)
            ],
        )
        for block in blocks
    )
    return [(block, digests.drawn_twice(held, block.device)) for block, held in by_block if held]
