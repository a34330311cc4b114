"""How places are taken again, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mainstay_core.base import codec
from mainstay_core.coordinator.events import DrainRequested, ScaleRequested
from mainstay_core.coordinator.intake.pruning import MAX_GONE_PODS
from mainstay_core.coordinator.siting import surplus_slots
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]


def test_a_spare_takes_the_place_once_all_have_settled(start: Start) -> None:
    world = start(spares=1)
    world.down(world.member(1, 0))
    members = world.plan.members
    for member in members[:-1]:
        world.tell(world.about(FactKind.SETTLED, member, step=0))
        assert world.plan.quorum.id == 2
    world.tell(world.about(FactKind.SETTLED, members[-1], step=0))
    plan = world.plan
    assert (plan.method, plan.planned, plan.quorum.id, plan.unplanned_id) == (
        Method.JOIN,
        True,
        3,
        2,
    )
    joiner = next(m for m in plan.members if m.joining)
    assert (joiner.slot.pod, str(joiner.rank), joiner.since) == ("spare-0", "r1.s0.i0", 3)
    assert [c.replica for c in plan.chains] == [0, 1, 2, 3]
    assert {t for t, r in enumerate(plan.suppliers) if r == 1} == set(range(4, 8))
    assert world.state.phase is JobPhase.RUNNING


def test_one_planned_plan_waits_for_the_one_before(start: Start) -> None:
    world = start(spares=1, replicas=4)
    world.tell(world.down_fact(world.member(1, 0)), world.down_fact(world.member(2, 0)))
    world.settle()
    assert (world.plan.quorum.id, len(world.plan.chains)) == (3, 3)
    world.register("later")
    world.up("later")
    assert world.plan.quorum.id == 3
    world.settle()
    assert (world.plan.quorum.id, len(world.plan.chains)) == (4, 4)


def test_followers_are_chained_again_without_a_transfer(start: Start) -> None:
    world = start()
    world.tell(world.down_fact(world.member(1, 0)), world.down_fact(world.member(2, 1)))
    assert [c.replica for c in world.plan.chains] == [0, 3]
    world.settle()
    assert world.plan.method is Method.JOIN
    assert len(world.plan.chains) == 3
    assert not any(m.joining for m in world.plan.members)


def test_a_restarted_trainer_comes_before_a_spare(start: Start) -> None:
    world = start(spares=1, restart_grace_s=10.0)
    victim = world.member(1, 0)
    world.down(victim, restarting=True)
    world.settle()
    assert world.plan.quorum.id == 2, "the place waits for its own trainer"
    life = world.up(victim.slot.pod)
    assert world.plan.member_of(victim.slot, life).rank == victim.rank


def test_a_spare_need_not_wait_for_the_place_of_a_pod_that_is_gone(start: Start) -> None:
    world = start(spares=1, restart_grace_s=10.0)
    world.down(world.member(1, 0), restarting=True)
    world.pod_gone(world.member(2, 0).slot.pod)
    world.settle()
    assert next(m for m in world.plan.members if m.joining).slot.pod == "spare-0"
    assert len(world.plan.chains) == 3


def test_a_spare_comes_when_the_grace_is_over(start: Start) -> None:
    world = start(spares=1, restart_grace_s=10.0)
    world.down(world.member(1, 0), restarting=True)
    world.settle()
    world.tick(after_s=5.0)
    assert world.plan.quorum.id == 2
    world.tick(after_s=6.0)
    assert next(m for m in world.plan.members if m.joining).slot.pod == "spare-0"


def test_a_fault_before_a_join_is_adopted_keeps_the_living_joiner(start: Start) -> None:
    world = start(spares=1)
    world.down(world.member(1, 0))
    world.settle()
    joiner = next(m for m in world.plan.members if m.joining)
    world.down(world.member(3, 1))
    plan = world.plan
    assert (plan.method, plan.planned, plan.unplanned_id) == (Method.MASK, False, 4)
    again = plan.member_of(joiner.slot, joiner.incarnation)
    assert (again.joining, again.since) == (True, 3)


def test_a_dead_joiner_is_masked_like_anybody(start: Start) -> None:
    world = start(spares=1)
    world.down(world.member(1, 0))
    world.settle()
    world.down(next(m for m in world.plan.members if m.joining))
    assert world.plan.method is Method.MASK
    assert [c.replica for c in world.plan.chains] == [0, 2, 3]


def test_a_joiner_without_state_does_not_hold_its_stage(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=1)
    world.down(world.member(1, 0))
    world.settle()
    assert any(m.joining for m in world.plan.members)
    world.down(world.member(0, 0))
    assert world.plan.method is Method.RESTART
    assert len(world.plan.members) == 1


def test_a_slot_that_fails_again_and_again_stays_unused(start: Start) -> None:
    world = start(replicas=2, stages=1, max_restarts=3)
    pod = world.member(1, 0).slot.pod
    for _ in range(4):  # its first life and three restarts
        assert pod in {m.slot.pod for m in world.plan.members}
        member = next(m for m in world.plan.members if m.slot.pod == pod)
        world.down(member, restarting=True)
        world.settle()
        world.up(pod)
        world.tick(after_s=1000.0)
    assert pod not in {m.slot.pod for m in world.plan.members}


def test_a_commit_forgives_failures(start: Start) -> None:
    world = start(replicas=2, stages=1, max_restarts=3)
    pod = world.member(1, 0).slot.pod
    for _ in range(5):
        member = next(m for m in world.plan.members if m.slot.pod == pod)
        world.down(member, restarting=True)
        world.settle()
        world.up(pod)
        world.settle()
        world.commit()
    assert pod in {m.slot.pod for m in world.plan.members}


def test_commits_prove_that_all_have_settled_even_if_one_was_not_heard(start: Start) -> None:
    world = start(spares=1)
    world.down(world.member(1, 0))
    for member in world.plan.members[1:]:
        world.tell(world.about(FactKind.SETTLED, member, step=0))
    for _ in range(3):
        assert world.plan.quorum.id == 2
        world.commit()
    assert world.plan.method is Method.JOIN


def test_of_pods_lost_long_ago_nothing_is_kept(start: Start) -> None:
    world = start(replicas=2, stages=1)
    size = 0
    for number in range(3 * MAX_GONE_PODS):
        world.settle()
        world.pod_gone(world.plan.members[-1].slot.pod)
        world.settle()
        world.register(f"new-{number:03}")
        world.up(f"new-{number:03}")
        world.settle()
        world.commit()
        if number == 2 * MAX_GONE_PODS:
            size = len(codec.dumps(world.state))
    living = {p.registration.pod for p in world.state.pods if not p.gone}
    assert len(living) == 2
    assert len(world.state.pods) <= MAX_GONE_PODS + 3
    assert {s.slot.pod for s in world.state.slots} == {p.registration.pod for p in world.state.pods}
    assert len(world.state.fingerprints) <= 3
    # Numbers may get digits, nothing else grows.
    assert len(codec.dumps(world.state)) < size * 1.05


def test_members_beyond_what_is_wanted_are_surplus_followers_first(start: Start) -> None:
    world = start(replicas=3)
    world.down(world.member(0, 0))  # leaves a follower of stage 1, nobody settles
    follower = world.followers()[0]

    assert surplus_slots(world.state) == ()
    world.send(ScaleRequested(replicas=1))

    found = [s.slot for s in surplus_slots(world.state)]
    stages = {m.slot: m.rank.stage for m in world.plan.members}
    assert [stages[slot] for slot in found] == [0, 1, 1]
    assert follower.slot in found
    assert world.member(1, 0).slot not in found
    assert world.member(1, 1).slot not in found


def test_a_member_on_a_pod_that_leaves_is_no_surplus(start: Start) -> None:
    world = start(replicas=3)
    world.down(world.member(0, 0))
    follower = world.followers()[0]
    world.send(ScaleRequested(replicas=1))

    world.send(DrainRequested(pod=world.state.pod(follower.slot.pod).registration.name))

    assert follower.slot not in [s.slot for s in surplus_slots(world.state)]


def test_a_free_trainer_takes_the_place_before_a_surplus_member(start: Start) -> None:
    world = start(replicas=2, spares=1)
    world.down(world.member(0, 0))
    follower = world.followers()[0]
    world.send(ScaleRequested(replicas=1))

    world.down(world.member(1, 0))

    assert world.plan.method is Method.RESTART
    assert [m.rank.stage for m in world.plan.members if m.slot == follower.slot] == [1]
    assert [m.slot.pod for m in world.plan.members if m.joining] == ["spare-0"]
