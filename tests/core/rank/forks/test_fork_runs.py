"""Whole runs in which stages are lost and made anew, with faults drawn from seeds.

A failing seed is repeated with ``ForkedTrainers(seed, shape).run()``.
"""

from __future__ import annotations

import pytest
from tests.worlds.forked_trainers import ForkedTrainers
from tests.worlds.trainers import Shape

SEEDS_PER_BATCH = 50
SHAPES = {
    "one replica": Shape(stages=4, replicas=1, shards_per_lane=2, spares=3, kills=3, steps=4),
    "two replicas": Shape(stages=3, replicas=2, spares=2, kills=4, exclusions=1, steps=3),
    "stops": Shape(stages=5, replicas=1, spares=3, kills=2, stops=2, resets=2, steps=3),
}


@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.chaos) for n in (1, 2))])
@pytest.mark.parametrize("name", list(SHAPES))
def test_every_run_ends_as_its_history_says(name: str, batch: int) -> None:
    happened: set[str] = set()
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        world = ForkedTrainers(seed, SHAPES[name])
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"ForkedTrainers({seed}, SHAPES[{name!r}]): {error}") from error
        happened |= world.happened

    assert {"fork", "fork again", "made", "make", "load"} <= happened
