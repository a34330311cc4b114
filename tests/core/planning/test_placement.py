"""The placement's claims: the rulers are rulers, and types share few hosts."""

from __future__ import annotations

import itertools

import pytest

from mainstay_core.base.bounds import MAX_HOSTS
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.planning.placement import GOLOMB_RULERS, plan_placement, plan_redundancy

PUBLISHED_LENGTHS = (
    *(1, 3, 6, 11, 17, 25, 34, 44, 55, 72, 85, 106, 127, 151, 177, 199, 216, 246, 283, 333),
    *(356, 372, 425, 480, 492, 553, 585),
)


def max_shared_by_brute_force(hosts: tuple[tuple[int, ...], ...]) -> int:
    return max((len(set(a) & set(b)) for a, b in itertools.combinations(hosts, 2)), default=0)


def test_rulers_of_2_to_28_marks_have_distinct_differences_and_published_lengths() -> None:
    assert list(GOLOMB_RULERS) == list(range(2, MAX_HOSTS + 1))
    assert tuple(ruler[-1] for ruler in GOLOMB_RULERS.values()) == PUBLISHED_LENGTHS
    for marks, ruler in GOLOMB_RULERS.items():
        differences = [b - a for a, b in itertools.combinations(ruler, 2)]
        assert len(ruler) == marks
        assert ruler[0] == 0
        assert list(ruler) == sorted(ruler)
        assert len(set(differences)) == len(differences)


@pytest.mark.parametrize(("lanes", "largest"), [(200, 12), (600, 20), (1000, 26)])
def test_largest_ruler_is_the_last_row_of_the_papers_tables(lanes: int, largest: int) -> None:
    assert f"length {GOLOMB_RULERS[largest][-1]}" in plan_placement(lanes, 1, largest).reason
    assert "searched" in plan_placement(lanes, 1, largest + 1).reason


@pytest.mark.parametrize(("lanes", "redundancy"), [(3, 2), (13, 4), (64, 7), (89, 9), (200, 12)])
def test_types_share_at_most_one_host_where_the_ruler_fits(lanes: int, redundancy: int) -> None:
    placement = plan_placement(lanes, 1, redundancy)
    assert placement.max_shared_hosts == 1
    assert max_shared_by_brute_force(placement.hosts) == 1


@pytest.mark.parametrize("lanes", range(1, 11))
def test_small_sets_share_as_few_hosts_as_any_cyclic_set_can(lanes: int) -> None:
    for redundancy in range(1, lanes + 1):
        placement = plan_placement(lanes, 1, redundancy)
        best = min(
            max_shared_by_brute_force(
                tuple(tuple((lane + a) % lanes for a in (0, *rest)) for lane in range(lanes))
            )
            for rest in itertools.combinations(range(1, lanes), redundancy - 1)
        )
        assert placement.max_shared_hosts == best
        assert max_shared_by_brute_force(placement.hosts) == best


@pytest.mark.parametrize("shards_per_lane", [1, 2, 4, 16])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8, 16, 64])
def test_home_is_the_first_of_distinct_hosts(lanes: int, shards_per_lane: int) -> None:
    placement = plan_placement(lanes, shards_per_lane)
    assert len(placement.hosts) == lanes * shards_per_lane
    assert placement == plan_placement(lanes, shards_per_lane)
    for shard_type, hosts in enumerate(placement.hosts):
        home, offsets = divmod(shard_type, shards_per_lane)
        assert hosts == tuple((home + a) % lanes for a in placement.offsets[offsets])
        assert hosts[0] == home
        assert len(set(hosts)) == placement.redundancy
        assert all(0 <= host < lanes for host in hosts)
    assert placement.max_shared_hosts == max_shared_by_brute_force(placement.hosts)


@pytest.mark.parametrize("lanes", [16, 64])
def test_types_of_a_lane_spread_over_more_hosts_than_one_set_would(lanes: int) -> None:
    placement = plan_placement(lanes, 16)
    heirs = {host for hosts in placement.hosts[:16] for host in hosts} - {0}
    assert len(heirs) > 2 * (placement.redundancy - 1)
    same_lane = max_shared_by_brute_force(placement.hosts[:16])
    assert same_lane < placement.redundancy


@pytest.mark.parametrize(
    ("lanes", "best"), [(1, 1), (2, 2), (4, 3), (16, 5), (200, 8), (600, 10), (1000, 11)]
)
def test_auto_redundancy_is_the_papers_best(lanes: int, best: int) -> None:
    assert plan_redundancy(lanes) == best
    assert plan_placement(lanes, 1).redundancy == best


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 1, None), "spec.training.lanes"),
        ((4, 0, None), "spec.training.shardsPerLane"),
        ((4, 1, 5), "spec.redundancy"),
        ((4, 1, 0), "spec.redundancy"),
        ((1000, 1, 29), "spec.redundancy"),
    ],
)
def test_impossible_arguments_name_their_field(
    arguments: tuple[int, int, int | None], field: str
) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        plan_placement(*arguments)
    assert caught.value.field == field
