"""Windows: the printed algorithm as it is printed, the exact one equal to a brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.windows import (
    PrintedWindow,
    Window,
    find_window_size,
    generate_schedule,
    plan_instalments,
    plan_length,
)

Order = list[UnitPrice]


def prices_of(*sizes: tuple[int, int]) -> Order:
    return [
        UnitPrice(name=f"u{number}", full_bytes=full, compute_bytes=compute)
        for number, (full, compute) in enumerate(sizes)
    ]


def largest_of(order: Order, cuts: tuple[int, ...]) -> int:
    """The size of the dearest instalment of a cut, summed unit by unit."""
    edges = [0, *cuts, len(order)]
    return max(
        sum(price.full_bytes for price in order[start:stop])
        + sum(price.compute_bytes for price in order[stop:])
        for start, stop in itertools.pairwise(edges)
    )


def least_largest(order: Order, length: int) -> int:
    """The same, the least over all cuts in exactly ``length`` runs; some of them may be empty."""
    places = range(len(order) + 1)
    return min(
        largest_of(order, cuts)
        for cuts in itertools.combinations_with_replacement(places, length - 1)
    )


def least_length(order: Order, budget: int) -> int:
    """The least length that fits; if none does, the least of those whose dearest is cheapest."""
    by_length = {length: least_largest(order, length) for length in range(1, len(order) + 1)}
    goal = budget if min(by_length.values()) <= budget else min(by_length.values())
    return min(length for length, largest in by_length.items() if largest <= goal)


def random_order(rng: random.Random, most: int = 6) -> Order:
    kind = rng.choice(("equal", "any", "no compute"))
    sizes = []
    for _ in range(rng.randint(1, most)):
        full = 12 if kind == "equal" else rng.randint(0, 20)
        compute = {"equal": 2, "any": rng.randint(0, full), "no compute": 0}[kind]
        sizes.append((full, compute))
    return prices_of(*sizes)


@pytest.mark.parametrize("seed", range(8))
def test_length_is_the_least_over_all_contiguous_cuts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        shares = [random_order(rng) for _ in range(rng.randint(1, 3))]
        budget = rng.randint(0, 60)
        plan = plan_length(shares, budget)

        assert plan.length == max(least_length(share, budget) for share in shares)
        dearest = max(least_largest(share, plan.length) for share in shares)
        assert plan.largest_bytes == dearest
        assert plan.fits == (dearest <= budget)


@pytest.mark.parametrize("seed", range(8))
def test_every_unit_is_active_once_per_window_and_frozen_until_then(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        order = random_order(rng)
        length = rng.randint(1, 7)
        instalments = plan_instalments(order, length)

        assert [instalment.number for instalment in instalments] == list(range(length))
        active = [name for instalment in instalments for name in instalment.full]
        assert active == [price.name for price in order]
        to_come = list(order)
        for instalment in instalments:
            to_come = to_come[len(instalment.full) :]
            assert instalment.compute == tuple(p.name for p in to_come if p.compute_bytes)
            full = {price.name: price.full_bytes for price in order}
            assert instalment.size_bytes == sum(full[name] for name in instalment.full) + sum(
                price.compute_bytes for price in to_come
            )
        assert max(i.size_bytes for i in instalments) == least_largest(order, length)


def test_nothing_to_copy_is_a_window_of_one_step() -> None:
    assert plan_length([[], []], 10).length == 1
    assert plan_length([], 10).length == 1
    assert plan_instalments([], 2)[1].full == ()


def test_one_unit_may_be_copied_alone_where_the_printed_loop_stops_at_two() -> None:
    order = prices_of(*[(12, 2)] * 4)

    plan = plan_length([order], 18)

    assert (plan.length, plan.fits) == (4, True)
    printed = find_window_size(
        4,
        step_s=18,
        compute_bytes=2,
        master_bytes=4,
        optimizer_bytes=8,
        bandwidth_bytes_per_s=1,
    )
    assert printed == PrintedWindow(length=2, num_active=2)


def test_a_window_that_fits_nowhere_says_so() -> None:
    plan = plan_length([prices_of((50, 0), (10, 0), (10, 0))], 40)

    assert (plan.length, plan.fits, plan.largest_bytes) == (2, False, 50)
    assert plan.reason == (
        "a window of 2 steps: its dearest instalment has 50 B, a step copies 40 B; no cut fits, so "
        "steps wait for copies"
    )


def test_an_author_that_does_not_fit_does_not_lengthen_the_windows_of_others() -> None:
    cannot = prices_of((50, 0))
    can = prices_of(*[(10, 0)] * 8)

    assert plan_length([cannot, can], 40).length == 2


def test_the_papers_figure_of_three_steps_has_its_sizes() -> None:
    """MoEvement, figure 6: 32, 28 and 24 bytes for a parameter of each of six units, of 72."""
    window = find_window_size(
        6,
        step_s=32,
        compute_bytes=2,
        master_bytes=4,
        optimizer_bytes=8,
        bandwidth_bytes_per_s=1,
    )
    order = prices_of(*[(12, 2)] * 6)

    assert window == PrintedWindow(length=3, num_active=2)
    sizes = [
        12 * len(active) + 2 * len(frozen) for active, frozen in generate_schedule(order, window)
    ]
    assert sizes == [32, 28, 24]
    assert 1 - sizes[0] / 72 == pytest.approx(0.55, abs=0.006)
    assert plan_length([order], 32).length == 3
    assert [i.size_bytes for i in plan_instalments(order, 3)] == [32, 28, 24]


@pytest.mark.parametrize(
    ("compute", "master", "optimizer", "step_s", "length"),
    [
        (2, 2, 4, 2.99, 3),
        (1, 4, 8, 2.3, 6),
        (1, 2, 8, 2.1, 6),
        (1, 2, 3, 1.9, 3),
        (1, 1, 3, 1.7, 3),
    ],
)
def test_one_rate_gives_the_papers_windows_of_other_precisions_but_one(
    compute: int, master: int, optimizer: int, step_s: float, length: int
) -> None:
    """MoEvement, table 7, prints 3, 6, 4, 3 and 3; no rate yields the 4 beside the others.

    The step times are its overheads of MoC in seconds over those in per cent. The rate is in bytes
    per parameter and second.
    """
    printed = find_window_size(
        1000,
        step_s=step_s,
        compute_bytes=compute / 1000,
        master_bytes=master / 1000,
        optimizer_bytes=optimizer / 1000,
        bandwidth_bytes_per_s=1.28,
    )

    assert printed.length == length


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_length_is_never_longer_than_the_printed_one_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        num_units = rng.randint(1, 30)
        compute, master, optimizer = rng.randint(0, 4), rng.randint(4, 8), rng.randint(0, 8)
        budget = rng.randint(1, 400)
        printed = find_window_size(
            num_units,
            step_s=budget,
            compute_bytes=compute,
            master_bytes=master,
            optimizer_bytes=optimizer,
            bandwidth_bytes_per_s=1,
        )
        order = prices_of(*[(master + optimizer, compute)] * num_units)
        plan = plan_length([order], budget)
        schedule = generate_schedule(order, printed)
        assert [unit for active, _ in schedule for unit in active] == order
        first = schedule[0]
        if (master + optimizer) * len(first[0]) + compute * len(first[1]) <= budget:
            assert plan.fits
            assert plan.length <= printed.length


def test_a_window_knows_the_version_of_each_instalment() -> None:
    window = Window(first=10, length=3)

    assert [window.number_of(version) for version in range(9, 14)] == [None, 0, 1, 2, None]
    assert [window.version_of(number) for number in range(3)] == [10, 11, 12]
    assert window.last == 12


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.snapshots\.window: is 0"):
        plan_instalments([], 0)
    with pytest.raises(InvalidSpecError, match="lists the unit u0 twice"):
        plan_instalments([*prices_of((1, 1)), *prices_of((1, 1))], 2)
    sizes = {"step_s": 1.0, "compute_bytes": 1, "master_bytes": 1, "optimizer_bytes": 1}
    with pytest.raises(InvalidSpecError, match="num_units: is 0"):
        find_window_size(0, bandwidth_bytes_per_s=1, **sizes)
    with pytest.raises(InvalidSpecError, match="bandwidth_bytes_per_s: is 0"):
        find_window_size(1, bandwidth_bytes_per_s=0, **sizes)
