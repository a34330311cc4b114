from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.job.stages import equal_blocks, stage_blocks, tell_unlike_twins, twins_of


def _brute_force(costs: list[float], stages: int) -> tuple[float, float, list[int]]:
    options = []
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        borders = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(borders)]
        options.append((max(sums), sum(s * s for s in sums), borders))
    return min(options)


def test_cuts_into_stages_equal_a_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(500):
        costs = [float(rng.randrange(0, 20)) for _ in range(rng.randrange(1, 9))]
        stages = rng.randrange(1, len(costs) + 1)
        ranges = stage_blocks(costs, stages)
        assert [i for r in ranges for i in r] == list(range(len(costs)))
        assert all(len(r) > 0 for r in ranges)
        sums = [sum(costs[i] for i in r) for r in ranges]
        assert (max(sums), sum(s * s for s in sums)) == _brute_force(costs, stages)[:2]


def test_more_stages_than_blocks_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="stages is 4 but the model has 3 blocks"):
        stage_blocks([1.0, 1.0, 1.0], 4)
    with pytest.raises(ValueError, match="at least 1"):
        stage_blocks([1.0], 0)


def test_an_equal_cut_gives_numbers_of_layers_that_differ_by_one_at_most() -> None:
    for stages in range(1, 9):
        for num_layers in range(stages, 4 * stages + 1):
            cuts = equal_blocks(num_layers + 2, stages)
            assert [i for cut in cuts for i in cut] == list(range(num_layers + 2))
            counts = [sum(1 <= i <= num_layers for i in cut) for cut in cuts]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == num_layers
            if stages > 1:
                assert is_swappable(counts) == could_be_swappable(num_layers, stages)


def is_swappable(counts: list[int]) -> bool:
    return all(counts[end] == counts[twin] for end, twin in twins_of(len(counts)))


def could_be_swappable(num_layers: int, stages: int) -> bool:
    """Whether any numbers of layers that differ by one at most are equal in twins."""
    least, more = divmod(num_layers, stages)
    return any(
        is_swappable([least + (stage in larger) for stage in range(stages)])
        for larger in itertools.combinations(range(stages), more)
    )


def test_an_equal_cut_of_fewer_layers_than_stages_leaves_no_stage_empty() -> None:
    for stages in range(1, 9):
        for num_blocks in range(stages, stages + 2):
            cuts = equal_blocks(num_blocks, stages)
            assert [i for cut in cuts for i in cut] == list(range(num_blocks))
            assert all(len(cut) for cut in cuts)
    with pytest.raises(ValueError, match="stages is 4 but the model has 3 blocks"):
        equal_blocks(3, 4)


def test_twins_are_alike_if_they_have_equal_layers_of_each_kind() -> None:
    def told(kinds: str, stages: int) -> str:
        return tell_unlike_twins(kinds, equal_blocks(len(kinds), stages))

    assert told("eaaaah", 2) == ""
    assert told("eabbah", 2) == ""
    assert told("eaabbh", 2).startswith("stage 0 and its twin, stage 1, have layers of other kinds")
    assert told("eaaah", 2).endswith("2 stages can swap with 2 or 4 layers of one kind")
    assert told("eaaaah", 3).endswith("3 stages can swap with 3 or 6 layers of one kind")
    assert told("eh", 2).startswith("stage 0 has 0 layers and its twin")
    assert twins_of(1) == ()
