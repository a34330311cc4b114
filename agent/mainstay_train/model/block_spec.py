"""The recipe of a block: how it is made, what it computes, what it counts, and its units.

:mod:`mainstay_train.model.blocks` makes blocks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mainstay_core.wire.reinitialisation import Rule
from mainstay_train.exact import initialization, layout
from mainstay_train.model.units import Unit

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(output of the last block, targets) -> fp32 scalar, a sum over tokens, never a mean."""

InitRule = Callable[[str, tuple[int, ...]], initialization.Init]
"""(local parameter name, shape) -> distribution of its first value."""

ModuleLoss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(last block's module, its output, targets) -> the same."""


CommitRule = Callable[[Mapping[str, torch.Tensor], Sequence[int]], None]
"""(masters by local name, the block's statistics of a step) -> writes new values into the masters.
It is a pure function of both: every rank computes it for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """Parameters that the optimizer leaves alone: they change only when a step commits.

    They have no gradient, and the module computes with the fp32 masters themselves in any type: the
    copy of that type is made of them as well, and nobody reads it. Otherwise they are parameters:
    healed, saved and digested with the others.
    """

    parameters: tuple[str, ...]
    """Local names."""
    rule: CommitRule
    """From what is counted in the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The recipe of a block. The first takes int64 tokens, the last yields what ``loss`` takes."""

    name: str
    """Model-wide, e.g. "layers.3": prefix of its parameters' names. Unique in a workload."""
    build: Callable[[], nn.Module]
    """Makes the module: forward(x), or forward(x, address) where ``draws``. Also called under
    torch.device("meta") for its shapes. Values of its parameters are ignored: ``init`` sets them.
    """
    draws: bool = False
    """The module's forward takes the address as second argument, for its random draws."""
    loss: LossFunction | None = None
    """Of the last block, and only of it."""
    module_loss: ModuleLoss | None = None
    """In place of ``loss``, for a module that returns what comes before logits: all of them need
    never be there (:class:`~mainstay_train.model.losses.ProjectedCrossEntropy`)."""
    init: InitRule = initialization.default_init
    cost: float | None = None
    """Relative cost of a micro-batch, to balance stages; None: its number of parameters."""
    parallelize: Callable[[nn.Module, Any], nn.Module] | None = None
    """(module, DeviceMesh) -> module, where a stage has several ranks: distributes parameters over
    the mesh of one dimension, e.g. ``parallelize_module(..., src_data_rank=None)``. It must not
    communicate. The module still maps plain tensors to a plain tensor, and what it leaves plain
    is computed by every rank alike. None: so is the whole block."""
    origins: Mapping[str, layout.Origin] = field(default_factory=dict)
    """Of parameters of the parallelised module that are part of another tensor of ``build``'s."""
    units: tuple[Unit, ...] = ()
    """Parts of the block that are snapshotted alone (:mod:`mainstay_train.model.units`); none: the
    block is one."""
    statistics: tuple[str, ...] = ()
    """What the module counts in a micro-batch, by ``split.count``: a name for each integer, in
    order. One that counts a unit's tokens has the name of the unit. Each is added over all
    micro-batches of a step, and is the same on every rank when the step commits."""
    committed: CommittedState | None = None
    """Parameters that change at commit, from ``statistics``."""
    reinitialise: Rule | None = None
    """How the block may be made anew when every copy of it is gone; None: as the average of like
    blocks, where both neighbours of its stage have such."""

    @property
    def is_last(self) -> bool:
        """Whether the block ends in the loss."""
        return self.loss is not None or self.module_loss is not None

    def loss_of(
        self, module: nn.Module, output: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of the last block's output.

        Raises:
            ValueError: it is not the last block.
        """
        if self.module_loss is not None:
            return self.module_loss(module, output, targets)
        if self.loss is None:
            raise ValueError(f"block {self.name!r} has no loss: only a workload's last block does")
        return self.loss(output, targets)
