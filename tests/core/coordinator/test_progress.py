"""First commits and ETTR: what counts, and that it counts once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import PlanReported, StepsCommitted, Tick
from mainstay_core.coordinator.progress import begin_progress, find_ettr
from mainstay_core.coordinator.state import MAX_STEP_SECONDS, CoordinatorState, median
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]


def commit(world: Any, step: int, at_s: float, step_s: float = 1.0) -> None:
    world.now_s = max(world.now_s, at_s)
    event = StepsCommitted(
        step=step, quorum=world.plan.quorum, committed_at_s=at_s, step_s=step_s, loss=2.5
    )
    world.send(event, after_s=0.0)


def test_before_the_first_commit_there_is_no_ettr(start: Start) -> None:
    world = start()
    assert find_ettr(world.state) is None
    commit(world, 0, world.state.started_at_s)
    assert find_ettr(world.state) is None, "no time has passed"


def test_ettr_is_first_commits_by_median_steps_over_the_time_since_the_first_plan(
    start: Start,
) -> None:
    """The first step warms up, one waits for a recovery; the twin counts with all of the ledger."""
    world = start(steps=10_000)
    began_s = world.state.started_at_s
    at_s, ledger = began_s, []
    for step in range(MAX_STEP_SECONDS):
        took_s = {0: 20.0, 7: 40.0}.get(step, 1.0 + step / 100)
        at_s += took_s
        ledger.append(took_s)
        commit(world, step, at_s, took_s)
        twin = min(1.0, len(ledger) * median(ledger) / (at_s - began_s))
        assert find_ettr(world.state) == pytest.approx(twin)


def test_between_two_commits_it_stays_and_at_one_it_moves_by_no_more_than_a_step(
    start: Start,
) -> None:
    world = start(steps=10_000)
    rng = random.Random(5)
    at_s = world.state.started_at_s
    for step in range(400):
        # Fewer replicas from the middle on: a step takes twice as long.
        took_s = (1.0 + (step > 200)) * rng.uniform(0.9, 1.1)
        at_s += took_s
        before, was = find_ettr(world.state), world.state
        commit(world, step, at_s, took_s)
        if step <= MAX_STEP_SECONDS:
            continue
        share = max(took_s, median(world.state.step_seconds)) / (at_s - was.started_at_s)
        assert abs(find_ettr(world.state) - before) <= share
        told = find_ettr(world.state)
        world.now_s += rng.uniform(0, 100.0)
        world.tick()
        assert find_ettr(world.state) == told
    assert 0.9 < find_ettr(world.state) <= 1.0


def test_a_step_that_is_done_again_counts_once(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    for step in range(6):
        commit(world, step, 10.0 + step)
    assert (world.state.progress.steps, world.state.furthest) == (6, 6)
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    assert world.plan.method is Method.RESTART
    world.settle(4)
    for step in range(4, 8):
        commit(world, step, 30.0 + step)
    assert world.state.step == 8
    assert (world.state.progress.steps, world.state.furthest) == (8, 8)
    assert find_ettr(world.state) == pytest.approx(8 / (37.0 - world.state.started_at_s))


def test_steps_that_are_told_out_of_order_count_once_each(start: Start) -> None:
    world = start()
    for step in (1, 0, 3, 2, 2, 3):
        commit(world, step, 10.0 + step)
    assert world.state.progress.steps == 4


def test_a_run_that_goes_on_from_a_checkpoint_counts_its_own_steps(new_world: Start) -> None:
    world = new_world(stages=1, replicas=2, lanes=2)
    for name in ("a", "b"):
        world.register(name)
        world.up(name)
    first, second = world.plan.members
    world.tell(world.about(FactKind.SETTLED, first, step=50))
    commit(world, 50, 20.0)
    assert world.state.progress.steps == 1, "before all have said where they begin"
    world.tell(world.about(FactKind.SETTLED, second, step=50))
    commit(world, 51, 21.0)
    assert (world.state.progress.steps, world.state.furthest) == (2, 52)


def test_after_a_store_was_lost_the_time_counts_from_the_first_step_since(start: Start) -> None:
    world = start(stages=1, replicas=2, lanes=2)
    for step in range(5):
        commit(world, step, 10.0 + step)
    plan = world.plan
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=PodUid("pod-0"), plan=plan, step=5))
    world.send(Tick(heard=world.state.unheard))
    commit(world, 3, 13.0)
    assert (world.state.progress.steps, find_ettr(world.state)) == (0, None), "it is told again"
    for step in (5, 6):
        commit(world, step, 15.0 + step)
    assert (world.state.progress.steps, world.state.furthest) == (2, 7)
    assert find_ettr(world.state) == pytest.approx(2 / (21.0 - 19.0))


def test_the_last_commits_count_though_the_job_is_over_when_they_are_told(start: Start) -> None:
    world = start(steps=4)
    began_s = world.state.started_at_s
    commit(world, 0, began_s + 9.0, 9.0)
    for member in world.plan.members:
        world.finish(member)
    assert world.state.phase is JobPhase.COMPLETE
    for step in (1, 2, 3):
        commit(world, step, began_s + 9.0 + step, 1.0)
    assert find_ettr(world.state) == pytest.approx(4 * 1.0 / 12.0)


def test_a_commit_of_before_a_suspension_that_is_told_late_is_not_the_newest(start: Start) -> None:
    world = start()
    commit(world, 0, 10.0)
    world.state = begin_progress(world.state, 1000.0)
    commit(world, 1, 11.0)
    assert (world.state.last_commit, find_ettr(world.state)) == (None, None)
    commit(world, 2, 1002.0)
    assert world.state.furthest == 3
    assert find_ettr(world.state) == 1.0


def test_a_state_of_the_version_before_goes_on_with_what_it_says(start: Start) -> None:
    world = start()
    for step in range(4):
        commit(world, step, 10.0 + step)
    data = codec.encode(world.state)
    for name in ("furthest", "progress", "last_commit"):
        del data[name]
    world.state = codec.decode(CoordinatorState, {**data, "started_step": 1})
    assert (world.state.furthest, world.state.progress.steps) == (4, 3)
    commit(world, 4, 14.0)
    assert (world.state.furthest, world.state.progress.steps) == (5, 4)
    assert find_ettr(world.state) == pytest.approx(4 / (14.0 - world.state.started_at_s))
