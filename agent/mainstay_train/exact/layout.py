"""Flat buffers and the fixed chunk grid on which everything is reduced.

A block's parameters lie one behind the other in one flat buffer, in the order in
which the module defines them. Masters, compute copies, gradients, partials and
optimizer moments all have this layout, so one offset serves them all.

Two things keep the bits of a kernel from depending on where a block lies, hence
on the number of stages: every parameter starts at a multiple of 32 elements and
every buffer at a multiple of 64 bytes, so alignment is a property of the model;
and the chunk grid restarts at each block, so chunks are, too (design.md 13.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from mainstay_train.exact.slices import Slice, slice_of

CHUNK = 65_536
"""Elements per chunk: the unit of reduction, norm and ownership. In the fingerprint."""

PAD = 32
"""Parameters start at multiples of so many elements: 64 bytes in bf16, 128 in fp32."""

ALIGNMENT_BYTES = 64
"""Of every buffer: a cache line, and what MKL asks for reproducible results."""


def padded(numel: int) -> int:
    """The least multiple of :data:`PAD` that holds ``numel`` elements."""
    return -(-numel // PAD) * PAD


def aligned_zeros(
    numel: int, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A zeroed flat tensor whose first element lies on a 64-byte boundary.

    torch's own allocators give this already; where one does not, the tensor is a
    view into a slightly larger allocation.
    """
    slack = ALIGNMENT_BYTES // dtype.itemsize
    plain = torch.zeros(numel, dtype=dtype, device=device)
    if plain.data_ptr() % ALIGNMENT_BYTES == 0:
        return plain
    larger = torch.zeros(numel + slack, dtype=dtype, device=device)
    skip = -larger.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    return larger[skip : skip + numel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """The place of one parameter in its block's flat buffer."""

    name: str
    """Model-wide, e.g. "layers.3.attention.qkv.weight"; also its id in digests."""
    shape: tuple[int, ...]
    offset: int
    """First element. Invariant: a multiple of PAD."""
    numel: int
    part: Slice | None = None
    """What it is of a model-wide tensor; None: all of the one that has its name."""
    copy: bool = False
    """Every inner rank of the stage holds it: one of them speaks for all."""


class Origin(NamedTuple):
    """The place of a parameter in a model-wide tensor of another name, e.g. keys in fused qkv."""

    name: str
    """Of that tensor, local to the block."""
    shape: tuple[int, ...]
    row: int
    """Its first row there; it has all columns."""


def _placed(block: str, part: Slice, origin: Origin | None) -> Slice:
    if origin is None:
        return part
    return Slice(
        name=f"{block}.{origin.name}",
        shape=origin.shape,
        start=(part.start[0] + origin.row, *part.start[1:]),
        size=part.size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The flat layout of one block. Invariant: ``params`` do not overlap, gaps stay zero."""

    name: str
    params: tuple[Param, ...]
    size: int
    """Elements, padding included. Invariant: a multiple of PAD."""

    @classmethod
    def of(
        cls,
        name: str,
        parameters: Mapping[str, Sequence[int]],
        parts: Mapping[str, Slice] | None = None,
    ) -> BlockLayout:
        """Lay out ``parameters`` (local name to local shape) in their order of definition.

        Args:
            name: of the block.
            parameters: as they lie on this rank.
            parts: where inner ranks share the block: what is not a copy, by local name.
        """
        order = [*parameters] if parts is None else sorted(parameters, key=lambda p: p not in parts)
        params = []
        offset = 0
        for local in order:
            shape, part = parameters[local], (parts or {}).get(local)
            numel = torch.Size(shape).numel()
            params.append(
                Param(
                    name=f"{name}.{local}",
                    shape=tuple(shape),
                    offset=offset,
                    numel=numel,
                    part=part,
                    copy=parts is not None and part is None,
                )
            )
            offset += padded(numel)
        return cls(name=name, params=tuple(params), size=offset)

    @classmethod
    def of_module(
        cls,
        name: str,
        module: nn.Module,
        *,
        shared: bool = False,
        origins: Mapping[str, Origin] | None = None,
    ) -> BlockLayout:
        """Lay out the parameters of ``module``; tied ones count once.

        Args:
            name: of the block.
            module: its module, parallelised if inner ranks share it.
            shared: inner ranks share the stage: what is not distributed is a copy.
            origins: by local name, what is part of a tensor of another name.

        Raises:
            ValueError: a parameter is placed in a way that has no rectangle per rank.
        """
        parameters = dict(module.named_parameters())
        if not shared:
            return cls.of(name, {key: tuple(p.shape) for key, p in parameters.items()})
        parts = {}
        for local, parameter in parameters.items():
            part = slice_of(f"{name}.{local}", parameter)
            if part is not None:
                parts[local] = _placed(name, part, (origins or {}).get(local))
        shapes = {
            local: parts[local].size if local in parts else tuple(p.shape)
            for local, p in parameters.items()
        }
        return cls.of(name, shapes, parts)

    @property
    def own(self) -> int:
        """Elements before the copies, which come last; ``size`` where there are none."""
        return next((param.offset for param in self.params if param.copy), self.size)

    @property
    def shared(self) -> bool:
        """Whether inner ranks share the block."""
        return any(param.copy or param.part is not None for param in self.params)

    @property
    def num_parameters(self) -> int:
        """Elements without padding."""
        return sum(param.numel for param in self.params)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of ``flat`` (this block's, at least ``size`` elements) by model-wide name."""
        return {
            param.name: flat[param.offset : param.offset + param.numel].view(param.shape)
            for param in self.params
        }

    def chunk_bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each chunk of this block; only the last may be short."""
        return tuple((start, min(start + CHUNK, self.size)) for start in range(0, self.size, CHUNK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the grid: what has one owner in a reduction."""

    index: int
    """In the stage, over all its blocks in model order; owner = index modulo cells."""
    block: int
    """Index of the block in the stage."""
    start: int
    """First element in the block's flat buffer."""
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """The layouts of a stage's blocks, in model order, as one buffer or one per block."""

    blocks: tuple[BlockLayout, ...]

    @property
    def size(self) -> int:
        """Elements of all blocks, padding included."""
        return sum(block.size for block in self.blocks)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each block starts in a buffer of the whole stage."""
        sizes = (block.size for block in self.blocks)
        return tuple(accumulate(sizes, initial=0))[:-1]

    def chunks(self) -> tuple[Chunk, ...]:
        """The stage's chunks in model order."""
        pieces = (
            (number, start, stop)
            for number, block in enumerate(self.blocks)
            for start, stop in block.chunk_bounds()
        )
        return tuple(
            Chunk(index=index, block=number, start=start, stop=stop)
            for index, (number, start, stop) in enumerate(pieces)
        )

    def allocate(
        self, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """A zeroed, aligned flat buffer of the whole stage."""
        return aligned_zeros(self.size, dtype=dtype, device=device)

    def block_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One flat view per block of a buffer of the whole stage."""
        return [
            flat[offset : offset + block.size]
            for offset, block in zip(self.offsets, self.blocks, strict=True)
        ]

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views by model-wide parameter name of a buffer of the whole stage."""
        result: dict[str, torch.Tensor] = {}
        for block, part in zip(self.blocks, self.block_views(flat), strict=True):
            result.update(block.views(part))
        return result
