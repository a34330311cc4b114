"""Plans the work of each replica when a job begins: shard types, and partials of them."""

from __future__ import annotations

from mainstay_core.base.shape import JobShape
from mainstay_core.job.sizes.rank_sizes import ReplicaShare
from mainstay_core.planning.assignment import plan_reordering
from mainstay_core.planning.partials import grow_all
from mainstay_core.planning.placement import plan_placement


def first_shares(shape: JobShape, redundancy: int | None) -> tuple[ReplicaShare, ...]:
    """Return the work of each replica of a job's first plan, by replica.

    Args:
        shape: degrees of the job; all of the wanted replicas are there.
        redundancy: hosts of a shard type; None chooses.
    """
    outcome = plan_reordering(
        hosts=plan_placement(shape.lanes, shape.shards_per_lane, redundancy).hosts,
        living_replicas=range(shape.replicas),
        current=None,
        shards_per_lane=shape.shards_per_lane,
        lanes=shape.lanes,
    )
    types: list[list[int]] = [[] for _ in range(shape.replicas)]
    for shard_type, replica in enumerate(outcome.suppliers):
        types[replica].append(shard_type)
    return tuple(
        ReplicaShare(
            replica=replica,
            num_types=len(mine),
            num_partials=len(grow_all((), mine, shape.shards_per_lane)),
        )
        for replica, mine in enumerate(types)
    )
