"""Copies of a position lie in as many pods as they can, for joiners and in a first plan."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.coordinator.seats import Position, Seat, part_copies, seat_joiners
from mainstay_core.coordinator.state import SlotState

POSITIONS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def seat(pod: str, index: int, position: Position, replica: int | None = None) -> Seat:
    return Seat(
        stage=position[0],
        inner=position[1],
        replica=replica,
        slot=Slot(pod=PodUid(pod), index=index),
        incarnation=Incarnation(f"{pod}{index}"),
    )


def trainer(pod: str, index: int, served: Position | None = None) -> SlotState:
    return SlotState(
        slot=Slot(pod=PodUid(pod), index=index),
        incarnation=Incarnation(f"{pod}{index}"),
        stage=served[0] if served else None,
        inner=served[1] if served else 0,
    )


def spread(pods_and_positions: Sequence[tuple[PodUid, Position]]) -> list[int]:
    """Return how many positions have copies in one pod at least, in two, in three, ..."""
    pods = Counter(position for _, position in set(pods_and_positions))
    return [sum(n >= most for n in pods.values()) for most in range(1, 6)]


def places(seats: Sequence[Seat]) -> list[tuple[PodUid, Position]]:
    return [(s.slot.pod, s.position) for s in seats]


def best_spread(
    stay: Sequence[Seat], wanted: Sequence[Position], free: Sequence[SlotState]
) -> list[int]:
    """Try every way to give the places."""
    kept = places(stay)
    return max(
        spread([*kept, *((s.slot.pod, p) for s, p in zip(chosen, wanted, strict=True))])
        for chosen in itertools.permutations(free, len(wanted))
    )


def test_joiners_make_room_for_the_one_that_has_no_other_pod() -> None:
    # Pod a holds a copy of all but (1, 0), which only a slot of pod b can take apart from a's
    # own; but b's is what (0, 0) likes best, having served there.
    stay = [seat("a", 0, (1, 0)), seat("b", 0, (1, 1)), seat("b", 1, (0, 1))]
    free = [trainer("a", 1), trainer("b", 2, served=(0, 0))]

    joiners = seat_joiners({}, stay, [(0, 0), (1, 0)], free)

    assert {(s.slot.pod, s.position) for s in joiners} == {("a", (0, 0)), ("b", (1, 0))}


def test_a_slot_returns_to_the_position_that_it_served() -> None:
    stay = [seat("a", 0, (0, 0), 0), seat("b", 0, (1, 0), 0)]
    free = [trainer("c", 0, served=(1, 0)), trainer("c", 1, served=(0, 0))]

    joiners = seat_joiners({}, stay, [(0, 0), (1, 0)], free)

    assert {(s.slot.index, s.position) for s in joiners} == {(0, (1, 0)), (1, (0, 0))}


def test_a_trainer_that_moves_leaves_no_copy_behind() -> None:
    stay = [seat("a", 0, (0, 0), 0), seat("a", 1, (0, 0))]
    free = [trainer("a", 1), trainer("b", 0)]

    joiners = seat_joiners({}, stay, [(0, 1), (0, 1)], free)

    assert Counter(places(joiners)) == Counter({("a", (0, 1)): 1, ("b", (0, 1)): 1})


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Seat], list[Position], list[SlotState]]:
    pods = "abcd"[: draw(st.integers(1, 4))]
    position = st.sampled_from(POSITIONS)
    slots = [(pod, i) for pod in pods for i in range(draw(st.integers(1, 4)))]
    free, stay = [], []
    for pod, index in slots:
        if len(free) < 6 and draw(st.booleans()):
            free.append(trainer(pod, index, draw(st.none() | position)))
        else:
            stay.append(seat(pod, index, draw(position), draw(st.none() | st.integers(0, 2))))
    wanted = draw(st.lists(position, max_size=min(5, len(free))))
    return stay, sorted(wanted), free


@given(tables())
def test_positions_are_spread_as_far_as_by_trying_every_way(
    table: tuple[list[Seat], list[Position], list[SlotState]],
) -> None:
    stay, wanted, free = table

    joiners = seat_joiners({}, stay, wanted, free)

    assert sorted(s.position for s in joiners) == wanted
    assert {s.slot for s in joiners} <= {s.slot for s in free}
    assert len({s.slot for s in joiners}) == len(wanted)
    assert spread(places([*stay, *joiners])) == best_spread(stay, wanted, free)


def test_a_first_plan_swaps_ranks_of_a_cell_rather_than_crowd_a_pod() -> None:
    # Cell by cell, pod c got both copies of (1, 1), and pod b none.
    seats = [
        seat("a", 0, (0, 0), replica=0),
        seat("a", 1, (0, 1), replica=0),
        seat("b", 0, (1, 0), replica=0),
        seat("c", 0, (1, 1), replica=0),
        seat("c", 1, (0, 0), replica=1),
        seat("c", 2, (0, 1), replica=1),
        seat("b", 1, (1, 0), replica=1),
        seat("c", 3, (1, 1), replica=1),
    ]
    free = [trainer(s.slot.pod, s.slot.index) for s in seats]

    parted = part_copies({}, seats, free)

    assert spread(places(parted)) == [4, 4, 0, 0, 0]
    assert sorted(s.slot for s in parted) == sorted(s.slot for s in seats)


@given(tables())
def test_a_first_plan_parts_copies_as_far_as_by_trying_every_way(
    table: tuple[list[Seat], list[Position], list[SlotState]],
) -> None:
    _, wanted, free = table
    seats = [
        replace(seat(s.slot.pod, s.slot.index, position), replica=wanted[:i].count(position))
        for i, (s, position) in enumerate(zip(free, wanted, strict=False))
    ]
    seats.sort(key=lambda s: s.replica or 0)

    parted = part_copies({}, seats, free)

    assert sorted((s.replica, s.position) for s in parted) == sorted(
        (s.replica, s.position) for s in seats
    )
    assert {s.slot for s in parted} <= {s.slot for s in free}
    assert len({s.slot for s in parted}) == len(seats)
    assert spread(places(parted)) == best_spread([], wanted, free)
    if spread(places(seats)) == spread(places(parted)) and len(wanted) == len(set(places(seats))):
        assert parted == seats, "nothing moves without need"
