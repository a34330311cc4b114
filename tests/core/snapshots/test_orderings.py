"""Orders of a window: popular experts late, gate and rest last, dense models from their end."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.orderings import (
    ONE,
    Ordering,
    close_window,
    must_reorder,
    note_step,
    order_units,
)
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind
from mainstay_core.snapshots.windows import plan_instalments
from mainstay_core.wire.windows import Popularity


def unit(block: int, name: str, kind: UnitKind = UnitKind.EXPERT) -> Unit:
    return Unit(
        name=f"layers.{block}.{name}",
        kind=kind,
        position=Position(stage=0),
        block=f"layers.{block}",
        block_index=block,
        spans=(Span(start=0, stop=32),),
    )


def scores(**values: int) -> dict[str, int]:
    """Scores of experts of layer 0, as ``e0=5``."""
    return {f"layers.0.{name}": value for name, value in values.items()}


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
        told = {u.name: rng.randint(0, 3) for u in units}
        ordering = rng.choice([o for o in Ordering if o is not Ordering.CAPACITY_AWARE])
        ordered = order_units(units, ordering, told)
        assert sorted(names(ordered)) == sorted(names(tuple(units)))
        assert ordered == order_units(rng.sample(units, len(units)), ordering, told)


def test_counts_of_a_window_add_up_and_begin_again() -> None:
    popularity = Popularity()
    for _ in range(3):
        popularity = note_step(popularity, (1, 2), Ordering.POPULARITY)

    assert popularity.running == (3, 6)
    closed, new = close_window(popularity, Ordering.POPULARITY, (0, 0))
    assert new
    assert closed == Popularity(running=(), ordered_by=(3, 6))
    same = note_step(closed, (10, 20), Ordering.POPULARITY)
    assert close_window(same, Ordering.POPULARITY, (0, 0)) == (closed, False)


def test_a_window_without_a_step_leaves_the_order_in_force() -> None:
    popularity = Popularity(ordered_by=(5, 1))

    assert close_window(popularity, Ordering.POPULARITY, (0, 0)) == (popularity, False)
    assert close_window(Popularity(), Ordering.POPULARITY, (0, 0)) == (Popularity(), False)


def test_a_decayed_average_follows_its_formula_and_goes_on() -> None:
    alpha = ONE // 4
    popularity = note_step(Popularity(), (8,), Ordering.TIME_DECAYED, alpha)
    popularity = note_step(popularity, (16,), Ordering.TIME_DECAYED, alpha)

    expected = 0.25 * (0.25 * 0 + 0.75 * 8) + 0.75 * 16
    assert popularity.running == (round(expected * ONE),)
    closed, _ = close_window(popularity, Ordering.TIME_DECAYED, (0,))
    assert closed.running == popularity.running


def test_an_average_of_equal_counts_stays_below_them() -> None:
    popularity = Popularity()
    for _ in range(1000):
        popularity = note_step(popularity, (7,), Ordering.TIME_DECAYED, 60_000)

    assert 7 * ONE * 999 // 1000 <= popularity.running[0] <= 7 * ONE


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ((250, 250, 250, 250), False),
        # Shares count, not tokens.
        ((100, 100, 100, 100), False),
        # One of four by more than 10 %: the others lose 5 % each.
        ((288, 237, 237, 238), True),
        # 10 % exactly is no change.
        ((275, 225, 250, 250), False),
        ((276, 225, 249, 250), True),
        ((500, 500, 0, 0), True),
    ],
)
def test_a_new_order_needs_a_tenth_at_a_quarter_of_the_experts(
    after: tuple[int, ...], expected: bool
) -> None:
    assert must_reorder((250, 250, 250, 250), after, (0, 0, 0, 0)) is expected


def test_fewer_than_a_quarter_do_not_reorder() -> None:
    before, layers = (1000,) * 8, (0,) * 8
    one = (1120, *(983,) * 7)
    two = (1150, 1150, *(950,) * 6)

    assert not must_reorder(before, one, layers)
    assert must_reorder(before, two, layers)


def test_layers_are_compared_by_themselves() -> None:
    assert not must_reorder((1, 1, 1), (5, 5, 1), (0, 0, 1))
    assert must_reorder((1, 1, 1), (5, 5, 1), (0, 0, 0))


def test_a_change_is_told_as_fractions_tell_it() -> None:
    rng = random.Random(3)
    told = set()
    for _ in range(2000):
        layers = sorted(rng.randint(0, 2) for _ in range(rng.randint(1, 8)))
        before = [rng.choice((0, rng.randint(0, 40))) for _ in layers]
        after = [max(0, score + rng.randint(-4, 4)) for score in before]
        if rng.random() < 0.2:
            after = [0 for _ in after]

        def shares(scores: list[int], layers: list[int] = layers) -> list[Fraction]:
            totals = [sum(s for s, l in zip(scores, layers, strict=True) if l == k) for k in layers]
            return [Fraction(s, total or 1) for s, total in zip(scores, totals, strict=True)]

        pairs = list(zip(shares(before), shares(after), strict=True))
        changed = sum(abs(new - old) > old / 10 for old, new in pairs)
        expected = 4 * changed >= len(layers) and changed > 0
        told.add(expected)
        assert must_reorder(before, after, layers) is expected
    assert told == {True, False}


def test_nobody_changed_is_no_reason_whatever_the_thresholds() -> None:
    assert not must_reorder((), (), ())
    assert not must_reorder((0,), (0,), (0,), 0, 0)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match="decay: is 65537"):
        note_step(Popularity(), (), Ordering.TIME_DECAYED, ONE + 1)
    with pytest.raises(InvalidSpecError, match="counts: are of 1 experts, must be of 2"):
        note_step(Popularity(running=(1, 2)), (1,), Ordering.POPULARITY)


def skipped(order: list[str], tokens: dict[str, int], length: int) -> int:
    """Weight gradients that a boundary replay of a window leaves out, in tokens.

    In step i of the window the units of later instalments are frozen.
    """
    prices = [UnitPrice(name=name, full_bytes=12, compute_bytes=2) for name in order]
    instalments = plan_instalments(prices, length)
    return sum(
        tokens[name]
        for number in range(length - 1)
        for later in instalments[number + 1 :]
        for name in later.full
    )


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 2.0])
def test_the_order_by_popularity_spares_most_weight_gradients_of_a_skewed_router(
    skew: float,
) -> None:
    """The n-th of 16 experts has a share of 1 / n to the power of the skew (Zipf)."""
    rng = random.Random(5)
    shares = [1 / number**skew for number in range(1, 17)]
    counts = [round(4096 * share / sum(shares)) for share in rng.sample(shares, len(shares))]
    units = [unit(0, f"e{number}") for number in range(16)]
    tokens = {u.name: count for u, count in zip(units, counts, strict=True)}
    order = [u.name for u in order_units(units, Ordering.POPULARITY, tokens)]

    best, worst = (skipped(some, tokens, 4) for some in (order, order[::-1]))
    for _ in range(50):
        assert worst <= skipped(rng.sample(order, len(order)), tokens, 4) <= best
    # Of three replayed steps, before which 3, 7 and 11 of the 16 are there: without a skew 27 / 48.
    expected = {0.0: (0.56, 0.56), 0.5: (0.69, 0.42), 1.0: (0.82, 0.27), 2.0: (0.96, 0.07)}
    assert (best / sum(tokens.values()) / 3, worst / sum(tokens.values()) / 3) == pytest.approx(
        expected[skew], abs=0.01
    )
