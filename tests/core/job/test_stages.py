from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.job.stages import stage_blocks


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
