"""Reordering: equal to a brute force on thousands of small cases, and its claims one by one."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter

import pytest

from mainstay_core.base.errors import InfeasiblePlanError, InvalidSpecError
from mainstay_core.planning.assignment import plan_reordering
from mainstay_core.planning.placement import plan_placement

Hosts = tuple[tuple[int, ...], ...]
Score = tuple[int, int, int, int]


def score(
    suppliers: tuple[int, ...], hosts: Hosts, current: tuple[int, ...], shards_per_lane: int
) -> Score:
    """The four criteria of the docstring, most important first."""
    return (
        max(Counter(suppliers).values()),
        sum(r != before for r, before in zip(suppliers, current, strict=True)),
        sum(r not in hosts[t] for t, r in enumerate(suppliers)),
        sum(
            shards_per_lane - t % shards_per_lane
            for t, r in enumerate(suppliers)
            if r != t // shards_per_lane
        ),
    )


def best_by_brute_force(
    hosts: Hosts, living: list[int], current: tuple[int, ...], shards_per_lane: int, strict: bool
) -> Score | None:
    choices = [[r for r in living if not strict or r in lanes] for lanes in hosts]
    return min(
        (score(plan, hosts, current, shards_per_lane) for plan in itertools.product(*choices)),
        default=None,
    )


def small_case(rng: random.Random) -> tuple[Hosts, list[int], tuple[int, ...], int, int]:
    lanes, shards_per_lane = rng.choice([(2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2), (2, 3)])
    num_types = lanes * shards_per_lane
    if rng.random() < 0.5:
        redundancy = rng.randint(1, lanes)
        hosts = plan_placement(lanes, shards_per_lane, redundancy).hosts
    else:
        hosts = tuple(
            tuple(rng.sample(range(lanes), rng.randint(1, lanes))) for _ in range(num_types)
        )
    living = sorted(rng.sample(range(lanes), min(lanes, rng.choice([1, 2, 2, 3, 3, 3, 4]))))
    current = tuple(rng.randrange(lanes) for _ in range(num_types))
    return hosts, living, current, shards_per_lane, lanes


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_plan_is_as_good_as_the_best_of_all_assignments(seed: int, strict: bool) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        hosts, living, current, shards_per_lane, lanes = small_case(rng)
        best = best_by_brute_force(hosts, living, current, shards_per_lane, strict)
        if best is None:
            with pytest.raises(InfeasiblePlanError, match="no host lives"):
                plan_reordering(hosts, living, current, shards_per_lane, lanes, strict_hosts=True)
            continue
        plan = plan_reordering(hosts, living, current, shards_per_lane, lanes, strict_hosts=strict)
        assert score(plan.suppliers, hosts, current, shards_per_lane) == best
        assert set(plan.suppliers) <= set(living)
        assert plan.depth == best[0]
        assert len(plan.moved) == best[1]
        assert len(plan.rehosted) == best[2]


@pytest.mark.parametrize(
    ("lanes", "shards_per_lane", "redundancy"), [(16, 1, 4), (16, 16, 5), (64, 4, 7)]
)
def test_plans_stay_sound_through_a_history_of_losses_and_rejoins(
    lanes: int, shards_per_lane: int, redundancy: int
) -> None:
    rng = random.Random(7)
    hosts = plan_placement(lanes, shards_per_lane, redundancy).hosts
    num_types = lanes * shards_per_lane
    living = set(range(lanes))
    suppliers = tuple(t // shards_per_lane for t in range(num_types))
    for _ in range(60):
        dead = sorted(set(range(lanes)) - living)
        if dead and (len(living) == 1 or rng.random() < 0.4):
            living.add(rng.choice(dead))
        else:
            living.remove(rng.choice(sorted(living)))
        plan = plan_reordering(hosts, living, suppliers, shards_per_lane, lanes)
        loads = Counter(suppliers)
        depth = math.ceil(num_types / len(living))
        assert plan.depth == depth == max(Counter(plan.suppliers).values())
        kept = sum(min(loads[replica], depth) for replica in living)
        assert len(plan.moved) == num_types - kept
        assert set(plan.patched) == {t for t, r in enumerate(suppliers) if r not in living}
        assert plan == plan_reordering(hosts, living, suppliers, shards_per_lane, lanes)
        suppliers = plan.suppliers


def test_nothing_moves_while_all_live() -> None:
    plan = plan_reordering(plan_placement(4, 4).hosts, range(4), None, 4, 4)
    assert plan.suppliers == tuple(t // 4 for t in range(16))
    assert (plan.depth, plan.moved, plan.patched, plan.rehosted) == (4, (), (), ())


def test_one_lost_lane_of_64_doubles_the_stack_at_one_type_a_lane_and_not_at_16() -> None:
    for shards_per_lane, depth in ((1, 2), (16, 17)):
        hosts = plan_placement(64, shards_per_lane).hosts
        living = set(range(64)) - {5}
        plan = plan_reordering(hosts, living, None, shards_per_lane, 64)
        lost = tuple(range(5 * shards_per_lane, 6 * shards_per_lane))
        assert plan.depth == depth
        assert plan.moved == plan.patched == lost
        assert plan.rehosted == ()


def test_a_lane_that_comes_back_gets_its_first_types() -> None:
    # Lanes 2 and 3 were served by 0 and 1. Only two types of each must move to reach depth 6.
    hosts = plan_placement(4, 4, 4).hosts
    current = (0,) * 4 + (1,) * 4 + (0, 1) * 4
    plan = plan_reordering(hosts, {0, 1, 2}, current, 4, 4)
    assert plan.depth == 6
    assert plan.moved == (8, 9, 10, 11)
    assert plan.suppliers[8:12] == (2, 2, 2, 2)


def test_of_a_lane_partly_brought_home_the_leading_run_comes() -> None:
    hosts = plan_placement(3, 3, 3).hosts
    current = (0, 0, 0, 1, 1, 1, 0, 1, 1)
    plan = plan_reordering(hosts, {0, 1, 2}, current, 3, 3)
    assert plan.suppliers == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    # Lane 1 is lost as well: depth 5 lets replica 0 keep two of lane 2's types, its last ones.
    current = (0, 0, 0, 0, 2, 2, 0, 0, 0)
    plan = plan_reordering(hosts, {0, 2}, current, 3, 3)
    assert plan.depth == 5
    assert plan.moved == (6, 7)


def test_types_without_a_living_host_are_rehosted_and_reported() -> None:
    hosts = plan_placement(8, 1, 2).hosts
    plan = plan_reordering(hosts, set(range(8)) - {3, 4}, None, 1, 8)
    assert plan.without_host == (3,)
    assert set(plan.without_host) <= set(plan.rehosted)
    assert "outside of their hosts" in plan.reason
    with pytest.raises(InfeasiblePlanError, match="type"):
        plan_reordering(hosts, set(range(8)) - {3, 4}, None, 1, 8, strict_hosts=True)


def test_a_shallow_stack_wins_over_hosts_unless_they_are_strict() -> None:
    # Of the living only replica 0 hosts types 0, 1 and 3; replica 2 would wait for it.
    hosts = ((0, 1), (1, 0), (2, 0), (3, 0))
    free = plan_reordering(hosts, {0, 2}, None, 1, 4)
    strict = plan_reordering(hosts, {0, 2}, None, 1, 4, strict_hosts=True)
    assert (free.depth, len(free.rehosted)) == (2, 1)
    assert (strict.depth, strict.rehosted) == (3, ())


def test_moved_types_of_a_lost_lane_go_together_where_loads_allow() -> None:
    # Two of four lanes are lost: each survivor takes one lane whole, so two partials each.
    hosts = tuple((t // 4, *(r for r in range(4) if r != t // 4)) for t in range(16))
    plan = plan_reordering(hosts, {0, 1}, None, 4, 4)
    heirs = [set(plan.suppliers[8:12]), set(plan.suppliers[12:16])]
    assert sorted(heirs, key=min) == [{0}, {1}]


def test_failures_to_wipe_out_and_mean_stack_are_the_papers() -> None:
    # SPARe, table 4 (N = 200, r = 9): 106 failures on average, mean stack 2.06.
    rng = random.Random(11)
    hosts = plan_placement(200, 1, 9).hosts
    num_failures, depths = [], []
    for _ in range(40):
        order = rng.sample(range(200), 200)
        suppliers: tuple[int, ...] | None = None
        for k in range(1, 200):
            try:
                plan = plan_reordering(hosts, order[k:], suppliers, 1, 200, strict_hosts=True)
            except InfeasiblePlanError:
                num_failures.append(k)
                break
            suppliers = plan.suppliers
            depths.append(plan.depth)
    assert statistics.mean(num_failures) == pytest.approx(106, rel=0.05)
    assert statistics.mean(depths) == pytest.approx(2.06, rel=0.05)


def test_arguments_that_do_not_fit_are_named() -> None:
    hosts = plan_placement(4, 1).hosts
    with pytest.raises(InfeasiblePlanError, match="no replica lives"):
        plan_reordering(hosts, (), None, 1, 4)
    with pytest.raises(InvalidSpecError, match="living_replicas"):
        plan_reordering(hosts, (4,), None, 1, 4)
    with pytest.raises(InvalidSpecError, match="hosts"):
        plan_reordering(hosts[:3], (0,), None, 1, 4)
    with pytest.raises(InvalidSpecError, match="current"):
        plan_reordering(hosts, (0,), (0,), 1, 4)
