"""How pods leave and replicas are scaled: planned plans alone, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError, RemoteProtocolError
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import DrainRequested, ScaleRequested
from mainstay_core.coordinator.scaling import plan_pods
from mainstay_core.coordinator.state import with_pod
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]


def leave(world: Any, *pods: str) -> None:
    world.tell(
        *(world.fact(FactKind.LEAVING, p, None, evidence="SIGTERM", grace_s=30.0) for p in pods)
    )


def pods_of(plan: Any) -> set[str]:
    return {m.slot.pod for m in plan.members}


def test_a_successor_heals_first_and_takes_the_place_in_the_next_plan(start: Start) -> None:
    world = start(spares=1)
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    first = world.plan
    assert (first.method, first.planned, first.quorum.id) == (Method.HAND_OVER, True, 2)
    assert [c.formed_in.id for c in first.chains] == [1, 1, 1, 1], "no chain is disturbed"
    (successor,) = [m for m in first.members if m.joining]
    assert (successor.slot.pod, str(successor.rank)) == ("spare-0", "f.s0.i0")
    assert first.suppliers == tuple(t // 4 for t in range(16)), "nobody computes anything else"
    world.settle()
    second = world.plan
    assert (second.method, second.planned, second.quorum.id) == (Method.HAND_OVER, True, 3)
    assert leaver.slot.pod not in pods_of(second)
    assert world.member(1, 0).slot.pod == "spare-0"
    assert second.suppliers == first.suppliers
    assert second.unplanned_id == 1
    world.settle()
    world.commit()
    assert world.state.phase is JobPhase.RUNNING
    (recovery,) = world.recoveries().values()
    assert (recovery.method, recovery.exact, recovery.done) == (Method.HAND_OVER, True, True)
    assert (recovery.lost_steps, recovery.redone_steps) == (0, 0)
    assert recovery.slots == (leaver.slot,)


def test_without_a_spare_the_types_go_to_other_chains(start: Start) -> None:
    world = start()
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    plan = world.plan
    assert (plan.method, plan.planned) == (Method.HAND_OVER, True)
    assert [c.replica for c in plan.chains] == [0, 2, 3]
    assert len(world.followers()) == 1, "the rest of its chain stays as a follower"
    assert set(plan.suppliers) == {0, 2, 3}


def test_remains_of_several_leavers_are_mated_at_once(start: Start) -> None:
    world = start()
    leave(world, world.member(1, 0).slot.pod, world.member(2, 1).slot.pod)
    plan = world.plan
    assert plan.quorum.id == 2
    assert len(plan.chains) == 3
    assert not world.followers()


def test_a_leaving_pod_gets_no_place_any_more(start: Start) -> None:
    world = start(spares=1)
    leave(world, "spare-0")
    world.down(world.member(1, 0))
    world.settle()
    assert "spare-0" not in pods_of(world.plan)


def test_a_leave_during_a_recovery_is_done_after_it(start: Start) -> None:
    world = start(spares=2)
    leaver = world.member(2, 1)
    world.down(world.member(1, 0))
    leave(world, leaver.slot.pod)
    assert world.plan.quorum.id == 2
    for _ in range(4):
        world.settle()
    assert leaver.slot.pod not in pods_of(world.plan)
    assert len(world.plan.chains) == 4


def test_a_leaver_that_dies_before_the_swap_is_masked(start: Start) -> None:
    world = start(spares=1)
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    world.down(leaver)
    plan = world.plan
    assert (plan.method, plan.planned) == (Method.MASK, False)
    assert [c.replica for c in plan.chains] == [0, 2, 3]
    world.settle()
    assert len(world.plan.chains) == 4, "its successor was on the way"


def test_a_leaver_that_ends_in_good_order_is_no_fault_however_late_the_others_adopt(
    start: Start,
) -> None:
    world = start(spares=1)
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    world.settle()
    plan = world.plan
    ended = world.about(FactKind.TRAINER_DOWN, leaver, handed_over=True)
    world.tell(ended)
    assert not machine.is_pending(world.state), "nothing more is waited for"
    world.tick(after_s=30.0)
    world.pod_gone(leaver.slot.pod)
    world.tick(after_s=30.0)
    assert world.plan == plan
    world.settle()
    world.commit()
    assert [r.method for r in world.recoveries().values()] == [Method.HAND_OVER]


@pytest.mark.parametrize("first", ["the end", "that it was in good order"])
def test_that_a_leaver_ended_in_good_order_may_be_told_after_its_end(
    start: Start, first: str
) -> None:
    """Its socket ended, and the pod was told to end meanwhile; or the operator was faster."""
    world = start(spares=1)
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    world.settle()
    plan = world.plan
    if first == "the end":
        world.down(leaver)
    world.tell(world.about(FactKind.TRAINER_DOWN, leaver, handed_over=True))
    world.down(leaver)
    world.tick(after_s=30.0)
    assert world.plan == plan


def test_a_leaver_that_ended_in_good_order_is_blamed_for_nothing_later(start: Start) -> None:
    world = start()
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    world.settle()
    world.tell(world.about(FactKind.TRAINER_DOWN, leaver))
    plan = world.plan
    world.park(world.member(0, 0))
    assert world.plan == plan, "nobody is confirmed gone: there is a pause for evidence"
    world.tick(after_s=30.0)
    assert world.plan.method is Method.REFORM


def test_a_leaver_that_dies_before_its_last_plan_is_adopted_costs_no_pause(start: Start) -> None:
    world = start()
    leaver, other = world.member(1, 0), world.member(0, 0)
    before = world.plan.quorum
    leave(world, leaver.slot.pod)
    world.tell(world.about(FactKind.TRAINER_DOWN, leaver))
    assert world.plan.quorum.id == 2, "nobody may have needed it"
    world.park(other, leaver.slot, quorum=before)
    assert (world.plan.quorum.id, world.plan.method) == (3, Method.MASK)
    assert "ended before" in world.plan.reason
    assert [r.method for r in world.recoveries().values()] == [Method.MASK]


def test_a_successor_that_dies_is_followed_by_another_one(start: Start) -> None:
    world = start(spares=2)
    leaver = world.member(1, 0)
    leave(world, leaver.slot.pod)
    world.down(next(m for m in world.plan.members if m.joining))
    assert world.plan.method is Method.MASK
    assert len(world.plan.chains) == 4, "the leaver still serves"
    for _ in range(3):
        world.settle()
    assert leaver.slot.pod not in pods_of(world.plan)
    assert world.member(1, 0).slot.pod == "spare-1"


def test_the_last_replica_waits_for_a_successor(start: Start) -> None:
    world = start(replicas=1, lanes=2, stages=1)
    leave(world, "pod-0")
    assert world.plan.quorum.id == 1
    world.tick()
    world.tick()
    assert world.announced().count("LeaveWaits") == 1
    assert "no trainer is free" in world.state.pods[0].leave_waits
    pod = replace(world.state.pods[0], leave_waits="it said so in other words")
    world.state = with_pod(world.state, pod)
    world.tick()
    assert world.announced().count("LeaveWaits") == 1
    assert machine.is_pending(world.state)
    world.register("late")
    world.up("late")
    world.settle()
    assert pods_of(world.plan) == {"late"}


def test_when_all_leave_at_once_the_last_one_stays(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1)
    leave(world, "pod-0", "pod-1")
    world.settle()
    assert pods_of(world.plan) == {"pod-1"}
    assert "LeaveWaits" in world.announced()


def test_a_pod_with_two_slots_is_handed_over_whole(start: Start) -> None:
    world = start(spares=1, ranks_per_pod=2)
    leave(world, "pod-1")
    world.settle()
    assert "pod-1" not in pods_of(world.plan)
    assert len(world.plan.chains) == 4


def test_being_told_twice_changes_nothing(start: Start) -> None:
    world = start(spares=1)
    leave(world, "pod-1")
    plan, state = world.plan, world.state
    leave(world, "pod-1")
    assert world.state == state
    assert world.plan == plan


def test_a_drain_is_a_leave_without_a_limit(start: Start) -> None:
    world = start(spares=1)
    world.send(DrainRequested(pod="pod-1"))
    world.settle()
    assert "pod-1" not in pods_of(world.plan)
    assert plan_pods(world.state).ending == ("pod-1",)
    with pytest.raises(RemoteProtocolError, match="no living pod nothing"):
        world.send(DrainRequested(pod="nothing"))


def test_a_pod_stays_leaving_when_its_supervisor_is_replaced(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1)
    world.send(DrainRequested(pod="pod-1"))
    world.register("pod-1", pid=99)
    world.up("pod-1")
    world.settle()
    assert pods_of(world.plan) == {"pod-0"}


def test_a_leaver_that_is_lost_in_silence_before_the_others_have_adopted_is_not_waited_for(
    start: Start,
) -> None:
    """No socket tells the others, and a planned plan does not interrupt them."""
    world = start()
    leaver = world.member(1, 0).slot.pod
    leave(world, leaver)
    planned = world.plan
    assert (planned.planned, leaver in pods_of(planned)) == (True, False)
    world.tick(**{leaver: world.state.config.heartbeat_timeout_s + 1})
    assert world.plan is planned, "they may be about to adopt it"
    assert machine.is_pending(world.state)
    world.tick(world.state.config.probe_s)
    assert (world.plan.planned, world.plan.quorum.id) == (False, planned.quorum.id + 1)
    assert "ended before the plan that drops them was adopted" in world.plan.reason
    assert pods_of(world.plan) == pods_of(planned)
    world.settle()
    world.commit()
    assert world.state.phase is JobPhase.RUNNING
    (recovery,) = world.recoveries().values()
    assert (recovery.method, recovery.done) == (Method.MASK, True), "nothing was handed over"


def test_a_leaver_that_ends_after_the_others_have_adopted_disturbs_nobody(start: Start) -> None:
    world = start()
    leaver = world.member(1, 0).slot.pod
    leave(world, leaver)
    planned = world.plan
    world.settle()
    world.pod_gone(leaver)
    world.tick(10.0)
    assert world.plan is planned


def test_nothing_is_handed_over_before_the_last_step(start: Start) -> None:
    world = start(spares=1, steps=5)
    for _ in range(4):
        world.commit()
    leave(world, "pod-1")
    assert world.plan.quorum.id == 1


def test_scale_down_ends_the_highest_lanes_between_steps(start: Start) -> None:
    world = start(spares=1)
    world.send(ScaleRequested(replicas=2))
    plan = world.plan
    assert (plan.method, plan.planned) == (Method.MASK, True)
    assert [c.replica for c in plan.chains] == [0, 1]
    assert not world.followers()
    assert world.recoveries() == {}
    world.settle()
    assert plan_pods(world.state).num_pods == 4 + world.state.config.spares
    world.tick()
    assert world.plan is plan, "what was dropped is not seated again"


def test_scale_down_prefers_a_chain_that_leaves(start: Start) -> None:
    world = start()
    leave(world, world.member(0, 0).slot.pod)
    world.send(ScaleRequested(replicas=3))
    for _ in range(3):
        world.settle()
    assert [c.replica for c in world.plan.chains] == [1, 2, 3]
    assert not world.followers()


def test_scale_up_is_a_join_of_new_pods(start: Start) -> None:
    world = start(replicas=2, lanes=4)
    world.send(ScaleRequested(replicas=4))
    assert world.plan.quorum.id == 1
    assert plan_pods(world.state).num_pods == 8
    for i in range(4, 8):
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    for _ in range(2):
        world.settle()
    assert world.plan.method is Method.JOIN
    assert [c.replica for c in world.plan.chains] == [0, 1, 2, 3]
    assert world.plan.suppliers == tuple(t // 4 for t in range(16))


def test_scaled_down_and_up_again_the_old_trainers_join(start: Start) -> None:
    world = start()
    world.send(ScaleRequested(replicas=2))
    world.settle()
    world.send(ScaleRequested(replicas=4))
    world.settle()
    assert [c.replica for c in world.plan.chains] == [0, 1, 2, 3]
    assert "restarted" not in world.plan.reason


def test_a_scale_during_a_recovery_is_done_after_it(start: Start) -> None:
    world = start()
    world.down(world.member(3, 1))
    world.send(ScaleRequested(replicas=2))
    assert world.plan.quorum.id == 2
    world.settle()
    assert [c.replica for c in world.plan.chains] == [0, 1]


@pytest.mark.parametrize("replicas", [0, 1, 5])
def test_a_number_outside_the_bounds_is_refused(start: Start, replicas: int) -> None:
    world = start(replicas=3, min_replicas=2, lanes=4)
    with pytest.raises(InvalidSpecError, match=r"minReplicas..lanes, 2..4"):
        world.send(ScaleRequested(replicas=replicas))


def test_surplus_pods_are_ended_newest_first_and_spares_stay_as_many(start: Start) -> None:
    world = start(spares=1)  # a ninth pod; the job's own number of spares is 0
    assert plan_pods(world.state).ending == ("spare-0",)
    world.send(ScaleRequested(replicas=3))
    assert plan_pods(world.state).ending == ("spare-0",), "the others need the votes of the rest"
    world.settle()
    wanted = plan_pods(world.state)
    assert (wanted.num_pods, len(wanted.ending)) == (6, 3)
    assert not set(wanted.ending) & pods_of(world.plan)


def test_a_loss_before_a_shrink_is_adopted_takes_back_who_still_serves(start: Start) -> None:
    world = start()
    world.send(ScaleRequested(replicas=1))
    dropped = {m.incarnation for m in world.plan.outgoing}
    world.down(world.member(0, 1))
    assert (world.plan.method, world.plan.planned) == (Method.MASK, False)
    assert dropped < {m.incarnation for m in world.plan.members}
    assert len(world.plan.chains) == 1
    world.settle()
    assert world.plan.planned, "and dropped again"
    assert len(world.plan.members) == 2
    world.settle()
    world.down(world.member(0, 1))
    assert world.plan.method is not Method.MASK, "what has adopted it is not taken back"


@pytest.mark.parametrize("leaves", [False, True])
def test_who_is_dropped_may_park_before_that_is_adopted(start: Start, leaves: bool) -> None:
    world = start()
    quorum = world.plan.quorum
    if leaves:
        leave(world, world.member(3, 0).slot.pod)
    else:
        world.send(ScaleRequested(replicas=3))
    (dropped, *_) = world.plan.outgoing
    world.tell(replace(world.about(FactKind.PARKED, dropped), quorum=quorum))
    world.tick(after_s=1.0)
    assert not world.plan.planned, "the others wait for its vote"
    back = dropped.incarnation in {m.incarnation for m in world.plan.members}
    assert back is not leaves


def test_who_leaves_is_not_taken_back(start: Start) -> None:
    world = start()
    world.send(ScaleRequested(replicas=1))
    gone = world.plan.outgoing[0].slot.pod
    leave(world, gone)
    world.down(world.member(0, 1))
    assert gone not in pods_of(world.plan)


def test_a_scale_before_the_start_counts_for_the_first_plan(new_world: Start) -> None:
    world = new_world(replicas=4, stages=1)
    world.send(ScaleRequested(replicas=2))
    for i in range(2):
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    assert [c.replica for c in world.plan.chains] == [0, 1]


def test_other_numbers_of_spares_want_more_pods_or_end_free_ones(start: Start) -> None:
    world = start(spares=1)  # a ninth pod; the job's own number of spares is 0
    num_serving = plan_pods(world.state).num_pods
    world.send(ScaleRequested(spares=3))
    assert plan_pods(world.state).num_pods == num_serving + 3
    world.send(ScaleRequested(spares=0))
    wanted = plan_pods(world.state)
    assert (wanted.num_pods, len(wanted.ending)) == (num_serving, 1)
    assert world.plan.quorum.id == 1, "spares have no part in the quorum"


@pytest.mark.parametrize(
    ("event", "words"), [(ScaleRequested(), "is missing"), (ScaleRequested(spares=-1), "least 0")]
)
def test_a_scale_without_a_number_or_below_nothing_is_refused(
    start: Start, event: ScaleRequested, words: str
) -> None:
    with pytest.raises(InvalidSpecError, match=words):
        start().send(event)
