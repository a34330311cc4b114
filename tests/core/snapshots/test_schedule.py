"""A whole window: aligned over all positions, each unit once, and shorter with more cells."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.snapshots.duties import Author
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.schedule import PositionState, plan_window
from mainstay_core.snapshots.units import Position
from mainstay_core.snapshots.windows import plan_length


def state(stage: int, num_units: int, num_cells: int, full: int = 12) -> PositionState:
    return PositionState(
        position=Position(stage=stage),
        order=tuple(
            UnitPrice(name=f"s{stage}.u{n}", full_bytes=full, compute_bytes=2)
            for n in range(num_units)
        ),
        authors=tuple(
            Author(
                slot=Slot(pod=PodUid(f"pod{stage}.{n}"), index=0), incarnation=Incarnation("life")
            )
            for n in range(num_cells)
        ),
    )


@pytest.mark.parametrize("seed", range(8))
def test_every_unit_of_every_position_is_active_once_in_one_aligned_window(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        positions = [
            state(stage, rng.randint(0, 8), rng.randint(1, 4), rng.randint(2, 20))
            for stage in range(rng.randint(1, 4))
        ]
        length = rng.choice((None, rng.randint(1, 6)))
        plan = plan_window(7, positions, rng.randint(10, 60), length)

        active = Counter(
            (one.position, name)
            for one in plan.assignments
            for i in one.instalments
            for name in i.full
        )
        units = [(s.position, price.name) for s in positions for price in s.order]
        assert active == Counter(units)
        assert plan.window.first == 7
        assert length in (None, plan.window.length)
        for one in plan.assignments:
            assert len(one.instalments) == plan.window.length
            assert all(i.size_bytes <= plan.largest_bytes for i in one.instalments)
            full = {name: i.number for i in one.instalments for name in i.full}
            for i in one.instalments:
                waiting = {name for name, at in full.items() if at > i.number}
                assert set(i.compute) == waiting
        shuffled = rng.sample(positions, len(positions))
        assert plan_window(7, shuffled, 40, length) == plan_window(7, positions, 40, length)


def test_the_window_is_as_long_as_its_slowest_author_needs() -> None:
    few, many = state(0, 2, 1), state(1, 8, 1)

    assert plan_length([few.order], 26).length == 1
    plan = plan_window(0, [few, many], 26)

    assert plan.window.length == plan_length([many.order], 26).length == 7
    assert plan.fits
    (short,) = [one for one in plan.assignments if one.position.stage == 0]
    assert len(short.numbers) < 7


def test_a_window_falls_with_the_number_of_cells() -> None:
    lengths = [plan_window(0, [state(0, 8, cells)], 26).window.length for cells in (1, 2, 4, 8)]

    assert lengths == [7, 3, 1, 1]


def test_a_length_that_is_asked_for_is_taken_and_said_not_to_fit() -> None:
    plan = plan_window(0, [state(0, 8, 1)], 26, 2)

    assert (plan.window.length, plan.fits) == (2, False)
    assert plan.reason == (
        "a window of 2 steps as asked; by itself a window of 7 steps: its dearest instalment has "
        "26 B, a step copies 26 B; 1 author"
    )


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match="lists a position twice"):
        plan_window(0, [state(0, 1, 1), state(0, 1, 1)], 1)
    with pytest.raises(InvalidSpecError, match=r"spec\.snapshots\.window: is 0"):
        plan_window(0, [state(0, 1, 1)], 1, 0)
