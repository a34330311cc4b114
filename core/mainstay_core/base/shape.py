"""Describes the shape of a job, which never changes while the job lives.

The number of shard types is a property of the job, never of its membership (design rule 1): a job
of ``lanes`` x ``shards_per_lane`` types computes exactly these in every step, whoever serves them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import lru_cache

from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    MAX_TYPES,
    Count,
    Index,
    Signed,
    SlotIndex,
    TypeIndex,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import InvalidSpecError


class Order(enum.StrEnum):
    """The orders in which micro-batches pass the stages of a pipeline."""

    IN_ORDER = "InOrder"
    SWAPPED = "Swapped"
    """Half of them pass the first two stages, and the last two, the other way round."""


class Cut(enum.StrEnum):
    """The rules by which a model is cut into stages."""

    BALANCED = "Balanced"
    """The dearest stage is as cheap as possible."""
    EQUAL = "Equal"
    """Stages get equal numbers of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The degrees of a job, validated on construction.

    Raises:
        InvalidSpecError: a degree is out of bounds or two contradict.
    """

    lanes: TypeIndex
    shards_per_lane: TypeIndex
    replicas: Index
    """Replicas wanted. Invariant: 1 <= min_replicas <= replicas <= lanes."""
    min_replicas: Index
    stages: Index
    ranks_per_stage: Index = 1
    """Ranks of a cell: the size of the user's inner mesh."""
    ranks_per_pod: SlotIndex = 1
    micro_batches: Count = 1
    """Micro-batches of one shard type."""
    steps: Count
    seed: Signed
    checkpoint_every_steps: Count = 0
    """Steps between durable checkpoints; 0 switches them off."""
    order: Order = field(default=Order.IN_ORDER, metadata=OMITTED)
    """The order in which micro-batches pass the stages. Swapped decides the bits."""
    cut: Cut = field(default=Cut.BALANCED, metadata=OMITTED)
    """How the model is cut into stages. In order it decides no bit."""

    def __post_init__(self) -> None:
        degrees = ("lanes", "shards_per_lane", "replicas", "min_replicas", "stages")
        for name in (*degrees, "ranks_per_stage"):
            if getattr(self, name) < 1:
                raise InvalidSpecError(name, f"is {getattr(self, name)}, must be at least 1")
        if not self.min_replicas <= self.replicas <= self.lanes:
            raise InvalidSpecError(
                "replicas",
                f"min_replicas {self.min_replicas} <= replicas {self.replicas} <= lanes "
                f"{self.lanes} must hold",
            )
        if self.order is Order.SWAPPED and self.stages < 2:
            raise InvalidSpecError("order", "is Swapped, which takes two stages or more")
        # Each degree has a bound; what decisions and plans grow with are the products.
        if self.num_ranks > MAX_MEMBERS:
            raise InvalidSpecError(
                "replicas", f"{self.num_ranks} ranks are wanted, more than {MAX_MEMBERS}"
            )
        if self.num_types > MAX_TYPES:
            raise InvalidSpecError(
                "shards_per_lane", f"{self.num_types} shard types are more than {MAX_TYPES}"
            )

    @property
    def num_types(self) -> int:
        """Number of shard types of every step."""
        return self.lanes * self.shards_per_lane

    @property
    def num_cells(self) -> int:
        """Cells that the wanted replicas need."""
        return self.replicas * self.stages

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """All (stage, inner) pairs, in order. A replica has one rank in each."""
        return _positions(self.stages, self.ranks_per_stage)

    @property
    def num_ranks(self) -> int:
        """Trainers that the wanted replicas need."""
        return self.num_cells * self.ranks_per_stage

    def lane_of(self, shard_type: int) -> int:
        """Home lane of a shard type."""
        return shard_type // self.shards_per_lane

    def flows_under_way(self, stage: int) -> int:
        """Return the most flows of which a rank of a stage holds activations."""
        return most_flows_under_way(self.order, stage, self.stages)


@lru_cache(maxsize=64)
def _positions(stages: int, ranks_per_stage: int) -> tuple[tuple[int, int], ...]:
    return tuple((s, i) for s in range(stages) for i in range(ranks_per_stage))


def most_flows_under_way(order: Order, stage: int, num_stages: int) -> int:
    """Return the most flows of which a rank of a stage holds activations at a time.

    In order it is 1F1B's bound. Swapped, a micro-batch waits for its turn at both ends: with twice
    as many flows as stages the ranks wait little more than in order.

    Args:
        order: of the job.
        stage: the rank's.
        num_stages: stages of a chain.
    """
    return num_stages - stage if order is Order.IN_ORDER else 2 * num_stages
