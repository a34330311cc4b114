"""Describes who keeps what crosses a stage's boundaries, and who gives it back in a replay."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from mainstay_core.planning.program import Action
from mainstay_train.comm.chains import Mark


class SentLog(Protocol):
    """Keeps what a stage gives its neighbours."""

    def sent(self, action: Action, tensor: torch.Tensor) -> None:
        """Keep what a neighbour gets in an action. Nobody writes to the tensor any more."""

    def completed(self, shard_type: int, mark: Mark | None) -> None:
        """All of a type was sent, and the type is complete.

        Args:
            shard_type: the type.
            mark: says whether it counts; None: it does.
        """


class Recomputed(Protocol):
    """The particulars of a step that is computed again by a stage that lost its state."""

    @property
    def lowest(self) -> int:
        """The lowest block of the stage through which the backward goes."""

    def skipped(self, block: int) -> Collection[str]:
        """Units of a block of the stage whose weight gradients are left out."""

    def read(self, action: Action, into: torch.Tensor) -> None:
        """Read what a neighbour sent from its log.

        Args:
            action: READ_F or READ_B.
            into: receives it, of the shape and type of an activation.
        """
