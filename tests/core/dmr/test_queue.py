"""The queue: figure 10, and the optimum of small instances beside both policies."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from mainstay_core.dmr.fits import best_fit
from mainstay_core.dmr.plan import Policy
from mainstay_core.dmr.queue import Assignment, Item, Wait, can_take, exposed_s, plan_queue

Instance = tuple[list[Item], list[Wait]]


def item(place: int, seconds: float, size: int = 1, communication: float = 0.0) -> Item:
    return Item(place=place, naive_s=seconds, later_s=seconds + communication, size_bytes=size)


def fits(items: list[Item], waits: list[Wait], assignment: Assignment) -> bool:
    """Whether the bytes that wait are within the limit whenever a window opens."""
    return all(
        sum(
            item.size_bytes
            for item, taken in zip(items, assignment, strict=True)
            if taken is not None and item.place < wait.after and taken >= number
        )
        <= wait.limit_bytes
        for number, wait in enumerate(waits)
    )


def optimum(items: list[Item], waits: list[Wait]) -> float:
    """The least that any assignment exposes, overruns allowed."""
    options = [
        [None, *(number for number, wait in enumerate(waits) if can_take(wait, item))]
        for item in items
    ]
    return min(
        exposed_s(items, waits, list(assignment))
        for assignment in itertools.product(*options)
        if fits(items, waits, list(assignment))
    )


def draw(seed: int) -> Instance:
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    items = [item(place, float(rng.randint(1, 12)), rng.randint(1, 6)) for place in range(count)]
    budget = rng.randint(3, 14)
    waits = [
        Wait(after=rng.randint(1, count), free_s=float(rng.randint(2, 16)), limit_bytes=budget)
        for _ in range(rng.randint(1, 3))
    ]
    # Some windows have less headroom than the budget.
    waits = [
        replace(wait, limit_bytes=min(budget, rng.randint(1, 20)) if rng.random() < 0.5 else budget)
        for wait in waits
    ]
    return items, sorted(waits, key=lambda wait: wait.after)


def test_figure_10() -> None:
    # Memory for three operators. B fills W1. Then C and E are too many, and the shortest.
    items = [item(*pair) for pair in enumerate((4.0, 3.0, 1.0, 3.0, 1.5, 5.0))]
    waits = [
        Wait(after=3, free_s=3.5, limit_bytes=3),
        Wait(after=6, free_s=7.0, limit_bytes=3),
    ]

    a, b, c, d, e, f = plan_queue(items, waits, Policy.PAPER)

    assert (a, b, c, d, e) == (1, 0, None, 1, None)
    assert f is None, "it waits for a third window, which does not come"
    ours = plan_queue(items, waits, Policy.OWN)
    assert exposed_s(items, waits, ours) < exposed_s(items, waits, [a, b, c, d, e, f])


def distances(seeds: range) -> dict[Policy, list[float]]:
    """Return how far each policy is from the optimum, as a share of all checker time."""
    found: dict[Policy, list[float]] = {policy: [] for policy in Policy}
    for seed in seeds:
        items, waits = draw(seed)
        least, together = optimum(items, waits), sum(item.naive_s for item in items)
        for policy in Policy:
            assignment = plan_queue(items, waits, policy)
            assert fits(items, waits, assignment)
            assert all(
                taken is None or can_take(waits[taken], item)
                for item, taken in zip(items, assignment, strict=True)
            )
            found[policy].append((exposed_s(items, waits, assignment) - least) / together)
    return found


def check_distances(seeds: range) -> None:
    found = distances(seeds)
    mean = {policy: sum(values) / len(values) for policy, values in found.items()}

    assert min(found[Policy.OWN]) >= 0
    assert mean[Policy.OWN] <= 0.02
    assert max(found[Policy.OWN]) <= 0.30
    assert mean[Policy.PAPER] > 0.08


def test_ours_is_near_the_optimum_with_overrun_and_the_papers_rules_are_not() -> None:
    check_distances(range(1000))


@pytest.mark.chaos
def test_ours_is_near_the_optimum_in_many_instances() -> None:
    check_distances(range(1000, 11_000))


def test_without_memory_all_is_naive() -> None:
    items, waits = draw(0)
    none = [Wait(after=wait.after, free_s=99.0, limit_bytes=0) for wait in waits]

    for policy in Policy:
        assert plan_queue(items, none, policy) == [None] * len(items)


def test_a_check_that_communicates_waits_only_where_it_may() -> None:
    items = [item(0, 2.0, communication=1.0)]

    def plan(*, gathers: bool) -> Assignment:
        wait = Wait(after=1, free_s=3.0, limit_bytes=9, gathers=gathers)
        return plan_queue(items, [wait], Policy.OWN)

    assert plan(gathers=True) == [0]
    assert plan(gathers=False) == [None]


def test_an_overrun_is_taken_where_it_exposes_less_than_a_check_at_once() -> None:
    items = [item(0, 10.0)]
    waits = [Wait(after=1, free_s=9.0, limit_bytes=9)]

    assert plan_queue(items, waits, Policy.PAPER) == [None]
    assert plan_queue(items, waits, Policy.OWN) == [0]


def test_the_best_fit_is_the_best_of_all_subsets() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        seconds = [float(rng.randint(1, 20)) for _ in range(rng.randint(0, 9))]
        most_s = float(rng.randint(0, 60))
        sums = [
            sum(chosen)
            for size in range(len(seconds) + 1)
            for chosen in itertools.combinations(seconds, size)
        ]

        chosen = best_fit(seconds, most_s)

        assert len(set(chosen)) == len(chosen)
        assert sum(seconds[index] for index in chosen) == max(s for s in sums if s <= most_s)


def test_of_many_checks_the_best_fit_nearly_fills_the_window() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        seconds = [rng.uniform(0.5, 10.0) for _ in range(rng.randint(40, 200))]
        most_s = rng.uniform(20.0, 100.0)

        total = sum(seconds[index] for index in best_fit(seconds, most_s))

        assert 0.98 * most_s <= total <= most_s + 1e-9
    thirds = [1.0] * 3 + [5.0] * 20
    assert sum(thirds[index] for index in best_fit(thirds, 3.0)) == 3.0
