"""How a cell keeps types: leading runs are merged, everything else stays single."""

import random

from mainstay_core.planning.partials import covers, grow, grow_all
from mainstay_core.wire.plan import Partial


def run(first: int, last: int, lane: int = 0) -> Partial:
    return Partial(lane=lane, first=first, last=last)


def test_a_lanes_first_type_starts_a_run_and_the_next_extends_it() -> None:
    assert grow((), 0, 4) == run(0, 0)
    assert grow((run(0, 0),), 1, 4) == run(0, 1)
    assert grow((run(0, 1),), 2, 4) == run(0, 2)


def test_a_type_beyond_a_gap_stays_alone() -> None:
    assert grow((run(0, 0),), 2, 4) == run(2, 2)
    assert grow((), 3, 4) == run(3, 3)


def test_a_single_type_is_never_extended() -> None:
    assert grow((run(1, 1),), 2, 4) == run(2, 2)


def test_a_run_of_another_lane_is_not_extended_across_the_border() -> None:
    assert grow((run(0, 3),), 4, 4) == run(4, 4, lane=1)


def test_any_lanes_leading_run_is_merged_not_only_the_own_ones() -> None:
    held = grow_all((), [4, 5, 0, 1, 6], 4)

    assert held == (run(0, 1), run(4, 6, lane=1))


def test_the_extended_run_replaces_the_shorter_one() -> None:
    assert grow_all((run(0, 0),), [1, 2], 4) == (run(0, 2),)


def test_a_type_computed_again_although_a_run_has_it_is_kept_beside_the_run() -> None:
    assert grow_all((run(0, 2),), [1], 4) == (run(0, 2), run(1, 1))


def test_covers_is_inclusive_on_both_ends() -> None:
    assert [covers(run(2, 4), t) for t in range(1, 6)] == [False, True, True, True, False]


def test_whatever_the_order_every_computed_type_is_covered_and_partials_are_well_formed() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        shards_per_lane = rng.randint(1, 4)
        num_types = shards_per_lane * rng.randint(1, 3)
        todo = rng.sample(range(num_types), rng.randint(0, num_types))
        held = grow_all((), todo, shards_per_lane)

        for partial in held:
            first = partial.lane * shards_per_lane
            assert partial.first == first or partial.first == partial.last
            assert first <= partial.first <= partial.last < first + shards_per_lane
        counted = [t for p in held for t in range(p.first, p.last + 1)]
        assert sorted(counted) == sorted(todo)


def test_an_interrupted_list_continues_to_the_same_partials() -> None:
    rng = random.Random(2)
    for _ in range(500):
        todo = rng.sample(range(8), 8)
        cut = rng.randint(0, 8)

        assert grow_all(grow_all((), todo[:cut], 4), todo[cut:], 4) == grow_all((), todo, 4)
