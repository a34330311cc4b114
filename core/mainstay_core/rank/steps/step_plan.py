"""Plans the work of a step: which chain computes which shard types, and whose partials are summed.

The plan is a pure function of the membership and of the partials that members hold already, so
every rank of a quorum makes the same one. An ordinary step is one in which nobody holds anything
yet; after a failure the survivors hold a part (:mod:`mainstay_core.rank.settle`).

A chain has one member in each position (stage, inner rank), and computes a type through all of
them. Invariant: every shard type is supplied exactly once per position (design rule 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.planning.partials import grow_all
from mainstay_core.wire.plan import Chain, Member, Partial, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """A partial and the member that sends it into the reduction of its position."""

    partial: Partial
    index: int


class Maker(NamedTuple):
    """The chain that computed a copy of a type. The newest quorum is the greatest."""

    quorum: int
    """Id of the quorum in which it was computed."""
    replica: int
    """Of the chain, in that quorum's plan."""


UNKNOWN = Maker(-1, -1)
"""The maker of a copy of which nobody tells it."""

Makers = Mapping[int, Mapping[int, Maker]]
"""By member index and shard type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A type that several chains compute, so that a device that is always wrong is seen."""

    type: int
    replicas: tuple[int, ...]
    """The first one's copy counts; the others drop theirs when they have told of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step: who computes which type, and whose copy counts."""

    todo: Mapping[int, tuple[int, ...]]
    """The shard types that each replica's chain computes, in order."""
    table: tuple[tuple[Supply, ...], ...]
    """The supplies of each position, by lane, in canonical order of summation."""
    kept: Mapping[int, tuple[Partial, ...]] = field(default_factory=dict)
    """By member index, what counts of what it held. The rest is void: it is dropped first."""
    holdings: Mapping[int, tuple[Partial, ...]] = field(default_factory=dict)
    """What each member holds once its list is computed, without copies of witnesses."""
    makers: Makers = field(default_factory=dict)
    """Of the types that each member holds then."""
    compared: Compared | None = None
    """The type that several chains compute; None: there is none."""


def plan_step(
    plan: Plan,
    shards_per_lane: int,
    held: Mapping[int, tuple[Partial, ...]] | None = None,
    healing: Iterable[int] = (),
    *,
    makers: Makers | None = None,
    bad: Iterable[int] = (),
    tired: Iterable[int] = (),
    compared: Compared | None = None,
    insists: bool = False,
) -> StepPlan:
    """Return who computes what in a step, given what the members hold already.

    A type that some position lacks is computed through all positions of one chain. That is the
    chain of its default supplier, or the least loaded chain (ties by replica) if the supplier is
    gone or heals. A chain with a healing cell computes nothing unless there is no other chain.

    The copies of a type that count were computed by one chain, in all positions. A wrong activation
    may have left a copy in one stage that no check there sees: the chain's other stages tell, as
    they lack the type or call it bad. So what is computed again counts in every position.

    Args:
        plan: membership and default suppliers.
        shards_per_lane: types of a lane.
        held: by member index, complete partials of this step.
        healing: member indices that are still receiving their state.
        makers: which chains computed what is held.
        bad: types that some member calls wrong.
        tired: replicas whose chains compute only if there is no other.
        compared: a type that several chains are to compute, if it is computed at all.
        insists: as of :func:`witnessed`.

    Raises:
        LocalProtocolError: the plan has no chain.
    """
    chains = _eligible_chains(plan, frozenset(healing), frozenset(tired))
    positions, num_types = plan.positions, len(plan.suppliers)
    kept, counted = _counted_copies(plan, shards_per_lane, held or {}, makers or {}, bad)
    missing = [t for t in range(num_types) if t not in counted]
    suppliers = plan.suppliers
    if compared is not None:
        before, after = suppliers[: compared.type], suppliers[compared.type + 1 :]
        suppliers = (*before, compared.replicas[0], *after)
    todo = _assign(missing, suppliers, chains, shards_per_lane)
    holdings = {m.index: kept.get(m.index, ()) for m in plan.members}
    known = {index: _makers_of(kept[index], makers or {}, index) for index in kept}
    for chain in chains:
        # Cells of a chain mostly hold the same: nothing, or what they computed together.
        had = {holdings[index] for index in chain.cells}
        grown = {h: grow_all(h, todo[chain.replica], shards_per_lane) for h in had}
        made = dict.fromkeys(todo[chain.replica], Maker(plan.quorum.id, chain.replica))
        for index in chain.cells:
            holdings[index] = grown[holdings[index]]
            known[index] = {**known[index], **made} if index in known else made
    replica_of = {i: c.replica for c in plan.chains for i in c.cells}
    num_lanes = num_types // shards_per_lane
    table = tuple(
        _cover_position(members, holdings, replica_of, num_lanes, shards_per_lane)
        for members in positions
    )
    step = StepPlan(todo=todo, table=table, kept=kept, holdings=holdings, makers=known)
    return step if compared is None else witnessed(step, compared, insists=insists)


def witnessed(step: StepPlan, compared: Compared, *, insists: bool = False) -> StepPlan:
    """Return the step with a type that other chains compute, too, behind their own lists.

    Nobody does if the type is not computed in the step: it is held already.

    Args:
        step: the work of the step.
        compared: the type, and who is to compute it.
        insists: whether chains have disagreed on it. Then each of those computes it, also one with
            a cell that heals, and one that is alone tells of it.
    """
    supplier = [r for r, types in step.todo.items() if compared.type in types]
    witnesses = [r for r in compared.replicas if (insists or r in step.todo) and r not in supplier]
    if not supplier or not (witnesses or insists):
        return step
    todo = dict(step.todo)
    for replica in witnesses:
        todo[replica] = (*todo.get(replica, ()), compared.type)
    by = Compared(type=compared.type, replicas=(*supplier, *witnesses))
    return replace(step, todo=todo, compared=by)


def types_of(table: Iterable[Supply], index: int) -> tuple[int, ...]:
    """Return the shard types that a position's table takes from a member."""
    return tuple(
        shard_type
        for supply in table
        if supply.index == index
        for shard_type in range(supply.partial.first, supply.partial.last + 1)
    )


def _counted_copies(
    plan: Plan,
    shards_per_lane: int,
    held: Mapping[int, tuple[Partial, ...]],
    makers: Makers,
    bad: Iterable[int],
) -> tuple[dict[int, tuple[Partial, ...]], dict[int, Maker]]:
    """Return by member what counts of what it holds, and by type the chain whose copies count.

    Of a type the newest chain counts whose copies are in every position. A partial counts if the
    copies of all its types do: a sum cannot be taken apart. So to leave out one type may leave out
    others, until nothing changes any more.
    """
    num_types, void = len(plan.suppliers), frozenset(bad)
    copies = {
        index: tuple(p for p in partials if _is_whole(p, shards_per_lane, num_types))
        for index, partials in held.items()
        if partials
    }
    known = {index: _makers_of(partials, makers, index) for index, partials in copies.items()}
    while True:
        offered = [
            {
                (t, known[m.index][t])
                for m in members
                for p in copies.get(m.index, ())
                for t in range(p.first, p.last + 1)
            }
            for members in plan.positions
        ]
        everywhere = sorted(offered[0].intersection(*offered[1:]))
        counted = {t: maker for t, maker in everywhere if t not in void}  # the newest comes last
        usable = {
            index: tuple(
                p
                for p in partials
                if all(counted.get(t) == known[index][t] for t in range(p.first, p.last + 1))
            )
            for index, partials in copies.items()
        }
        if usable == copies:
            return copies, counted
        copies = usable


def _is_whole(partial: Partial, shards_per_lane: int, num_types: int) -> bool:
    """Return whether a partial is one that a job of this shape has: a peer may name any."""
    first = partial.lane * shards_per_lane
    is_run = first == partial.first <= partial.last
    is_single = partial.first == partial.last
    within = first <= partial.first and partial.last < min(first + shards_per_lane, num_types)
    return within and (is_run or is_single)


def _makers_of(partials: Iterable[Partial], makers: Makers, index: int) -> dict[int, Maker]:
    """Return by type which chains computed what a member holds."""
    own = makers.get(index, {})
    return {t: own.get(t, UNKNOWN) for p in partials for t in range(p.first, p.last + 1)}


def _eligible_chains(plan: Plan, healing: frozenset[int], tired: frozenset[int]) -> list[Chain]:
    if not plan.chains:
        raise LocalProtocolError("a plan without a whole replica cannot be settled")
    fit = [c for c in plan.chains if not healing.intersection(c.cells)]
    fresh = [c for c in fit if c.replica not in tired]
    return sorted(fresh or fit or plan.chains, key=lambda c: c.replica)


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
