"""Gathers what a vote says of a shard type while the type is computed.

Losses are added where they were computed. The host looks at the sum when the vote is cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.wire.votes import TypeStat
from mainstay_train.comm.chains import Mark
from mainstay_train.model.workload import WorkloadError
from mainstay_train.sums.readout import Later, Readout


@dataclass(slots=True)
class TypeSums:
    """Sums over the micro-batches of one type."""

    loss_sum: torch.Tensor | float = 0.0
    """fp64, in the order of the micro-batches; a scalar on the device once there is a loss."""
    tokens: int = 0
    data: Digest = field(default_factory=Digest.zero)
    counted: dict[int, torch.Tensor] = field(default_factory=dict)
    """What blocks counted, int64, by the block's number in the stage."""

    def add_counts(self, block: int, counts: torch.Tensor) -> None:
        """Add what a block counted in the next micro-batch."""
        known = self.counted.get(block)
        self.counted[block] = counts if known is None else known + counts

    def statistics(self) -> torch.Tensor | None:
        """What all blocks counted, in their order; None if nothing."""
        counts = [self.counted[block] for block in sorted(self.counted)]
        return torch.cat(counts) if counts else None

    def add_loss(self, loss: torch.Tensor | float) -> None:
        """Add the loss of the next micro-batch: a scalar of any type."""
        value = loss.detach().to(torch.float64) if isinstance(loss, torch.Tensor) else loss
        self.loss_sum = self.loss_sum + value


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeResult:
    """The knowledge that a rank has of a complete type; None: another rank has it."""

    loss_sum: torch.Tensor | float | None = None
    tokens: int | None = None
    data: str | None = None
    statistics: torch.Tensor | None = field(default=None, compare=False)
    """What the stage's blocks counted, int64, in model order."""
    mark: Mark | None = field(default=None, compare=False)
    """Says whether the type counts; None without a chain that could end meanwhile."""

    @property
    def is_cut_off(self) -> bool:
        """Whether the chain ended before the device had computed the type."""
        return self.mark is not None and not self.mark.counts

    def told(self, shard_type: int, loss: Later | None, counted: Later | None) -> TypeStat:
        """Return it as votes tell it.

        Args:
            shard_type: the type.
            loss: gives the sum of its losses, if that was on a device.
            counted: gives its statistics, if there are any.

        Raises:
            WorkloadError: a block counted below 0.
        """
        loss_sum = self.loss_sum if loss is None else loss().item()
        assert not isinstance(loss_sum, torch.Tensor), "a device's sum is fetched"
        statistics = () if counted is None else tuple(counted().tolist())
        if min(statistics, default=0) < 0:
            raise WorkloadError(
                f"a block counted {min(statistics)}; what `split.count` takes must be 0 or above"
            )
        return TypeStat(
            type=shard_type,
            loss_sum=loss_sum,
            tokens=self.tokens,
            data=self.data,
            statistics=statistics,
        )


def read_results(
    results: Mapping[int, TypeResult], readout: Readout
) -> Callable[[], tuple[TypeStat, ...]]:
    """Have the results of types fetched, and return what tells them once they are.

    Args:
        results: by shard type.
        readout: fetches them.
    """
    losses = {
        shard_type: readout.add(result.loss_sum)
        for shard_type, result in results.items()
        if isinstance(result.loss_sum, torch.Tensor)
    }
    counted = {
        shard_type: readout.add(result.statistics)
        for shard_type, result in results.items()
        if result.statistics is not None
    }

    def told() -> tuple[TypeStat, ...]:
        return tuple(
            result.told(shard_type, losses.get(shard_type), counted.get(shard_type))
            for shard_type, result in results.items()
        )

    return told
