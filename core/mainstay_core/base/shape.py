"""Describes the shape of a job, which never changes while the job lives.

The number of shard types is a property of the job, never of its membership (design rule 1): a job
of ``lanes`` x ``shards_per_lane`` types computes exactly these in every step, whoever serves them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    MAX_TYPES,
    Count,
    Index,
    Signed,
    SlotIndex,
    TypeIndex,
)
from mainstay_core.base.errors import InvalidSpecError


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
        return tuple((s, i) for s in range(self.stages) for i in range(self.ranks_per_stage))

    @property
    def num_ranks(self) -> int:
        """Trainers that the wanted replicas need."""
        return self.num_cells * self.ranks_per_stage

    def lane_of(self, shard_type: int) -> int:
        """Home lane of a shard type."""
        return shard_type // self.shards_per_lane
