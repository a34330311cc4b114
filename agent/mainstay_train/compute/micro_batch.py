"""One micro-batch on its way through a stage: what its backward needs of its forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mainstay_train.checks.recomputes import ForwardRecord
from mainstay_train.checks.scopes import Scope
from mainstay_train.comm.mesh import plain
from mainstay_train.compute.loader import Loaded
from mainstay_train.exact.draws import Address
from mainstay_train.exact.layout import ALIGNMENT_BYTES
from mainstay_train.model.blocks import Block, Tape


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on its way through the stage."""

    address: Address
    loaded: Loaded | None = None
    """On the first and the last stage."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    """Input of each block, when the backward recomputes."""
    records: list[ForwardRecord | None] = field(default_factory=list)
    """Of the forward of each such block, where recomputes are compared with forwards. None: both
    are executed twice."""
    tapes: list[Tape] = field(default_factory=list)
    """Of each block, in model order; of the loss alone, when the backward recomputes."""
    deferred: list[tuple[Block, Tape]] = field(default_factory=list)
    """What is left of the backward: weight gradients of these blocks."""
    output: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    is_void: bool = False
    """Whether it was given up: what its neighbours get of it means nothing."""

    def give_up(self) -> None:
        """Free what its backward would need: there is none."""
        for kept in (self.inputs, self.records, self.tapes, self.deferred):
            kept.clear()
        self.output = self.gradient = None
        self.is_void = True

    def forward(
        self,
        block: Block,
        x: torch.Tensor,
        scope: Scope,
        *,
        as_recomputed: bool,
        notes: bool,
    ) -> torch.Tensor:
        """Return the output of a block that is recomputed later.

        Args:
            block: the next one.
            x: its input.
            scope: in which it runs.
            as_recomputed: whether it calls all that its recompute will call.
            notes: whether its recompute is compared with it; only with ``as_recomputed``.
        """
        self.inputs.append(x)
        if not as_recomputed:
            return block.forward(x, self.address)
        # What a block computes once and keeps, as tables of rotations, its recompute has no more.
        record = ForwardRecord(block.name) if notes and not block.is_new else None
        self.records.append(record)
        with scope.twice() if record is None else scope.note(record):
            return block.forward_as_recomputed(x, self.address)

    def recompute(self, block: Block, scope: Scope) -> Tape:
        """Return the tape of the last block that was not recomputed yet.

        Args:
            block: that block.
            scope: in which it runs.
        """
        x = self.inputs.pop()
        if not self.records:
            return block.recompute(x, self.address)
        record = self.records.pop()
        with scope.twice() if record is None else scope.compare(record):
            return block.recompute(x, self.address)


def as_received(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor between two blocks the strides and alignment that it has after a receive.

    Kernels choose their path by both, so without this the bits could depend on where
    stages are cut. Costs nothing where the tensor is that way already.
    """
    packed = plain(tensor).contiguous()
    if packed.data_ptr() % ALIGNMENT_BYTES:
        packed = packed.clone()
    return packed
