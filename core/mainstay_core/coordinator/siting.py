"""Decides which free slots serve together. The cluster's scheduler places pods; this places ranks.

A cluster says of each node which nodes are near it and to which failure domain it belongs. The
cells of a chain should be near each other, as activations travel between them. The copies of a
stage should be in several failure domains. Without that knowledge slots are taken in the order of
their pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mainstay_core.base.ids import Hardware, PodUid, Slot
from mainstay_core.coordinator.state import (
    CoordinatorState,
    PodState,
    SlotState,
    holds_state,
    is_leaving,
    is_living,
    uid_of,
)
from mainstay_core.wire.facts import Location


def locations_of(state: CoordinatorState) -> dict[PodUid, Location]:
    """Return the locations of the pods whose node's location is known."""
    return {
        p.registration.pod: state.topology[p.registration.domain]
        for p in state.pods
        if p.registration.domain in state.topology
    }


def near_domains(state: CoordinatorState) -> dict[PodUid, str]:
    """Return for each pod its domain of short links: the location, else the node, else itself."""
    locations = locations_of(state)
    near = {uid: location.near or location.apart for uid, location in locations.items()}
    return {
        p.registration.pod: near.get(p.registration.pod, "")
        or p.registration.domain
        or p.registration.pod
        for p in state.pods
    }


def order_slots(
    slots: Sequence[SlotState], locations: Mapping[PodUid, Location], chain: int, num_chains: int
) -> list[SlotState]:
    """Return the slots in the order in which they best form ``num_chains`` chains.

    Greedy, O(chains x groups): each chain goes to a group of near slots that has room for all of
    it. Among these groups it prefers the failure domain with the fewest chains, then the group with
    the least room left over, then the first by name. If no group has room, the largest groups fill
    the chain. Inside a group the given order is kept; if no location is known, all of it is.
    """
    if not any(s.slot.pod in locations for s in slots):
        return list(slots)
    groups: dict[tuple[str, str], list[SlotState]] = {}
    for slot in slots:
        location = locations.get(slot.slot.pod, Location())
        key = (location.apart or location.near, location.near or location.apart)
        groups.setdefault(key, []).append(slot)
    used: Counter[str] = Counter()
    ordered: list[SlotState] = []
    for _ in range(num_chains):
        missing = chain
        while missing and any(groups.values()):
            key = _choose(groups, used, missing)
            taken, groups[key] = groups[key][:missing], groups[key][missing:]
            ordered += taken
            missing -= len(taken)
            used[key[0]] += 1
    taken_slots = {s.slot for s in ordered}
    return [*ordered, *(s for s in slots if s.slot not in taken_slots)]


def _choose(
    groups: Mapping[tuple[str, str], list[SlotState]], used: Counter[str], missing: int
) -> tuple[str, str]:
    roomy = [key for key, slots in groups.items() if len(slots) >= missing]
    if roomy:
        return min(roomy, key=lambda key: (used[key[0]], len(groups[key]), key))
    some = [key for key, slots in groups.items() if slots]
    return min(some, key=lambda key: (-len(groups[key]), used[key[0]], key))


def count_copies(
    locations: Mapping[PodUid, Location], copies: Iterable[tuple[Slot, int]]
) -> Counter[tuple[str, int]]:
    """Return how many cells of each stage are in each known failure domain."""
    counts: Counter[tuple[str, int]] = Counter()
    for slot, stage in copies:
        location = locations.get(slot.pod)
        if location is not None:
            counts[location.apart or location.near, stage] += 1
    return counts


def take_cell(
    free: list[SlotState], stage: int, num_ranks: int, crowd: Counter[tuple[PodUid, int]]
) -> list[SlotState]:
    """Take the slots of a cell out of ``free``.

    They are in one pod, and in one without the stage, if possible.
    """
    cell: list[SlotState] = []
    for _ in range(num_ranks):
        room = Counter(s.slot.pod for s in free)
        own = {s.slot.pod for s in cell}

        def preference(
            slot: SlotState, own: set[PodUid] = own, room: Counter[PodUid] = room
        ) -> Any:
            pod = slot.slot.pod
            return crowd[pod, stage], pod not in own, room[pod] < num_ranks - len(cell)

        best = min(free, key=preference)
        free.remove(best)
        cell.append(best)
    crowd.update((s.slot.pod, stage) for s in cell)
    return cell


def usable_slots(state: CoordinatorState, now_s: float) -> tuple[SlotState, ...]:
    """Return the slots whose trainer is up, may be used and is no member, in pod order.

    With an infinite ``now_s`` the slots that are held back count as well. A trainer known only from
    a recovered plan that drops it does not count before its supervisor has reported it.
    """
    unheard = {uid_of(p) for p in state.pods if p.placeholder}
    let_go = {m.incarnation for m in state.plan.outgoing} if state.plan else set()
    members = {m.slot for m in state.plan.members} if state.plan else set()
    order = {uid_of(p): i for i, p in enumerate(state.pods) if not (p.gone or p.leaving)}
    fit = [
        s
        for s in state.slots
        if s.incarnation is not None
        and s.slot.pod in order
        and not (s.slot.pod in unheard and s.incarnation in let_go)
        and not s.refused
        and s.failures <= state.config.max_restarts
        and held_until_s(state, s) <= now_s
    ]
    living = {m.slot for m in state.plan.members if is_living(state, m)} if state.plan else set()
    free = [s for s in fit if s.slot not in members or s.slot not in living]
    return tuple(sorted(free, key=lambda s: (order[s.slot.pod], s.slot.index)))


def surplus_slots(state: CoordinatorState) -> tuple[SlotState, ...]:
    """Return the slots whose living member serves beside all that its position needs.

    A job that was scaled down keeps such members until a planned plan drops them, and pods are made
    for the wanted replicas only. So another position that lost all its cells may wait in vain for
    any other trainer. A pod that leaves takes no new place.
    """
    if state.plan is None:
        return ()
    surplus: list[SlotState] = []
    for position in state.plan.positions:
        living = [m for m in position if is_living(state, m)]
        # Those that hold a state, and of these those that compute, keep their place.
        ordered = sorted(
            living, key=lambda m: (not holds_state(state, m), m.rank.replica is None, m.index)
        )
        slots = [state.slot(m.slot) for m in ordered[state.wanted :]]
        surplus += [s for s in slots if s is not None and not is_leaving(state, s.slot.pod)]
    return tuple(surplus)


def restarting_slots(state: CoordinatorState, now_s: float) -> tuple[SlotState, ...]:
    """Return the slots that served a stage and whose next trainer is worth waiting for."""
    gone = {uid_of(p) for p in state.pods if p.gone or p.leaving}
    return tuple(
        s
        for s in state.slots
        if s.incarnation is None
        and s.restarting
        and s.stage is not None
        and s.slot.pod not in gone
        and not s.refused
        and s.failures <= state.config.max_restarts
        and now_s - s.learnt_down_s < state.config.restart_grace_s
        and held_until_s(state, s) <= now_s
    )


def held_until_s(state: CoordinatorState, slot: SlotState) -> float:
    """Return until when a slot is held back, for ends of its own trainers or of its domain's."""
    domain = state.domains.get(domain_of(state, slot.slot.pod))
    return max(slot.held_until_s, domain.held_until_s if domain else 0.0)


def domain_of(state: CoordinatorState, uid: PodUid) -> str:
    """Return the failure domain of a pod, or the pod itself where no domain is known."""
    pod = state.pod(uid)
    return (pod.registration.domain if pod else "") or uid


def hardware_of(state: CoordinatorState, slot: Slot) -> Hardware:
    """Return what a slot runs on, or ran on, as far as it is known."""
    pod, known = state.pod(slot.pod), state.slot(slot)
    return Hardware(
        node=pod.registration.domain if pod is not None else "",
        accelerator=known.accelerator if known is not None else "",
    )


def spare_pods(state: CoordinatorState) -> tuple[PodState, ...]:
    """Return the living pods without a member, in order: spare 0, 1, ..."""
    used = {m.slot.pod for m in state.plan.members} if state.plan else set()
    return tuple(p for p in state.pods if not p.gone and uid_of(p) not in used)
