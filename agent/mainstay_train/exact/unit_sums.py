"""Says which run of a block's flat buffer is of which unit, and packs the digests of units.

Digests add up, so those of a stage's masters and of its reduced gradient fall apart into those of
its units: the pass that computes the whole computes the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from mainstay_core.base.digest import Digest
from mainstay_train.exact.layout import BlockLayout, StageLayout
from mainstay_train.sums import digests


class Run(NamedTuple):
    """A run of elements of a block's flat buffer that belongs to one unit."""

    start: int
    stop: int
    unit: int
    """Number of the unit in the stage."""


class StageUnits(NamedTuple):
    """The places of a stage's units in the flat buffers of its blocks."""

    runs: tuple[tuple[Run, ...], ...]
    """Of each block, in the order of its buffer, without a gap."""
    blocks: tuple[int, ...]
    """Of each unit the number of its block."""


class UnitsOfBlock(Protocol):
    """A block, as far as its units are concerned."""

    @property
    def layout(self) -> BlockLayout: ...
    @property
    def units(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the parameters of each unit, by the unit's name. Each parameter is in one."""
        ...


def units_of(blocks: Sequence[UnitsOfBlock]) -> StageUnits:
    """Return where the units of a stage lie.

    They are numbered in model order. Padding belongs to the unit that has the parameter before it.
    """
    firsts = accumulate((len(block.units) for block in blocks), initial=0)
    return StageUnits(
        tuple(tuple(_runs_of(block, first)) for block, first in zip(blocks, firsts, strict=False)),
        tuple(number for number, block in enumerate(blocks) for _ in block.units),
    )


def whole_blocks(layout: StageLayout) -> StageUnits:
    """Return the same of a stage of which each block is one unit."""
    runs = ((Run(0, block.size, number),) for number, block in enumerate(layout.blocks))
    return StageUnits(tuple(runs), tuple(range(len(layout.blocks))))


def _runs_of(block: UnitsOfBlock, first: int) -> Iterable[Run]:
    units = {name: n for n, names in enumerate(block.units.values(), first) for name in names}
    runs: list[Run] = []
    for param in block.layout.params:
        unit = units[param.name]
        if runs and runs[-1].unit == unit:
            continue
        if runs:
            runs[-1] = runs[-1]._replace(stop=param.offset)
        runs.append(Run(param.offset, block.layout.size, unit))
    return (run for run in runs if run.start < run.stop)


def gather_units(num_units: int, units: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the sums of units, int64 [mixers, units], in host memory.

    Args:
        num_units: of the stage.
        units: int64 [pieces], of each piece the unit to which it belongs.
        sums: int64 [mixers, pieces], in host memory.
    """
    found = torch.zeros(sums.shape[0], num_units, dtype=torch.int64, device="cpu")
    return found.index_add_(1, units, sums)


def packed(sums: torch.Tensor) -> str:
    """Return digests one behind the other, as :func:`mainstay_core.wire.unit_digests.unpack` reads.

    Args:
        sums: int64 [mixers, units], in host memory.
    """
    return sums.t().contiguous().numpy().astype(">i8").tobytes().hex()


def whole_of(sums: torch.Tensor) -> Digest:
    """Return the digest that those of units make up; argument as of :func:`packed`."""
    return digests.added([sums.sum(1)])
