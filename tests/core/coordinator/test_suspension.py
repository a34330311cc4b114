"""How a job comes to stand still and goes on, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError, RemoteProtocolError
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.events import JobSubmitted, PlanStored, SuspendRequested
from mainstay_core.coordinator.scaling import plan_pods
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]
SAVES = {"checkpoint_every_steps": 10, "checkpoint_dir": "/ckpt"}


def suspend(world: Any, *, wanted: bool = True) -> None:
    world.send(SuspendRequested(suspend=wanted))


def pause(world: Any, version: int, durable: int | None = None) -> None:
    """Every member settles in the pausing plan, saves, and tells."""
    world.settle(version)
    saved = version if durable is None else durable
    for member in world.plan.members:
        world.tell(world.about(FactKind.PAUSED, member, step=version, durable=saved))


@pytest.fixture
def suspended(start: Start) -> Any:
    world = start(spares=1, **SAVES)
    world.commit(0)
    suspend(world)
    pause(world, 1)
    return world


def test_the_same_members_are_told_to_save_and_compute_no_further(start: Start) -> None:
    world = start(**SAVES)
    world.commit(0)
    before = world.plan
    suspend(world)
    plan = world.plan
    assert (plan.method, plan.planned, plan.pause) == (Method.SUSPEND, True, True)
    assert [m.incarnation for m in plan.members] == [m.incarnation for m in before.members]
    assert plan.unplanned_id == before.unplanned_id
    assert world.state.phase is JobPhase.RUNNING


def test_nothing_else_is_planned_while_it_pauses(start: Start) -> None:
    world = start(spares=1, replicas=3, **SAVES)
    suspend(world)
    world.register("later")
    world.up("later")
    world.settle(0)
    world.tick()
    assert world.plan.pause


def test_once_all_have_saved_no_pod_is_wanted_and_all_are_told_to_end(suspended: Any) -> None:
    assert suspended.state.phase is JobPhase.SUSPENDED
    assert suspended.ended().state == "suspended"
    assert "Suspended" in suspended.announced()
    assert plan_pods(suspended.state).num_pods == 0
    assert all(p.gone for p in suspended.state.pods)
    assert suspended.state.in_force is None
    suspended.stored()


def test_what_the_ending_pods_still_tell_changes_nothing(suspended: Any) -> None:
    before = suspended.state.slots
    for member in suspended.plan.members:
        suspended.down(member)
    suspended.pod_gone("pod-0")
    suspended.commit(0)
    assert suspended.state.slots == before
    assert (suspended.state.phase, suspended.state.step) == (JobPhase.SUSPENDED, 1)


def test_a_resumed_job_waits_for_all_its_pods_and_starts_above_the_old_quorum(
    suspended: Any,
) -> None:
    last = suspended.plan.quorum.id
    suspend(suspended, wanted=False)
    assert suspended.state.phase is JobPhase.FORMING
    assert plan_pods(suspended.state).num_pods == 8
    for i in range(8):
        assert suspended.state.phase is JobPhase.FORMING
        suspended.register(f"new-{i}")
        suspended.up(f"new-{i}")
    plan = suspended.plan
    assert (plan.method, plan.quorum.id, plan.pause) == (Method.START, last + 1, False)
    assert {m.slot.pod for m in plan.members} == {f"new-{i}" for i in range(8)}
    suspended.settle(1)
    assert (suspended.state.phase, suspended.state.step) == (JobPhase.RUNNING, 1)
    suspended.commit(1)
    assert suspended.state.step == 2


def test_after_a_resume_a_spare_that_never_voted_still_names_nobody(suspended: Any) -> None:
    """The store has lost nothing: who serves, and who did, is known."""
    old = suspended.plan.quorum
    suspend(suspended, wanted=False)
    for i in range(9):
        suspended.register(f"new-{i}")
        suspended.up(f"new-{i}")
    (spare,) = {f"new-{i}" for i in range(9)} - {m.slot.pod for m in suspended.plan.members}
    wrong = suspended.plan.members[0]
    told = suspended.about(FactKind.NAMED, wrong, since=0, step=1, device=wrong.slot)
    told = replace(told, pod=PodUid(spare), slot=0, quorum=old)
    with pytest.raises(RemoteProtocolError, match=f"Named.slot: {spare}/0 was no member of"):
        suspended.tell(told)
    assert suspended.state.taints == ()


def test_when_the_pausing_plan_was_durable_may_be_told_after_all_is_over(suspended: Any) -> None:
    plan = suspended.plan
    suspend(suspended, wanted=False)
    suspended.send(PlanStored(quorum=plan.quorum, at_s=1.0))
    assert suspended.state.phase is JobPhase.FORMING


def test_a_trainer_with_another_arithmetic_is_refused_after_a_resume(suspended: Any) -> None:
    suspend(suspended, wanted=False)
    suspended.register("new-0")
    suspended.up("new-0", fingerprint={"torch": "3"})
    assert "FingerprintRefused" in suspended.announced()


def test_a_wish_that_is_withdrawn_lets_the_members_go_on_from_memory(start: Start) -> None:
    world = start(**SAVES)
    suspend(world)
    world.tell(world.about(FactKind.PAUSED, world.member(0, 0), step=0, durable=0))
    members = world.plan.members
    suspend(world, wanted=False)
    assert (world.plan.method, world.plan.planned, world.plan.pause) == (
        Method.REFORM,
        False,
        False,
    )
    assert [m.slot for m in world.plan.members] == [m.slot for m in members]


def test_a_loss_while_it_pauses_is_masked_and_then_it_pauses_again(start: Start) -> None:
    world = start(**SAVES)
    suspend(world)
    world.tell(world.about(FactKind.PAUSED, world.member(0, 0), step=0, durable=0))
    world.down(world.member(1, 1))
    assert (world.plan.method, world.plan.pause) == (Method.MASK, False)
    world.settle(0)
    assert world.plan.pause
    pause(world, 1)
    assert world.state.phase is JobPhase.SUSPENDED


def test_one_that_dies_after_all_have_saved_does_not_matter(start: Start) -> None:
    world = start(**SAVES)
    suspend(world)
    world.settle(0)
    *first, last = world.plan.members
    world.tell(*(world.about(FactKind.PAUSED, m, step=1, durable=1) for m in first))
    down = world.down_fact(world.plan.members[0])
    world.tell(world.about(FactKind.PAUSED, last, step=1, durable=1), down)
    assert world.state.phase is JobPhase.SUSPENDED


def test_a_checkpoint_that_could_not_be_written_is_told_with_what_it_costs(start: Start) -> None:
    world = start(**SAVES)
    for step in range(3):
        world.commit(step)
    suspend(world)
    pause(world, 3, durable=0)
    assert world.state.phase is JobPhase.SUSPENDED
    assert "3 will be done again" in world.messages()


def test_a_job_that_waits_for_a_lost_stage_is_suspended_with_what_is_on_the_disk(
    start: Start,
) -> None:
    world = start(**SAVES)
    world.tell(*(world.down_fact(world.member(r, 0)) for r in range(4)))
    assert world.state.phase is JobPhase.WAITING
    suspend(world)
    assert world.state.phase is JobPhase.SUSPENDED


def test_a_job_without_checkpoints_is_not_suspended(start: Start) -> None:
    world = start()
    with pytest.raises(InvalidSpecError, match="everySteps"):
        suspend(world)


def test_a_job_may_begin_suspended(new_world: Start) -> None:
    world = new_world(suspend=True)
    assert world.state.phase is JobPhase.SUSPENDED
    assert plan_pods(world.state).num_pods == 0
    suspend(world, wanted=False)
    assert world.state.phase is JobPhase.FORMING


def test_the_definition_says_it_as_well(start: Start) -> None:
    world = start(**SAVES)
    config = world.state.config
    world.send(JobSubmitted(config=replace(config, suspend=True)))
    assert world.plan.pause
    # Unchanged since: somebody's wish to go on stands.
    suspend(world, wanted=False)
    world.send(JobSubmitted(config=replace(config, suspend=True)))
    assert not world.state.suspend
