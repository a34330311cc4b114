from __future__ import annotations

from dataclasses import replace

import pytest

from mainstay_core.job.phase import JobPhase
from mainstay_core.sim import World, draw
from mainstay_core.sim.engine import Violation
from mainstay_core.sim.services.wishes import LOOK_S
from mainstay_core.sim.store import NODE

API = "api0"


@pytest.fixture
def world() -> World:
    """A job that runs, writes checkpoints, has one api, and meets no faults."""
    scenario = draw(0, kinds=())
    shape = replace(scenario.config.shape, checkpoint_every_steps=1, steps=12)
    config = replace(scenario.config, shape=shape, checkpoint_dir="checkpoints")
    world = World(replace(scenario, apis=1, config=config))
    while world.store.last.phase is not JobPhase.RUNNING:
        assert world.engine.step()
    return world


def _go_on_for(world: World, seconds: float) -> None:
    until_s = world.engine.now_s + seconds
    while world.engine.now_s < until_s:
        assert world.engine.step()


def _suspends(world: World) -> bool:
    assert world.store.state is not None
    return world.store.state.suspend


def test_a_suspension_that_is_withdrawn_unheard_but_carried_out_is_told_to_be_over(
    world: World,
) -> None:
    world.wishes.begin_suspension()
    while not _suspends(world):
        assert world.engine.step()
    # The store has it; the api never learns that, and says that the store is away.
    away = ((API, NODE), (NODE, API))
    world.network.cut(away, reset=False)
    _go_on_for(world, LOOK_S / 2)
    world.wishes.end_suspension()
    world.network.mend(away)
    # The api finds the store again, and the owner of the job the api: each after a pause.
    until_s = world.engine.now_s + 20 * LOOK_S
    while _suspends(world):
        assert world.engine.step()
        assert world.engine.now_s < until_s


def test_a_wish_that_was_heard_and_is_forgotten_is_found(world: World) -> None:
    world.wishes.begin_suspension()
    _go_on_for(world, LOOK_S)  # nothing is under way by then that the store would take yet
    job = world.store.job
    assert job is not None
    assert job.state.suspend
    world.store.job = replace(job, state=replace(job.state, suspend=False))
    with pytest.raises(Violation, match="the wish to suspend the job was heard and is forgotten"):
        _go_on_for(world, 3 * LOOK_S)
