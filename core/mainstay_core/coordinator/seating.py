"""Builds the next plan from the trainers that are up: who is a member, where, and computes what.

Every function is pure: it takes the coordinator's state and returns a plan, or None where no plan
is possible. The plans differ in whom they seat. One function does the rest for all of them: order
of members, chains, suppliers, meeting place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from mainstay_core.base.ids import Hardware, PodUid, QuorumId, RankId, Slot
from mainstay_core.base.words import count
from mainstay_core.coordinator.hosts import hosts_of, other_stores_of, rendezvous_of
from mainstay_core.coordinator.seats import (
    Seat,
    clean_from,
    keep_whole,
    living_seats,
    part_copies,
    seat_joiners,
)
from mainstay_core.coordinator.siting import (
    hardware_of,
    locations_of,
    near_domains,
    order_slots,
    surplus_slots,
    take_cell,
    usable_slots,
)
from mainstay_core.coordinator.situation import made_again, may_ask, rules_of
from mainstay_core.coordinator.state import (
    CoordinatorState,
    SlotState,
    all_settled,
    holds_state,
)
from mainstay_core.dmr.devices import UNKNOWN, may_be_same
from mainstay_core.planning.assignment import plan_reordering
from mainstay_core.planning.chaining import Cell, plan_chaining
from mainstay_core.planning.placement import plan_placement
from mainstay_core.wire.plan import Chain, Member, Method, Plan
from mainstay_core.wire.reinitialisation import Fork, ForkOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The purpose of a plan, and the arguments that every plan needs."""

    method: Method
    planned: bool
    reason: str
    now_s: float
    nonce: str
    avoid_rendezvous: frozenset[PodUid] = frozenset()
    """Pods where quorums failed to meet. They host no meeting if another pod can."""


def start_plan(state: CoordinatorState, num_replicas: int, now_s: float, nonce: str) -> Plan | None:
    """Return the first plan with ``num_replicas`` chains, or None when too few trainers are up.

    Chains are seated one after the other, in order of (replica, stage, inner). They take the first
    pods by name; where the locations of nodes are known, each chain takes near pods, and chains lie
    apart. A cell stays within one pod where one has room for it (design 13.7). Two copies of a
    position share a pod only where it cannot be avoided.
    """
    shape = state.shape
    needed = num_replicas * len(shape.positions)
    usable = usable_slots(state, now_s)
    if len(usable) < needed:
        return None
    locations = locations_of(state)
    ordered = order_slots(usable, locations, len(shape.positions), num_replicas)
    free = ordered[:needed]
    cells = [(r, s) for r in range(num_replicas) for s in range(shape.stages)]
    crowd: Counter[tuple[PodUid, int]] = Counter()
    seats = []
    for replica, stage in cells:
        for inner, slot in enumerate(take_cell(free, stage, shape.ranks_per_stage, crowd)):
            assert slot.incarnation is not None
            seats.append(
                Seat(
                    stage=stage,
                    inner=inner,
                    replica=replica,
                    slot=slot.slot,
                    incarnation=slot.incarnation,
                )
            )
    reason = f"served: {num_replicas} of {count(shape.lanes, 'lane')}, by replicas of "
    reason += count(shape.stages, "stage")
    if shape.ranks_per_stage > 1:
        reason += f" of {shape.ranks_per_stage} ranks"
    return compose(
        state,
        part_copies(locations, seats, ordered),
        Draft(method=Method.START, planned=False, reason=reason, now_s=now_s, nonce=nonce),
    )


def mask_plan(
    state: CoordinatorState, draft: Draft, excluded: frozenset[Slot] = frozenset()
) -> Plan:
    """Return the plan without dead and excluded members. Whole chains go on untouched.

    The remains of broken chains become followers. Only where no chain is whole are the remains
    mated at once; otherwise a planned plan does that later (protocol section 3).

    Raises:
        InfeasiblePlanError: some position has no living member.
    """
    seats = [s for s in living_seats(state) if s.slot not in excluded]
    seats = keep_whole(seats, len(state.shape.positions))
    if not any(s.replica is not None for s in seats):
        seats = mate(state, seats, most=state.wanted)
    return compose(state, seats, draft)


def restart_plan(state: CoordinatorState, draft: Draft, takers: Sequence[SlotState]) -> Plan | None:
    """Return a plan with its empty positions filled, or None if too few trainers are up.

    Members that their own positions don't need fill them only where ``takers`` are too few: the
    others stay followers.
    """
    grown = _grow(state, takers, least=1)
    if grown is None:
        # With as many as are missing, all of the takers are taken.
        counts = Counter(s.position for s in living_seats(state))
        missing = sum(not counts[p] for p in state.shape.positions) - len(takers)
        grown = _grow(state, (*takers, *surplus_slots(state)[:missing]), least=1)
    if grown is None:
        return None
    plan = compose(state, grown, draft)
    # Beyond the first lineage the job may have forked though it is not known here: a store that has
    # lost it hears of that with a commit of the newest quorum. A lineage too many costs nothing.
    forked = state.approximate_since is not None or plan.lineage > 0
    return next_course(plan) if draft.method is Method.RESTART and forked else plan


def next_course(plan: Plan) -> Plan:
    """Return the plan of a restart of a job that has forked: of the next lineage.

    What is loaded may be from before the fork. Then the job comes to the same versions on another
    course, and a trainer that was cut off must not bring its state of this one.
    """
    return replace(plan, lineage=plan.lineage + 1)


def void_plan(
    state: CoordinatorState, draft: Draft, takers: Sequence[SlotState], without: frozenset[Slot]
) -> Plan | None:
    """Return a plan in which no state counts that is held now: all load the newest checkpoint.

    Args:
        state: of the job.
        draft: of the plan.
        takers: trainers for positions that are empty without those left out.
        without: members to leave out.

    Returns:
        The plan, of the next lineage; None if a position stays empty.
    """
    num_positions = len(state.shape.positions)
    staying = [s for s in living_seats(state) if s.slot not in without]
    seats = keep_whole(staying, num_positions)
    filled = {s.position for s in seats}
    empty = [p for p in state.shape.positions if p not in filled]
    free = [s for s in takers if s.slot not in without]
    if len(empty) > len(free):
        return None
    seats += seat_joiners(locations_of(state), seats, empty, free)
    plan = compose(state, mate(state, seats, most=state.wanted), draft)
    return replace(plan, lineage=plan.lineage + 1)


def serving_plan(state: CoordinatorState, draft: Draft, doubted: Collection[Slot]) -> Plan | None:
    """Return a plan of the same members, in which a chain can decide between doubted devices.

    Args:
        state: of the job.
        draft: of the plan.
        doubted: devices of one position that have computed something differently.

    Returns:
        The plan; None if all chains that serve have a doubted device, or none has.
    """
    seats = [s for s in living_seats(state) if s.replica is not None]
    positions = {s.position for s in seats if s.slot in doubted}
    if not any(s.position in positions and s.slot not in doubted for s in seats):
        return None
    return compose(state, living_seats(state), draft)


def another_plan(
    state: CoordinatorState, draft: Draft, doubted: Collection[Slot], takers: Sequence[SlotState]
) -> Plan | None:
    """Return a plan in which another trainer takes the place of a device that is doubted.

    It computes what that one and others have computed differently. The doubted one stays a
    follower: it may be right. A follower of the stage is taken before a free trainer, which heals
    first. Who may have the very device of a doubted one is not asked: that would confirm itself.

    Args:
        state: of the job.
        draft: of the plan.
        doubted: devices of one position that have computed something differently.
        takers: trainers that may take a place.

    Returns:
        The plan; None if there is no trainer with another device, or no chain with a doubted one.
    """
    seats = living_seats(state)
    chained = [s for s in seats if s.slot in doubted and s.replica is not None]
    if not chained:
        return None
    may_judge = _judges(state, doubted)
    place = max(chained, key=lambda s: (s.replica or 0, s.slot))
    others = [
        s for s in seats if s.position == place.position and may_judge(s.slot) and s.replica is None
    ]
    free = [s for s in takers if may_judge(s.slot)]
    if not others:
        others = seat_joiners(locations_of(state), seats, [place.position], free) if free else []
    if not others:
        return None
    other = min(others, key=lambda s: (s.joining, s.slot))
    moved = {place.slot: replace(place, replica=None)}
    kept = [moved.get(s.slot, s) for s in seats if s.slot != other.slot]
    return compose(state, [*kept, replace(other, replica=place.replica)], draft)


def _judges(state: CoordinatorState, doubted: Collection[Slot]) -> Callable[[Slot], bool]:
    """Return what says whether a slot may judge: it has another device than all that are doubted.

    Where these may all be one device, as all pods of one machine, any other slot may.
    """
    known = [(slot, hardware_of(state, slot)) for slot in doubted]
    is_one = all(may_be_same(*one, *other) for one, other in combinations(known, 2))

    def may_judge(slot: Slot) -> bool:
        its = hardware_of(state, slot)
        is_same = any(may_be_same(slot, its, *other) for other in known)
        return slot not in doubted if is_one else not is_same

    return may_judge


def with_fork(state: CoordinatorState, plan: Plan) -> Plan:
    """Return an unplanned plan that orders to make anew what no member holds, of a new lineage."""
    assert state.plan is not None
    held = {m.slot for m in state.plan.members if holds_state(state, m)}
    again = made_again(state)
    empty = [
        number
        for number, members in enumerate(plan.positions)
        if number in again or not any(m.slot in held and not m.joining for m in members)
    ]
    return _forked(state, plan, empty)


def repeating_plan(state: CoordinatorState, draft: Draft, fork: Fork) -> Plan:
    """Return an unplanned plan of the same members that orders to make a fork of another run."""
    width = state.shape.ranks_per_stage
    positions = [place.stage * width + place.inner for place in fork.made.positions]
    return _forked(state, mask_plan(state, draft), sorted(positions), fork)


def _forked(
    state: CoordinatorState, plan: Plan, positions: Sequence[int], repeats: Fork | None = None
) -> Plan:
    """Return a plan with an order.

    What counts as well are states of the lineages since the last one in which all have settled: a
    rank may have missed the plans in between. Its rules are those of now, and stay those of then
    until it has come to an end.
    """
    before = state.plan
    assert before is not None
    is_open = before.fork is not None and not all_settled(state)
    since, how = before.lineage, rules_of(state)
    if before.fork is not None and is_open:
        since, how = before.fork.since, before.fork.how
        repeats = repeats or before.fork.repeats
    order = ForkOrder(positions=tuple(positions), since=since, how=how, repeats=repeats)
    return replace(plan, lineage=before.lineage + 1, fork=order, asks_first=False)


def join_plan(state: CoordinatorState, draft: Draft, takers: Sequence[SlotState]) -> Plan | None:
    """Return a plan with more whole replicas than now, or None if too few trainers are free.

    Followers take places first (no transfer), then ``takers`` in the order of :func:`seat_joiners`.
    """
    assert state.plan is not None
    grown = _grow(state, takers, least=len(state.plan.chains) + 1)
    return None if grown is None else compose(state, grown, draft)


def num_places(state: CoordinatorState) -> int:
    """Return how many trainers are missing for all wanted replicas."""
    counts = Counter(s.position for s in living_seats(state))
    return sum(max(0, state.wanted - counts[p]) for p in state.shape.positions)


def _grow(state: CoordinatorState, takers: Sequence[SlotState], least: int) -> list[Seat] | None:
    """Seat ``takers`` so that as many replicas as possible are whole, at least ``least``."""
    shape = state.shape
    seats = keep_whole(living_seats(state), len(shape.positions))
    counts = Counter(s.position for s in seats)
    free = list(takers)
    for target in range(state.wanted, least - 1, -1):
        wanted = [p for p in shape.positions for _ in range(counts[p], target)]
        if len(wanted) <= len(free):
            joiners = seat_joiners(locations_of(state), seats, wanted, free)
            moved = {s.slot for s in joiners}
            seats = [*(s for s in seats if s.slot not in moved), *joiners]
            return mate(state, seats, most=target)
    return None


def mate(state: CoordinatorState, seats: Sequence[Seat], most: int) -> list[Seat]:
    """Chain trainers to whole replicas, at most ``most`` of them. Whole chains stay as they are.

    A chain goes through all positions, the inner ranks of a stage one after the other: chaining
    calls each position a stage.

    Raises:
        InfeasiblePlanError: some position has no trainer.
    """
    domains = near_domains(state)
    living = [
        [
            Cell(cell_id=s.cell_id, domain=domains[s.slot.pod], replica=s.served)
            for s in seats
            if s.position == position
        ]
        for position in state.shape.positions
    ]
    previous = (
        {
            c.replica: tuple(f"{slot}@{life}" for slot, life in state.plan.chain_identity(c))
            for c in state.plan.chains
        }
        if state.plan
        else {}
    )
    chaining = plan_chaining(living, state.shape.lanes, most, previous)
    replica_of = {cell: r for r, cells in chaining.chains.items() for cell in cells}
    return [replace(s, replica=replica_of.get(s.cell_id)) for s in seats]


def compose(state: CoordinatorState, seats: Sequence[Seat], draft: Draft) -> Plan:
    """Return the plan with these seats: order of members, chains, suppliers, meeting place."""
    quorum = QuorumId(id=state.last_id + 1, nonce=draft.nonce)
    addresses = {p.registration.pod: p.registration.address for p in state.pods}
    ordered = sorted(seats, key=lambda s: (*s.position, s.replica is None, s.replica or 0, s.slot))
    tells_hardware = _tells_hardware(state)
    members = tuple(
        Member(
            index=index,
            rank=RankId(replica=seat.replica, stage=seat.stage, inner=seat.inner),
            slot=seat.slot,
            incarnation=seat.incarnation,
            address=addresses[seat.slot.pod],
            since=quorum.id if seat.since is None else seat.since,
            joining=seat.joining,
            clean_from=clean_from(state, seat.slot),
            hardware=_told_hardware(state, seat.slot) if tells_hardware else None,
        )
        for index, seat in enumerate(ordered)
    )
    chains = _chains(state.plan, members, quorum)
    suppliers, depth, why = _suppliers(state, tuple(c.replica for c in chains))
    previous = state.plan
    plan = Plan(
        job=state.config.job,
        quorum=quorum,
        lineage=previous.lineage if previous else 0,
        planned=draft.planned,
        unplanned_id=previous.unplanned_id if draft.planned and previous else quorum.id,
        method=draft.method,
        members=members,
        chains=chains,
        suppliers=suppliers,
        all_reduce_stack=depth,
        rendezvous=rendezvous_of(state, members, draft.avoid_rendezvous),
        reason="; ".join(r for r in (draft.reason, why) if r),
        faults_fired=tuple(f.fault for f in state.fired),
        created_at_s=draft.now_s,
        hosts=hosts_of(state, members),
        replicas_wanted=state.wanted,
        suspend_wanted=state.suspend,
        other_stores=other_stores_of(state, members),
        checks=state.wanted_checks,
        voided=previous.voided if previous else (),
        asks_first=may_ask(state, draft.method) and not draft.planned,
    )
    loads = draft.method in (Method.RESTART, Method.START)
    if previous is None or previous.fork is None or loads or all_settled(state):
        return plan
    # The fork has not come to an end: whoever has not settled yet does the same now.
    return _forked(state, plan, previous.fork.positions)


def _tells_hardware(state: CoordinatorState) -> bool:
    """Return whether plans tell what slots run on: a witness's members ask for it.

    They still do if the witness is switched off while they disagree.
    """
    before = state.plan.members if state.plan is not None else ()
    return state.wanted_checks.witness_every_steps > 0 or any(m.hardware for m in before)


def _told_hardware(state: CoordinatorState, slot: Slot) -> Hardware | None:
    hardware = hardware_of(state, slot)
    return None if hardware == UNKNOWN else hardware


def _chains(
    previous: Plan | None, members: Sequence[Member], quorum: QuorumId
) -> tuple[Chain, ...]:
    """Return the chains of the seated cells.

    A chain with the same cells keeps the plan that formed it.
    """
    cells: dict[int, list[Member]] = {}
    for member in sorted(members, key=lambda m: m.rank.position):
        if member.rank.replica is not None:
            cells.setdefault(member.rank.replica, []).append(member)
    formed = {previous.chain_identity(c): c.formed_in for c in previous.chains} if previous else {}
    return tuple(
        Chain(
            replica=replica,
            cells=tuple(m.index for m in cells[replica]),
            formed_in=formed.get(tuple((m.slot, m.incarnation) for m in cells[replica]), quorum),
        )
        for replica in sorted(cells)
    )


def _suppliers(
    state: CoordinatorState, replicas: tuple[int, ...]
) -> tuple[tuple[int, ...], int, str]:
    """Return who computes each type.

    A replica that comes (back) gets the types of its own lane first.
    """
    shape = state.shape
    home = [shape.lane_of(t) for t in range(shape.num_types)]
    if state.plan is None:
        current = home
    else:
        before = {c.replica for c in state.plan.chains}
        came = set(replicas) - before
        current = [
            lane if lane in came else supplier
            for lane, supplier in zip(home, state.plan.suppliers, strict=True)
        ]
    outcome = plan_reordering(
        hosts=_hosts(shape.lanes, shape.shards_per_lane, state.config.redundancy),
        living_replicas=replicas,
        current=current,
        shards_per_lane=shape.shards_per_lane,
        lanes=shape.lanes,
    )
    return tuple(outcome.suppliers), outcome.depth, outcome.reason


@lru_cache(maxsize=64)
def _hosts(lanes: int, shards_per_lane: int, redundancy: int | None) -> tuple[tuple[int, ...], ...]:
    return plan_placement(lanes, shards_per_lane, redundancy).hosts
