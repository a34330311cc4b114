"""Decides who has which place in the next plan: who keeps one, and which free trainer takes one.

Copies of one position in one pod are lost together. So joiners are placed with a view to all of
them, and not each to the best place that the ones before it left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.coordinator.siting import count_copies
from mainstay_core.coordinator.state import CoordinatorState, SlotState, is_living, still_joining
from mainstay_core.wire.facts import Location

Position = tuple[int, int]
"""(stage, inner). The ranks of one position have interchangeable states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A trainer and its place in the next plan."""

    stage: int
    inner: int = 0
    replica: int | None
    slot: Slot
    incarnation: Incarnation
    since: int | None = None
    """The first quorum of its membership at this position; None: the next one."""
    joining: bool = False
    served: int | None = None
    """Replica that it served last."""

    @property
    def position(self) -> Position:
        return self.stage, self.inner

    @property
    def cell_id(self) -> str:
        """Return the trainer's name for chaining.

        Another life on the same slot has another name.
        """
        return f"{self.slot}@{self.incarnation}"


def living_seats(state: CoordinatorState) -> list[Seat]:
    assert state.plan is not None
    return [
        Seat(
            stage=m.rank.stage,
            inner=m.rank.inner,
            replica=m.rank.replica,
            slot=m.slot,
            incarnation=m.incarnation,
            since=m.since,
            joining=still_joining(state, m),
            served=m.rank.replica,
        )
        for m in state.plan.members
        if is_living(state, m)
    ]


def keep_whole(seats: Sequence[Seat], num_positions: int) -> list[Seat]:
    ranks = Counter(s.replica for s in seats if s.replica is not None)
    return [
        s
        if s.replica is not None and ranks[s.replica] == num_positions
        else replace(s, replica=None)
        for s in seats
    ]


def seat_joiners(
    locations: Mapping[PodUid, Location],
    seats: Sequence[Seat],
    wanted: Iterable[Position],
    free: Sequence[SlotState],
) -> list[Seat]:
    """Give each wanted place a free trainer, with the copies of a position in several pods.

    As many positions as can be have copies in two pods, then in three, and so on: the positions
    with the fewest go first, and where no pod without a copy has room, joiners make room. As far as
    that leaves a choice, a trainer beside another cell of the stage is avoided. Then come, in this
    order: the slot that served the position before, a slot apart from the stage's other cells, a
    slot beside ranks with which it can form a cell, any restarted trainer, and spares in pod order.

    Args:
        locations: of the pods whose node's location is known.
        seats: of the trainers that stay. One that is free as well gives up its place.
        wanted: a position for each place, at most as many as there are free trainers.
        free: trainers that may take a place.

    Returns:
        The seat of each place.
    """
    moving = {s.slot for s in free}
    places = _Places(locations, free, [s for s in seats if s.slot not in moving])
    return [
        Seat(
            stage=stage,
            inner=inner,
            replica=None,
            slot=slot.slot,
            incarnation=_life_on(slot),
            joining=True,
        )
        for (stage, inner), slot in places.give([(position, None) for position in wanted])
    ]


def part_copies(
    locations: Mapping[PodUid, Location], seats: Sequence[Seat], free: Sequence[SlotState]
) -> list[Seat]:
    """Move seats of a first plan so that the copies of a position lie in as many pods as can be.

    A seat moves only if it is beside a copy of its position, or makes room for one that is.

    Args:
        locations: of the pods whose node's location is known.
        seats: in order of replica.
        free: all trainers that may take a place, those of the seats among them.

    Returns:
        The same replicas and positions, with other trainers where that parts copies.
    """
    by_slot = {s.slot: s for s in free}
    given: dict[Position, dict[Slot, SlotState]] = {}
    for position, slot in _Places(locations, free, ()).give(
        [(s.position, by_slot[s.slot]) for s in seats]
    ):
        given.setdefault(position, {})[slot.slot] = slot
    parted = [s for s in seats if given[s.position].pop(s.slot, None) is not None]
    stay = {s.slot for s in parted}
    for seat in seats:
        if seat.slot not in stay:
            _, slot = given[seat.position].popitem()
            parted.append(replace(seat, slot=slot.slot, incarnation=_life_on(slot)))
    return parted


def _life_on(slot: SlotState) -> Incarnation:
    assert slot.incarnation is not None, "free trainers are up"
    return slot.incarnation


class _Places:
    """Places in pods, while they are given to free trainers."""

    def __init__(
        self,
        locations: Mapping[PodUid, Location],
        free: Sequence[SlotState],
        stay: Sequence[Seat],
    ) -> None:
        self._locations = locations
        self._free = {s.slot: s for s in free}
        self._taken = {(s.slot.pod, s.position) for s in stay}
        self._joiners: dict[PodUid, dict[Position, SlotState]] = {}
        """Those that have no copy of their position in their pod."""
        self._beside: dict[tuple[PodUid, int], Counter[tuple[int, bool]]] = {}
        """Cells of a stage in a pod, counted by inner rank and whether they are in a chain."""
        self._copies: Counter[tuple[str, int]] = Counter()
        for seat in stay:
            self._count(seat.slot, seat.position, chained=seat.replica is not None)

    def give(
        self, wanted: Sequence[tuple[Position, SlotState | None]]
    ) -> list[tuple[Position, SlotState]]:
        """Return a free trainer for each wanted place: the one named, as far as it is fit."""
        crowded: list[tuple[Position, SlotState | None]] = []
        full: set[Position] = set()
        for position, named in self._least_spread_first(wanted):
            if named and named.slot in self._free and (named.slot.pod, position) not in self._taken:
                self._seat(named, position)
            # Where one copy found no pod of its own, no later copy of the position does.
            elif position in full or not self._give_apart(position):
                full.add(position)
                crowded.append((position, named))
        apart = [given for joiners in self._joiners.values() for given in joiners.items()]
        return apart + [(place[0], self._give_beside(*place)) for place in crowded]

    def _least_spread_first(
        self, wanted: Sequence[tuple[Position, SlotState | None]]
    ) -> list[tuple[Position, SlotState | None]]:
        """Return the wanted places in order of how many pods then have copies of the position."""
        pods = Counter(position for _, position in self._taken)
        numbered = []
        for place in wanted:
            pods[place[0]] += 1
            numbered.append((pods[place[0]], place))
        return [place for _, place in sorted(numbered, key=lambda n: n[0])]

    def _give_apart(self, wanted: Position) -> bool:
        """Give the place to a trainer in a pod without the position, if there can be one.

        It searches for an augmenting path of a maximum flow from positions to pods, breadth first:
        from a position to the pods without it, from a pod to the positions of its joiners. A free
        trainer ends the path, and each joiner on it moves one pod further. O(pods x positions).
        """
        entered: dict[PodUid, Position] = {}
        leaving: dict[Position, PodUid] = {}
        queue = deque([wanted])
        while queue:
            position = queue.popleft()
            fit = [s for s in self._free.values() if (s.slot.pod, position) not in self._taken]
            slot = self._best(fit, position)
            if slot is not None:
                while position in leaving:
                    pod = leaving[position]
                    left = self._release(pod, position)
                    self._seat(slot, position)
                    slot, position = left, entered[pod]
                self._seat(slot, position)
                return True
            for pod, joiners in self._joiners.items():
                if pod not in entered and (pod, position) not in self._taken:
                    entered[pod] = position
                    for other in joiners:
                        if other != wanted and other not in leaving:
                            leaving[other] = pod
                            queue.append(other)
        return False

    def _give_beside(self, position: Position, named: SlotState | None) -> SlotState:
        """Give the place to the trainer that suits it best, of all that are left."""
        slot = self._free.get(named.slot) if named else None
        slot = slot or self._best(self._free.values(), position)
        assert slot is not None, "there are as many free trainers as places"
        del self._free[slot.slot]
        self._count(slot.slot, position, chained=False)
        return slot

    def _best(self, slots: Iterable[SlotState], position: Position) -> SlotState | None:
        stage, inner = position

        def preference(slot: SlotState) -> Any:
            beside = self._beside.get((slot.slot.pod, stage), Counter())
            others = sum(n for (i, chained), n in beside.items() if chained or i == inner)
            served = (slot.stage, slot.inner) == position
            location = self._locations.get(slot.slot.pod, Location())
            near = self._copies[location.apart or location.near, stage]
            return others, not served, near, others - beside.total(), slot.stage is None

        return min(slots, key=preference, default=None)

    def _seat(self, slot: SlotState, position: Position) -> None:
        del self._free[slot.slot]
        self._joiners.setdefault(slot.slot.pod, {})[position] = slot
        self._taken.add((slot.slot.pod, position))
        self._count(slot.slot, position, chained=False)

    def _release(self, pod: PodUid, position: Position) -> SlotState:
        slot = self._joiners[pod].pop(position)
        self._free[slot.slot] = slot
        self._taken.remove((pod, position))
        self._count(slot.slot, position, chained=False, cells=-1)
        return slot

    def _count(self, slot: Slot, position: Position, *, chained: bool, cells: int = 1) -> None:
        stage, inner = position
        self._beside.setdefault((slot.pod, stage), Counter())[inner, chained] += cells
        for key in count_copies(self._locations, [(slot, stage)]):
            self._copies[key] += cells


def clean_from(state: CoordinatorState, slot: Slot) -> int | None:
    """Return since when no witness has agreed with a device; None: that is not known."""
    known = state.slot(slot)
    return known.clean_from if known is not None else None
