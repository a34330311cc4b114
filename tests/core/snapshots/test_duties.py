"""Duties: every unit has one author, and authors differ by one unit's bytes at most."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.snapshots.duties import Author, divide
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.windows import plan_length


def authors_of(number: int) -> list[Author]:
    return [
        Author(slot=Slot(pod=PodUid(f"pod{n}"), index=0), incarnation=Incarnation(f"life{n}"))
        for n in range(number)
    ]


def prices_of(*sizes: int) -> list[UnitPrice]:
    return [
        UnitPrice(name=f"u{number}", full_bytes=size, compute_bytes=size // 6)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_every_unit_has_one_author_and_duty_is_within_one_unit_of_even(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        order = prices_of(*(rng.randint(0, 50) for _ in range(rng.randint(0, 12))))
        authors = authors_of(rng.randint(1, 5))
        duties = divide(order, rng.sample(authors, len(authors)))

        assert [duty.author for duty in duties] == authors
        given = [price for duty in duties for price in duty.units]
        assert sorted(given, key=order.index) == order
        for duty in duties:
            assert list(duty.units) == sorted(duty.units, key=order.index)
        largest = max((price.full_bytes for price in order), default=0)
        mean = sum(price.full_bytes for price in order) / len(authors)
        assert all(abs(duty.full_bytes - mean) <= largest for duty in duties)
        loads = [duty.full_bytes for duty in duties]
        assert max(loads) - min(loads) <= largest


def test_equal_units_go_round_in_the_windows_order() -> None:
    duties = divide(prices_of(*[12] * 5), authors_of(2))

    assert [[price.name for price in duty.units] for duty in duties] == [
        ["u0", "u2", "u4"],
        ["u1", "u3"],
    ]


def test_more_cells_make_the_window_shorter() -> None:
    order = prices_of(*[12] * 8)

    lengths = [
        plan_length([duty.units for duty in divide(order, authors_of(cells))], 26).length
        for cells in (1, 2, 4, 8)
    ]

    assert lengths == [7, 3, 1, 1]


def test_a_position_without_a_living_cell_has_no_authors() -> None:
    with pytest.raises(InvalidSpecError, match="authors: has none"):
        divide([], [])
    with pytest.raises(InvalidSpecError, match="names one of them twice"):
        divide([], authors_of(1) * 2)
