"""Orders of a window: popular experts late, gate and rest last, dense models from their end."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.orderings import (
    ONE,
    Ordering,
    Popularity,
    Score,
    close_window,
    must_reorder,
    note_step,
    order_units,
)
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind


def unit(block: int, name: str, kind: UnitKind = UnitKind.EXPERT) -> Unit:
    return Unit(
        name=f"layers.{block}.{name}",
        kind=kind,
        position=Position(stage=0),
        block=f"layers.{block}",
        block_index=block,
        spans=(Span(start=0, stop=32),),
    )


def scores(**values: int) -> tuple[Score, ...]:
    """Scores of experts of layer 0, as ``e0=5``."""
    return tuple(
        Score(unit=f"layers.0.{name}", block="layers.0", value=value)
        for name, value in values.items()
    )


LAYER = [
    unit(0, "gate", UnitKind.GATE),
    unit(0, "rest", UnitKind.REST),
    unit(0, "e0"),
    unit(0, "e1"),
    unit(0, "e2"),
]


def names(units: tuple[Unit, ...]) -> list[str]:
    return [u.name.removeprefix("layers.") for u in units]


def test_experts_come_by_ascending_popularity_and_gate_and_rest_last() -> None:
    ordered = order_units(LAYER, Ordering.POPULARITY, scores(e0=7, e1=3, e2=5))

    assert names(ordered) == ["0.e1", "0.e2", "0.e0", "0.gate", "0.rest"]


def test_equal_scores_are_settled_by_the_later_block_then_by_name() -> None:
    units = [unit(0, "e1"), unit(0, "e0"), unit(1, "e0")]

    assert names(order_units(units, Ordering.POPULARITY)) == ["1.e0", "0.e0", "0.e1"]


def test_capacity_divides_the_popularity() -> None:
    capacities = {"layers.0.e0": 10, "layers.0.e1": 2, "layers.0.e2": 5}
    counts = scores(e0=7, e1=3, e2=5)

    ordered = order_units(LAYER, Ordering.CAPACITY_AWARE, counts, capacities)

    assert names(ordered)[:3] == ["0.e0", "0.e2", "0.e1"]
    with pytest.raises(InvalidSpecError, match=r"capacities\.layers\.0\.e0: is 0"):
        order_units(LAYER, Ordering.CAPACITY_AWARE, counts)


def test_a_dense_model_goes_from_its_end_to_its_beginning() -> None:
    layers = [unit(block, "all", UnitKind.LAYER) for block in range(3)]

    for ordering in (Ordering.BACK_TO_FRONT, Ordering.POPULARITY):
        assert names(order_units(layers, ordering)) == ["2.all", "1.all", "0.all"]


def test_an_order_is_a_permutation_whatever_the_order_of_the_input() -> None:
    rng = random.Random(1)
    kinds = list(UnitKind)
    for _ in range(300):
        units = [unit(b, f"u{n}", rng.choice(kinds)) for b in range(3) for n in range(4)]
        told = [Score(unit=u.name, block=u.block, value=rng.randint(0, 3)) for u in units]
        ordering = rng.choice([o for o in Ordering if o is not Ordering.CAPACITY_AWARE])
        ordered = order_units(units, ordering, told)
        assert sorted(names(ordered)) == sorted(names(tuple(units)))
        assert ordered == order_units(rng.sample(units, len(units)), ordering, told)


def test_counts_of_a_window_add_up_and_begin_again() -> None:
    popularity = Popularity()
    for _ in range(3):
        popularity = note_step(popularity, scores(e0=1, e1=2), Ordering.POPULARITY)

    assert popularity.running == scores(e0=3, e1=6)
    closed, new = close_window(popularity, Ordering.POPULARITY)
    assert new
    assert closed == Popularity(running=(), ordered_by=scores(e0=3, e1=6))
    same = note_step(closed, scores(e0=10, e1=20), Ordering.POPULARITY)
    assert close_window(same, Ordering.POPULARITY) == (closed, False)


def test_a_decayed_average_follows_its_formula_and_goes_on() -> None:
    alpha = ONE // 4
    popularity = note_step(Popularity(), scores(e0=8), Ordering.TIME_DECAYED, alpha)
    popularity = note_step(popularity, scores(e0=16), Ordering.TIME_DECAYED, alpha)

    expected = 0.25 * (0.25 * 0 + 0.75 * 8) + 0.75 * 16
    assert popularity.running == scores(e0=round(expected * ONE))
    assert close_window(popularity, Ordering.TIME_DECAYED)[0].running == popularity.running


def test_an_average_of_equal_counts_stays_below_them() -> None:
    popularity = Popularity()
    for _ in range(1000):
        popularity = note_step(popularity, scores(e0=7), Ordering.TIME_DECAYED, 60_000)

    assert 7 * ONE * 999 // 1000 <= popularity.running[0].value <= 7 * ONE


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (scores(e0=250, e1=250, e2=250, e3=250), False),
        # Shares count, not tokens.
        (scores(e0=100, e1=100, e2=100, e3=100), False),
        # One of four by more than 10 %: the others lose 5 % each.
        (scores(e0=288, e1=237, e2=237, e3=238), True),
        # 10 % exactly is no change.
        (scores(e0=275, e1=225, e2=250, e3=250), False),
        (scores(e0=276, e1=225, e2=249, e3=250), True),
        (scores(e0=500, e1=500), True),
    ],
)
def test_a_new_order_needs_a_tenth_at_a_quarter_of_the_experts(
    after: tuple[Score, ...], expected: bool
) -> None:
    assert must_reorder(scores(e0=250, e1=250, e2=250, e3=250), after) is expected


def test_fewer_than_a_quarter_do_not_reorder() -> None:
    before = scores(**{f"e{n}": 1000 for n in range(8)})
    one = scores(**{f"e{n}": 1120 if n == 0 else 983 for n in range(8)})
    two = scores(**{f"e{n}": 1150 if n < 2 else 950 for n in range(8)})

    assert not must_reorder(before, one)
    assert must_reorder(before, two)


def test_layers_are_compared_by_themselves() -> None:
    before = (*scores(e0=1, e1=1), Score(unit="b.e0", block="b", value=1))
    more = (*scores(e0=5, e1=5), Score(unit="b.e0", block="b", value=1))

    assert not must_reorder(before, more)


def test_nobody_changed_is_no_reason_whatever_the_thresholds() -> None:
    assert not must_reorder((), ())
    assert not must_reorder(scores(e0=0), scores(e0=0), 0, 0)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match="decay: is 65537"):
        note_step(Popularity(), (), Ordering.TIME_DECAYED, ONE + 1)
    with pytest.raises(InvalidSpecError, match="counts: names an expert twice"):
        note_step(Popularity(), (*scores(e0=1), *scores(e0=1)), Ordering.POPULARITY)
