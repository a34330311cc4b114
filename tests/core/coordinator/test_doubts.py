"""What follows when devices disagree and nobody can say which is wrong, or one is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods, make_config

from mainstay_core.base.ids import Hardware, Slot
from mainstay_core.coordinator.events import JobSubmitted
from mainstay_core.coordinator.seating import Draft, another_plan
from mainstay_core.dmr.settings import CheckRules
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Cause, FactKind
from mainstay_core.wire.plan import Member, Method

Start = Callable[..., Any]
PAUSE_S = 20.0
"""More than the pause before members meet again."""


def disagree(world: PlayedPods, *doubted: Member) -> None:
    """All members park, as these have computed a type differently."""
    slots = tuple(sorted(m.slot for m in doubted))
    facts = [
        world.about(FactKind.PARKED, m, evidence="why", cause=Cause.RESULT, doubted=slots)
        for m in world.plan.members
    ]
    world.tell(*facts)
    world.tick(after_s=PAUSE_S)


def place_of(world: PlayedPods, slot: Slot) -> tuple[int | None, int]:
    (rank,) = [m.rank for m in world.plan.members if m.slot == slot]
    return rank.replica, rank.stage


def test_a_spare_takes_the_place_of_one_of_two_that_disagree_and_both_stay_members(
    start: Start,
) -> None:
    world = start(spares=1, replicas=2, stages=2)
    one, other = world.member(0, 1), world.member(1, 1)

    disagree(world, one, other)

    (joiner,) = [m for m in world.plan.members if m.joining]
    assert (joiner.rank.replica, joiner.rank.stage) == (1, 1)
    assert place_of(world, one.slot) == (0, 1)
    assert place_of(world, other.slot) == (None, 1), "it may be right, and it has a state"
    assert len(world.plan.chains) == 2
    assert (world.plan.method, world.plan.planned) == (Method.REFORM, False)
    assert "another trainer computes it, too" in world.plan.reason


def test_a_follower_of_the_stage_is_asked_before_a_spare(start: Start) -> None:
    world = start(spares=1, replicas=3, stages=2)
    world.down(world.member(2, 0))
    follower = next(m for m in world.plan.members if m.rank.replica is None)
    assert follower.rank.stage == 1
    one, other = world.member(0, 1), world.member(1, 1)

    disagree(world, one, other)

    assert place_of(world, follower.slot) == (1, 1)
    assert not [m for m in world.plan.members if m.joining]


def test_where_a_chain_was_not_asked_yet_the_same_members_meet_again(start: Start) -> None:
    world = start(spares=1, replicas=3, stages=1)
    before = [(m.rank, m.slot) for m in world.plan.members]
    disagree(world, world.member(0, 0), world.member(1, 0))
    assert [(m.rank, m.slot) for m in world.plan.members] == before
    assert world.state.phase is JobPhase.RECOVERING


def test_whom_the_same_members_could_not_decide_on_a_spare_decides_on(start: Start) -> None:
    """What the third chain told does not count: it differed at an earlier place."""
    world = start(spares=1, replicas=3, stages=2)
    pair = world.member(0, 1), world.member(1, 1)
    disagree(world, *pair)
    assert not [m for m in world.plan.members if m.joining]
    assert world.state.reforms == 1, "the next time after a longer pause"
    world.settle()

    disagree(world, *pair)

    (joiner,) = [m for m in world.plan.members if m.joining]
    assert (joiner.rank.replica, joiner.rank.stage) == (1, 1)


def test_doubts_without_end_escalate(start: Start) -> None:
    world = start(replicas=3, stages=1, escalate_after=1)
    pairs = [(0, 1), (1, 2), (0, 2), (0, 1)]
    methods = []
    for one, other in pairs:
        disagree(world, world.member(one, 0), world.member(other, 0))
        world.tick(after_s=4 * PAUSE_S)
        methods.append(world.plan.method)
        if not world.state.terminal:
            world.settle()
    assert methods[:3] == [Method.REFORM, Method.REFORM, Method.RESTART]
    assert world.state.phase is JobPhase.FAILED


def test_copies_without_a_majority_again_after_each_restart_fail_the_job(start: Start) -> None:
    world = start(replicas=2, stages=1, steps=20, escalate_after=1)
    world.commit(0)
    for _ in range(4):
        assert world.state.phase is not JobPhase.FAILED
        for step in (1, 2, 3):
            world.commit(step)
        facts = [
            world.about(FactKind.PARKED, m, evidence="differ", cause=Cause.STATE)
            for m in world.plan.members
        ]
        world.tell(*facts)
        world.tick(after_s=4 * PAUSE_S)
        if not world.state.terminal:
            assert world.plan.method is Method.RESTART
            world.settle(1)
    assert world.state.phase is JobPhase.FAILED
    assert "4 quorums ended for the same cause" in world.ended().reason


def test_without_another_trainer_the_job_waits_and_goes_on_when_one_comes(start: Start) -> None:
    world = start(replicas=2, stages=1)
    one, other = world.member(0, 0), world.member(1, 0)
    quorum = world.plan.quorum

    disagree(world, one, other)

    assert world.state.phase is JobPhase.WAITING
    assert world.plan.quorum == quorum
    for member in (one, other):
        assert f"{member.slot}" in world.state.waiting.reason
    waited = world.state.waiting
    world.tick(after_s=1.0)
    assert world.state.waiting == waited, "the same lack is one wait"

    world.register("pod-9")
    world.up("pod-9")

    assert world.state.phase is JobPhase.RECOVERING
    assert [m.rank.replica for m in world.plan.members if m.joining] == [1]
    world.settle()
    assert world.state.phase is JobPhase.RUNNING


def test_where_one_of_two_that_disagree_is_lost_the_condition_says_what_a_person_can_do(
    start: Start,
) -> None:
    world = start(replicas=2, stages=1)
    one, other = world.member(0, 0), world.member(1, 0)
    world.pod_gone(other.slot.pod)
    world.settle()

    slots = (one.slot, other.slot)
    world.tell(world.about(FactKind.PARKED, one, evidence="why", cause=Cause.RESULT, doubted=slots))
    world.tick(after_s=PAUSE_S)

    assert world.state.phase is JobPhase.WAITING
    reason = world.state.waiting.reason
    assert f"{other.slot} cannot be asked again" in reason
    assert "one more pod is enough (spec.spares.replicas)" in reason

    world.register("pod-9")
    world.up("pod-9")

    assert [m.slot.pod for m in world.plan.members if m.rank.replica is not None] == ["pod-9"]
    assert one.slot in {m.slot for m in world.plan.members}, "it has the state, and may be right"


def test_a_job_that_waits_for_a_judge_recovers_from_a_loss_meanwhile(start: Start) -> None:
    world = start(replicas=2, stages=1)
    one, other = world.member(0, 0), world.member(1, 0)
    disagree(world, one, other)
    world.down(one)
    assert world.plan.method is Method.MASK
    assert [m.slot for m in world.plan.members] == [other.slot]


def test_copies_without_a_majority_have_all_restart_from_what_is_durable(start: Start) -> None:
    world = start(replicas=2, stages=1, steps=20)
    for _ in range(3):
        world.commit()
    facts = [
        world.about(FactKind.PARKED, m, evidence="differ", cause=Cause.STATE)
        for m in world.plan.members
    ]
    world.tell(*facts)
    world.tick(after_s=PAUSE_S)
    assert (world.plan.method, len(world.plan.members)) == (Method.RESTART, 2)
    assert "none has a majority" in world.plan.reason
    world.settle(1)
    assert (world.state.phase, world.state.step) == (JobPhase.RUNNING, 1)
    world.commit(1)
    (recovery,) = world.recoveries().values()
    assert (recovery.method, recovery.lost_steps, recovery.differing) == (Method.RESTART, 2, ())


def test_who_is_named_by_one_of_several_reporters_is_a_minority(start: Start) -> None:
    world = start(replicas=3, stages=1)
    one, two, _ = world.plan.members
    world.tell(world.about(FactKind.PARKED, one, evidence="lost", cause=Cause.CHAIN))
    world.tell(
        world.about(
            FactKind.PARKED, two, evidence="differ", cause=Cause.STATE, differing=(one.slot,)
        )
    )
    world.tick(after_s=PAUSE_S)
    assert world.plan.method is Method.REFORM


@pytest.mark.parametrize("spares", [0, 1])
def test_a_device_that_is_named_hands_its_place_over(start: Start, spares: int) -> None:
    world = start(spares=spares, replicas=2, stages=1, steps=20)
    world.settle()
    world.commit()
    named = world.member(1, 0)

    world.tell(world.about(FactKind.NAMED, named, evidence="computed wrongly"))

    assert "computes wrongly each time" in world.state.pod(named.slot.pod).leaving
    for _ in range(3):
        world.settle()
        world.commit()
    assert named.slot not in {m.slot for m in world.plan.members}
    assert len(world.plan.chains) == 1 + spares
    assert world.state.phase is JobPhase.RUNNING


def test_the_last_cell_of_a_stage_works_on_though_it_is_named_until_somebody_is_there(
    start: Start,
) -> None:
    world = start(replicas=1, stages=1, lanes=1, steps=20)
    world.settle()
    world.commit()
    named = world.member(0, 0)
    world.tell(world.about(FactKind.NAMED, named, evidence="computed wrongly"))
    assert named.slot in {m.slot for m in world.plan.members}
    assert world.state.pod(named.slot.pod).leave_waits


def waiting_for_a_judge(accelerator: str = "") -> PlayedPods:
    """Of two replicas on two nodes that disagree one is lost, and no spare is there."""
    world = PlayedPods(make_config(replicas=2, stages=1, witness_every_steps=1))
    for i in range(2):
        world.register(f"pod-{i}", domain=f"node-{i}")
        world.up(f"pod-{i}", accelerator=accelerator and f"{accelerator}{i}")
    world.settle(0)
    one, other = world.member(0, 0), world.member(1, 0)
    world.pod_gone(other.slot.pod)
    world.settle()
    slots = (one.slot, other.slot)
    world.tell(world.about(FactKind.PARKED, one, evidence="why", cause=Cause.RESULT, doubted=slots))
    world.tick(after_s=PAUSE_S)
    assert world.state.phase is JobPhase.WAITING
    return world


def judges(world: PlayedPods) -> list[str]:
    return [m.slot.pod for m in world.plan.members if m.joining]


@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_pod_that_may_have_the_device_of_a_doubted_one_does_not_judge(
    node: str,
) -> None:
    world = waiting_for_a_judge()

    world.register("again", domain=node)
    world.up("again")

    assert world.state.phase is JobPhase.WAITING
    assert judges(world) == []
    assert "on another node unless all have GPUs" in world.state.waiting.reason

    world.register("elsewhere", domain="node-2")
    world.up("elsewhere")

    assert judges(world) == ["elsewhere"]
    (joiner,) = [m for m in world.plan.members if m.joining]
    assert joiner.hardware == Hardware(node="node-2")


def test_a_witness_that_is_switched_off_while_devices_disagree_leaves_them_their_voices() -> None:
    world = waiting_for_a_judge()
    world.send(JobSubmitted(config=replace(world.state.config, witness_every_steps=0)))

    world.register("elsewhere", domain="node-2")
    world.up("elsewhere")

    assert world.plan.checks == CheckRules()
    assert {m.hardware for m in world.plan.members} == {
        Hardware(node=node) for node in ("node-0", "node-2")
    }


def test_accelerators_that_tell_their_uuids_say_who_has_another_device() -> None:
    world = waiting_for_a_judge("gpu-")
    world.register("again", domain="node-1")
    world.up("again", accelerator="gpu-1")
    assert world.state.phase is JobPhase.WAITING
    world.register("beside", domain="node-1")
    world.up("beside", accelerator="gpu-5")
    assert judges(world) == ["beside"]
    (joiner,) = [m for m in world.plan.members if m.joining]
    assert joiner.hardware == Hardware(node="node-1", accelerator="gpu-5")


def test_a_follower_with_the_device_of_a_doubted_one_does_not_judge() -> None:
    world = PlayedPods(make_config(replicas=3, stages=2))
    for i in range(6):
        world.register(f"pod-{i}", domain="node" if i > 1 else f"node-{i}")
        world.up(f"pod-{i}", accelerator="gpu-5" if i in (3, 5) else f"gpu-{i}")
    world.settle(0)
    world.down(world.member(2, 0))
    follower = next(m for m in world.plan.members if m.rank.replica is None)
    pair = world.member(0, 1), world.member(1, 1)
    accelerators = {world.state.slot(m.slot).accelerator for m in (follower, *pair)}
    assert accelerators == {"gpu-1", "gpu-5"}, "the test is of a follower that shares a device"
    disagree(world, *pair)
    assert world.state.phase is JobPhase.WAITING


def test_where_all_pods_share_one_accelerator_any_other_trainer_judges() -> None:
    world = PlayedPods(make_config(replicas=2, stages=1))
    for i in range(3):
        world.register(f"pod-{i}")
        world.up(f"pod-{i}", accelerator="gpu-0")
        if i == 1:
            world.settle(0)
    disagree(world, world.member(0, 0), world.member(1, 0))
    assert judges(world) == ["pod-2"]


def test_two_doubted_devices_that_are_known_to_be_two_are_no_one_device_beside_a_third() -> None:
    """Whatever their order: of which of them a pod has the device is not known."""
    world = PlayedPods(make_config(replicas=3, stages=1))
    for i, accelerator in enumerate(("", "gpu-1", "gpu-2")):
        world.register(f"pod-{i}", domain="node-0")
        world.up(f"pod-{i}", accelerator=accelerator)
    world.settle(0)
    world.register("spare", domain="node-0")
    world.up("spare")
    draft = Draft(method=Method.REFORM, planned=False, reason="why", now_s=1.0, nonce="x")
    takers = [s for s in world.state.slots if s.slot.pod == "spare"]
    for doubted in permutations(m.slot for m in world.plan.members):
        assert another_plan(world.state, draft, doubted, takers) is None
