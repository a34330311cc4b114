"""What the coordinator knows of durable checkpoints, and which steps a restart has lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.worlds.pods import PlayedPods, make_config

from mainstay_core.coordinator.intake.checkpoints import describe_problem
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]


def lose_a_stage(world: Any) -> None:
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    assert world.plan.method is Method.RESTART


def saved(world: Any, version: int, evidence: str = "") -> None:
    member = world.member(0, 0)
    world.tell(world.about(FactKind.CHECKPOINT, member, durable=version, evidence=evidence))


def test_a_complete_checkpoint_is_announced_once_and_named_by_the_ladder(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    for _ in range(5):
        world.commit()
    saved(world, 3)
    saved(world, 3)
    assert world.announced().count("CheckpointComplete") == 1

    lose_a_stage(world)
    assert "all go on from step 3" in world.plan.reason


def test_without_a_checkpoint_the_ladder_names_the_seeds_state(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    world.commit()
    lose_a_stage(world)
    assert "the seed's initial state" in world.plan.reason


def test_storage_that_refuses_is_a_warning_until_a_checkpoint_is_complete(start: Start) -> None:
    world = start(replicas=2, stages=2)
    saved(world, 0, "no space left on device")
    saved(world, 0, "no space left on device")
    assert world.announced().count("CheckpointProblem") == 1, "not each time the same again"
    assert world.state.checkpoint_problem == "no space left on device"

    assert describe_problem(world.state) == ("nothing has been saved yet: no space left on device")

    saved(world, 0, "it said the same in other words")
    assert world.announced().count("CheckpointProblem") == 1, "nor what is told in other words"

    saved(world, 4)
    assert (world.state.durable, world.state.checkpoint_problem) == (4, "")
    assert describe_problem(world.state) == ""
    saved(world, 4, "no space left on device")
    assert world.announced().count("CheckpointProblem") == 2


def test_a_problem_says_since_which_step_nothing_could_be_saved(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    world.commit()
    saved(world, 6)
    saved(world, 6, "no space left on device")
    since = "nothing has been saved since step {}: no space left on device"
    assert describe_problem(world.state) == since.format(6)

    lose_a_stage(world)
    world.tell(world.about(FactKind.SETTLED, world.plan.members[0], step=4, durable=4))
    assert describe_problem(world.state) == since.format(4), "the newest one was damaged"


def test_a_settle_may_find_the_newest_checkpoint_damaged(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    world.commit()
    saved(world, 6)
    lose_a_stage(world)
    member = world.plan.members[0]
    world.tell(world.about(FactKind.SETTLED, member, step=4, durable=4))
    assert world.state.durable == 4


def lost_steps(world: Any) -> int:
    return int(world.recoveries()[world.state.restarted_id].lost_steps)


def test_steps_that_the_ledger_had_not_told_are_lost_as_well(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    for _ in range(5):
        world.commit()
    lose_a_stage(world)
    survivor = next(m for m in world.plan.members if not m.joining)
    world.tell(world.about(FactKind.ADOPTED, survivor, step=3, reached=6))
    world.settle(step=3)
    world.commit(step=3)
    assert lost_steps(world) == 3, "the sixth step was applied"


def test_a_ledger_that_tells_after_the_settle_still_counts(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    old = world.plan.quorum
    for _ in range(5):
        world.commit()
    lose_a_stage(world)
    world.settle(step=3)
    world.commit(step=5, quorum=old)
    assert world.state.step == 3
    world.commit(step=3)
    assert lost_steps(world) == 3


def test_a_job_that_goes_on_from_an_earlier_run_begins_with_its_steps() -> None:
    world = PlayedPods(make_config(replicas=2, stages=1))
    for pod in ("pod-0", "pod-1"):
        world.register(pod)
        world.up(pod)
    world.settle(step=8)
    assert world.state.step == 8
    world.commit()
    assert world.state.step == 9
