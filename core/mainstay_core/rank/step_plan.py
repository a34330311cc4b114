"""Plans the work of a step: which chain computes which shard types, and whose partials are summed.

The plan is a pure function of the membership and of the partials that members hold already, so
every rank of a quorum makes the same one. An ordinary step is one in which nobody holds anything
yet; after a failure the survivors hold a part (:mod:`mainstay_core.rank.settle`).

A chain has one member in each position (stage, inner rank), and computes a type through all of
them. Invariant: every shard type is supplied exactly once per position (design rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.planning.partials import grow_all
from mainstay_core.wire.plan import Chain, Member, Partial, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A partial and the member that sends it into the reduction of its position."""

    partial: Partial
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step: who computes which type, and whose copy counts."""

    todo: Mapping[int, tuple[int, ...]]
    """The shard types that each replica's chain computes, in order."""
    table: tuple[tuple[Supply, ...], ...]
    """The supplies of each position, by lane, in canonical order of summation."""


def plan_step(
    plan: Plan,
    shards_per_lane: int,
    held: Mapping[int, tuple[Partial, ...]] | None = None,
    healing: Iterable[int] = (),
) -> StepPlan:
    """Return who computes what in a step, given what the members hold already.

    A type that some position lacks is computed through all positions of one chain. That is the
    chain of its default supplier, or the least loaded chain (ties by replica) if the supplier is
    gone or heals. A chain with a healing cell computes nothing unless there is no other chain.

    Args:
        plan: membership and default suppliers.
        shards_per_lane: types of a lane.
        held: by member index, complete partials of this step.
        healing: member indices that are still receiving their state.

    Raises:
        LocalProtocolError: the plan has no chain.
    """
    held = held or {}
    chains = _eligible_chains(plan, frozenset(healing))
    positions = plan.positions
    complete = [_covered(members, held, len(plan.suppliers)) for members in positions]
    everywhere = complete[0].intersection(*complete[1:])
    missing = [t for t in range(len(plan.suppliers)) if t not in everywhere]
    todo = _assign(missing, plan.suppliers, chains, shards_per_lane)
    holdings = {m.index: tuple(held.get(m.index, ())) for m in plan.members}
    for chain in chains:
        # Cells of a chain mostly hold the same: nothing, or what they computed together.
        before = {holdings[index] for index in chain.cells}
        after = {h: grow_all(h, todo[chain.replica], shards_per_lane) for h in before}
        for index in chain.cells:
            holdings[index] = after[holdings[index]]
    replica_of = {i: c.replica for c in plan.chains for i in c.cells}
    num_lanes = len(plan.suppliers) // shards_per_lane
    table = tuple(
        _cover_position(members, holdings, replica_of, num_lanes, shards_per_lane)
        for members in positions
    )
    return StepPlan(todo=todo, table=table)


def _covered(
    members: Iterable[Member], held: Mapping[int, tuple[Partial, ...]], num_types: int
) -> set[int]:
    """Return the types that some member of a position holds."""
    found: set[int] = set()
    for member in members:
        for partial in held.get(member.index, ()):
            found.update(range(partial.first, min(partial.last + 1, num_types)))
    return found


def _eligible_chains(plan: Plan, healing: frozenset[int]) -> list[Chain]:
    if not plan.chains:
        raise LocalProtocolError("a plan without a whole replica cannot be settled")
    fit = [c for c in plan.chains if not healing.intersection(c.cells)]
    return sorted(fit or plan.chains, key=lambda c: c.replica)


def _assign(
    missing: Sequence[int], suppliers: Sequence[int], chains: Sequence[Chain], shards_per_lane: int
) -> dict[int, tuple[int, ...]]:
    lists: dict[int, list[int]] = {chain.replica: [] for chain in chains}
    orphans = []
    for shard_type in missing:
        if suppliers[shard_type] in lists:
            lists[suppliers[shard_type]].append(shard_type)
        else:
            orphans.append(shard_type)
    for shard_type in orphans:
        replica = min(lists, key=lambda r: (len(lists[r]), r))
        lists[replica].append(shard_type)
    # The own lane first: its leading run is one partial, and what a chain was
    # handed comes last, so that an interruption costs the others least.
    return {
        replica: tuple(sorted(types, key=lambda t: (t // shards_per_lane != replica, t)))
        for replica, types in lists.items()
    }


def _cover_position(
    members: Sequence[Member],
    holdings: Mapping[int, tuple[Partial, ...]],
    replica_of: Mapping[int, int],
    num_lanes: int,
    shards_per_lane: int,
) -> tuple[Supply, ...]:
    """Return a position's supplies: of each lane the longest run, and what comes behind it.

    Time grows with what is held, not with lanes times members: each rank does this in each step.
    """
    offers: list[list[Supply]] = [[] for _ in range(num_lanes)]
    for member in members:
        for partial in holdings[member.index]:
            if partial.lane < num_lanes:
                offers[partial.lane].append(Supply(partial=partial, index=member.index))
    table: list[Supply] = []
    for lane, own in enumerate(offers):

        def preference(supply: Supply, lane: int = lane) -> tuple[bool, int]:
            return (replica_of.get(supply.index) != lane, supply.index)

        first = lane * shards_per_lane
        runs = [s for s in own if s.partial.first == first]
        upto = first - 1
        if runs:
            best = min(runs, key=lambda s: (-s.partial.last, preference(s)))
            table.append(best)
            upto = best.partial.last
        for shard_type in range(upto + 1, first + shards_per_lane):
            singles = [s for s in own if s.partial.first == s.partial.last == shard_type]
            assert singles, f"type {shard_type} of {members[0].rank} has no supplier"
            table.append(min(singles, key=preference))
    return tuple(table)
