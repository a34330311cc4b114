from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods, make_config


@pytest.fixture
def new_world() -> Callable[..., PlayedPods]:
    """Makes a job, by degrees of its shape and settings."""
    return lambda **fields: PlayedPods(make_config(**fields))


@pytest.fixture
def start() -> Callable[..., PlayedPods]:
    """Makes a job that runs: all pods and ``spares`` more are up, the first plan is settled."""

    def make(spares: int = 0, **fields: Any) -> PlayedPods:
        world = PlayedPods(make_config(**fields))
        shape = world.state.shape
        slots = shape.ranks_per_pod
        for i in range(-(-shape.num_ranks // slots)):
            world.register(f"pod-{i}", slots)
            for slot in range(slots):
                world.up(f"pod-{i}", slot)
        world.settle(0)
        for i in range(spares):
            world.register(f"spare-{i}", slots)
            for slot in range(slots):
                world.up(f"spare-{i}", slot)
        assert world.state.phase == "running"
        return world

    return make
