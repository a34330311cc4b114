"""Decides how a cell groups the gradients of the shard types that it computed.

A lane's leading run of types is one buffer, summed in ascending order. Every other type is a buffer
of its own (design rule 3: the bits of a reduction depend on types alone). A type is added to a
buffer only when it is complete, so a partial is never half-written (design 13.1).

The runtime asks these functions where a type's gradient goes. The settle asks them what a cell will
hold once it has computed its list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mainstay_core.wire.plan import Partial


def grow(held: Collection[Partial], shard_type: int, shards_per_lane: int) -> Partial:
    """Return the partial into which a newly completed type goes.

    That is the lane's leading run, if it ends just before the type: the extended run replaces it.
    Otherwise it is a new partial with the type alone.
    """
    lane = shard_type // shards_per_lane
    first = lane * shards_per_lane
    run = Partial(lane=lane, first=first, last=shard_type - 1)
    if shard_type > first and run in held:
        return Partial(lane=lane, first=first, last=shard_type)
    return Partial(lane=lane, first=shard_type, last=shard_type)


def grow_all(
    held: Iterable[Partial], shard_types: Sequence[int], shards_per_lane: int
) -> tuple[Partial, ...]:
    """Return what a cell that holds ``held`` holds after computing ``shard_types`` in order."""
    partials = set(held)
    for shard_type in shard_types:
        grown = grow(partials, shard_type, shards_per_lane)
        if grown.first < grown.last:
            partials.discard(Partial(lane=grown.lane, first=grown.first, last=shard_type - 1))
        partials.add(grown)
    return tuple(sorted(partials))


def covers(partial: Partial, shard_type: int) -> bool:
    """Return whether a partial contains a type."""
    return partial.first <= shard_type <= partial.last
