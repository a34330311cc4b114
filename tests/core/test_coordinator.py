"""What the coordinator decides, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mainstay_core import coordinator
from mainstay_core.coordinator_events import (
    FaultFired,
    Inject,
    PlanDurable,
    StepsCommitted,
    StopRequested,
    Tick,
)
from mainstay_core.errors import LocalProtocolError, RemoteProtocolError
from mainstay_core.faults import FaultAction, FaultPoint
from mainstay_core.ids import PodUid, QuorumId, Slot
from mainstay_core.jobstate import JobPhase
from mainstay_core.learning import UnregisteredPodError
from mainstay_core.messages import FactKind, Method

Start = Callable[..., Any]


# Forming --------------------------------------------------------------------


def test_first_plan_comes_when_enough_trainers_are_up(new_world: Start) -> None:
    world = new_world(replicas=2, stages=2)
    for i in range(4):
        assert world.state.plan is None
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    plan = world.plan
    assert (plan.quorum.id, plan.method, plan.planned, plan.unplanned_id) == (
        1,
        Method.START,
        False,
        1,
    )
    assert [str(m.rank) for m in plan.members] == ["r0.s0.i0", "r1.s0.i0", "r0.s1.i0", "r1.s1.i0"]
    assert [m.slot.pod for m in plan.members] == ["pod-0", "pod-2", "pod-1", "pod-3"]
    assert plan.rendezvous.gather == "pod-0:1"
    assert len(plan.suppliers) == 16


def test_pods_are_taken_in_the_order_of_their_names(new_world: Start) -> None:
    world = new_world(replicas=2, stages=1)
    for name in ("pod-10", "pod-9", "pod-2"):
        world.register(name)
    world.up("pod-10")
    world.up("pod-2")
    assert [m.slot.pod for m in world.plan.members] == ["pod-2", "pod-10"]


@pytest.mark.parametrize(("replicas", "stages", "slots"), [(4, 2, 2), (2, 3, 2), (3, 4, 3)])
def test_no_pod_has_two_cells_of_a_stage_while_avoidable(
    start: Start, replicas: int, stages: int, slots: int
) -> None:
    plan = start(replicas=replicas, stages=stages, ranks_per_pod=slots).plan
    cells = [(m.slot.pod, m.rank.stage) for m in plan.members]
    assert len(set(cells)) == len(cells)


def test_a_late_job_starts_with_fewer_replicas(new_world: Start) -> None:
    world = new_world(replicas=4, min_replicas=2, stages=2, startup_deadline_s=30.0)
    for i in range(5):
        world.register(f"pod-{i}")
        world.up(f"pod-{i}")
    world.tick(after_s=20.0)
    assert world.state.plan is None
    world.tick(after_s=20.0)
    assert [c.replica for c in world.plan.chains] == [0, 1]
    assert set(world.plan.suppliers) == {0, 1}


def test_a_job_that_never_gets_its_trainers_fails_and_says_what_is_missing(
    new_world: Start,
) -> None:
    world = new_world(replicas=2, stages=2, startup_deadline_s=30.0)
    world.register("pod-0")
    world.up("pod-0")
    world.tick(after_s=31.0)
    assert world.state.phase is JobPhase.FAILED
    ended = world.ended()
    assert "1 of the 2 trainers" in ended.reason
    assert "pod-0/0" in ended.reason


def test_a_trainer_with_other_arithmetic_is_refused_by_name(new_world: Start) -> None:
    world = new_world(replicas=2, stages=1)
    for i in range(3):
        world.register(f"pod-{i}")
    world.up("pod-0", fingerprint={"torch": "2.13", "device": "cpu"})
    world.up("pod-1", fingerprint={"torch": "2.12", "device": "cpu"})
    assert world.state.plan is None
    assert "pod-1/0 is refused" in world.messages()
    assert "torch is 2.12, the job has 2.13" in world.messages()
    world.up("pod-2", fingerprint={"torch": "2.13", "device": "cpu"})
    assert [m.slot.pod for m in world.plan.members] == ["pod-0", "pod-2"]


def test_the_fingerprint_is_fixed_by_the_first_plan(start: Start) -> None:
    world = start(replicas=2, stages=1)
    world.register("late")
    world.up("late", fingerprint={"torch": "3"})
    world.down(world.member(1, 0))
    world.settle()
    assert world.plan.method is Method.MASK
    assert [m.slot.pod for m in world.plan.members] == ["pod-0"]


# Masks ----------------------------------------------------------------------


def test_a_lost_cell_is_masked_at_once_and_its_chain_follows(start: Start) -> None:
    world = start()
    first = world.plan
    world.down(world.member(1, 0))
    plan = world.plan
    assert (plan.quorum.id, plan.method, plan.planned, plan.unplanned_id) == (
        2,
        Method.MASK,
        False,
        2,
    )
    assert [c.replica for c in plan.chains] == [0, 2, 3]
    assert [(str(m.rank), m.slot) for m in world.followers()] == [
        ("f.s1.i0", first.members[5].slot)
    ]
    assert all(c.formed_in == first.quorum for c in plan.chains)
    assert all(m.since == 1 for m in plan.members)
    assert plan.all_reduce_stack == 6
    assert world.state.phase is JobPhase.RECOVERING
    world.settle()
    assert world.state.phase is JobPhase.RUNNING


def test_a_pod_with_two_cells_is_one_fault_and_one_plan(start: Start) -> None:
    world = start(ranks_per_pod=2)
    world.pod_gone("pod-1")
    assert world.plan.quorum.id == 2
    assert len(world.plan.members) == 6
    assert [c.replica for c in world.plan.chains] == [0, 2, 3]
    assert world.recoveries()[2].fault.startswith("pod pod-1 (r1.s0.i0, r1.s1.i0) is gone")


def test_facts_told_together_are_decided_together(start: Start) -> None:
    world = start()
    lost = [world.member(1, 0), world.member(2, 1)]
    world.tell(*(world.down_fact(m) for m in lost))
    assert world.plan.quorum.id == 2
    assert [c.replica for c in world.plan.chains] == [0, 3]
    assert len(world.followers()) == 2


def test_remains_are_mated_by_the_fault_plan_only_when_no_replica_is_whole(start: Start) -> None:
    world = start(replicas=2, stages=2)
    world.tell(world.down_fact(world.member(0, 0)), world.down_fact(world.member(1, 1)))
    plan = world.plan
    assert plan.method is Method.MASK
    assert len(plan.chains) == 1
    assert plan.chains[0].formed_in == plan.quorum
    assert not world.followers()
    assert set(plan.suppliers) == {plan.chains[0].replica}


def test_all_but_one_replica_may_be_lost_at_once(start: Start) -> None:
    world = start()
    lost = [m for m in world.plan.members if m.rank.replica != 2]
    world.tell(*(world.down_fact(m) for m in lost))
    assert [c.replica for c in world.plan.chains] == [2]
    assert set(world.plan.suppliers) == {2}


def test_telling_a_death_twice_changes_nothing(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    world.down(victim)
    after = world.state
    world.down(victim)
    world.pod_gone("no-such-pod")
    assert world.state == after


def test_a_trainer_that_restarted_unnoticed_does_not_enter_the_old_quorum(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    life = world.up(victim.slot.pod)
    assert world.plan.quorum.id == 2
    assert all(m.incarnation not in (victim.incarnation, life) for m in world.plan.members)
    world.settle()
    assert world.plan.member_of(victim.slot, life).since == 3


def test_a_new_supervisor_on_a_pod_means_that_its_trainers_ended(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    world.register(victim.slot.pod, pid=2)
    assert world.plan.quorum.id == 2
    assert victim.slot not in {m.slot for m in world.plan.members}


def test_a_late_report_of_an_ended_trainer_does_not_revive_it(start: Start) -> None:
    world = start()
    victim = world.member(1, 0)
    world.down(victim)
    world.up(victim.slot.pod, life=victim.incarnation)
    assert world.state.slot(victim.slot).incarnation is None


# Rows 4 and 6 -----------------------------------------------------------------


def test_a_stage_without_a_cell_restarts_from_free_trainers(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    world.commit()
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    plan = world.plan
    assert plan.method is Method.RESTART
    assert [c.replica for c in plan.chains] in ([0], [1])
    joiner = next(m for m in plan.members if m.joining)
    assert (joiner.slot.pod, joiner.since) == ("spare-0", plan.quorum.id)
    assert all(m.since == 1 for m in plan.members if not m.joining)
    world.settle(step=0)
    assert world.state.step == 0
    world.commit(step=0)
    recovery = world.recoveries()[plan.quorum.id]
    assert (recovery.method, recovery.exact, recovery.lost_steps, recovery.done) == (
        Method.RESTART,
        True,
        1,
        True,
    )


def test_commits_of_before_a_restart_do_not_count(start: Start) -> None:
    world = start(spares=1, replicas=1, stages=2)
    old = world.plan.quorum
    world.commit()
    world.commit()
    world.down(world.member(0, 1))
    world.settle(step=0)
    world.commit(step=1, quorum=old)
    assert world.state.step == 0


def test_without_a_free_trainer_the_job_waits_and_says_for_what(start: Start) -> None:
    world = start(replicas=1, stages=2)
    victim = world.member(0, 1)
    world.down(victim, restarting=True)
    assert world.state.phase is JobPhase.WAITING
    assert "stage 1 has no living cell" in world.state.waiting.reason
    assert world.plan.quorum.id == 1
    life = world.up(victim.slot.pod)
    assert world.plan.method is Method.RESTART
    assert world.plan.member_of(victim.slot, life) is not None
    assert world.state.waiting is None


def test_a_wait_has_a_deadline(start: Start) -> None:
    world = start(replicas=1, stages=2, startup_deadline_s=30.0)
    world.down(world.member(0, 1))
    world.tick(after_s=29.0)
    assert world.state.phase is JobPhase.WAITING
    world.tick(after_s=2.0)
    assert world.state.phase is JobPhase.FAILED
    assert "stage 1" in world.ended().reason


def test_more_losses_while_waiting_are_recovered_together(start: Start) -> None:
    world = start(replicas=2, stages=2)
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))
    world.down(world.member(0, 0))
    assert world.state.phase is JobPhase.WAITING
    world.register("new")
    world.up("new")
    assert world.plan.method is Method.RESTART
    assert len(world.plan.members) == 2
    assert world.recoveries()[2].fault.count("ended") == 3


def test_a_silent_pod_that_is_heard_again_may_end_the_wait(start: Start) -> None:
    world = start(replicas=1, stages=2)
    silent = world.member(0, 1)
    world.tick(**{silent.slot.pod: 99.0})
    assert world.state.phase is JobPhase.WAITING
    world.register(silent.slot.pod)
    world.up(silent.slot.pod, life=silent.incarnation)
    assert world.plan.quorum.id == 2
    assert world.plan.member_of(silent.slot, silent.incarnation) is not None


# Suspicion ------------------------------------------------------------------


def test_a_failed_collective_without_evidence_forms_the_same_quorum_again(start: Start) -> None:
    world = start()
    before = world.plan
    world.park(world.member(0, 0), world.member(1, 0).slot)
    world.park(world.member(2, 0), world.member(1, 0).slot)
    assert world.plan == before
    world.tick(after_s=0.4)
    plan = world.plan
    assert (plan.method, plan.planned, plan.quorum.id) == (Method.REFORM, False, 2)
    assert [m.slot for m in plan.members] == [m.slot for m in before.members]
    assert all(c.formed_in == before.quorum for c in plan.chains)
    assert plan.rendezvous.pod != before.rendezvous.pod


def test_a_slot_suspected_twice_is_left_out(start: Start) -> None:
    world = start()
    suspect = world.member(1, 0)
    for _ in range(2):
        world.park(world.member(0, 0), suspect.slot)
        world.tick(after_s=1.0)
    assert world.plan.method is Method.MASK
    assert suspect.slot not in {m.slot for m in world.plan.members}
    world.settle()
    assert world.plan.method is Method.MASK, "an excluded slot is held back"
    world.tick(after_s=60.0)
    assert world.plan.method is Method.JOIN


def test_a_commit_clears_suspects(start: Start) -> None:
    world = start()
    suspect = world.member(1, 0)
    world.park(world.member(0, 0), suspect.slot)
    world.tick(after_s=1.0)
    world.settle()
    world.commit()
    world.park(world.member(0, 0), suspect.slot)
    world.tick(after_s=1.0)
    assert world.plan.method is Method.REFORM


def test_who_parked_itself_is_not_left_out(start: Start) -> None:
    world = start()
    one, other = world.member(0, 0), world.member(1, 0)
    for _ in range(2):
        world.park(one, other.slot)
        world.park(other, one.slot)
        world.tick(after_s=1.0)
    assert world.plan.method is Method.REFORM
    assert len(world.plan.members) == 8


def test_evidence_during_the_probe_makes_a_mask_and_dates_the_first_fact(start: Start) -> None:
    world = start()
    world.park(world.member(0, 0), world.member(1, 0).slot)
    first_fact_s = world.now_s
    world.down(world.member(1, 0))
    assert world.plan.method is Method.MASK
    decide_s = world.recoveries()[2].times.decide_s
    assert decide_s == pytest.approx(world.now_s - first_fact_s)


def test_parked_in_an_older_quorum_is_stale(start: Start) -> None:
    world = start()
    old = world.plan.quorum
    world.down(world.member(1, 0))
    world.settle()
    assert world.park(world.member(0, 0), quorum=old).stale
    assert world.park(world.member(0, 0), quorum=QuorumId(id=2, nonce="other")).stale
    world.tick(after_s=1.0)
    assert world.plan.quorum.id == 2


def test_parked_below_a_planned_plan_is_helped(start: Start) -> None:
    """A planned plan interrupts nobody, so it cannot bring a broken quorum together again."""
    world = start(spares=1)
    world.down(world.member(1, 0))
    world.settle()
    assert world.plan.planned
    below = QuorumId(id=2, nonce=next(c.formed_in.nonce for c in world.plan.chains))
    mask = world.recoveries()[2].quorum
    assert below.nonce
    assert not world.park(world.member(0, 0), quorum=mask).stale
    world.tick(after_s=1.0)
    assert (world.plan.method, world.plan.planned) == (Method.REFORM, False)
    assert world.plan.unplanned_id == world.plan.quorum.id == 4
    assert any(m.joining for m in world.plan.members)


# Joins ----------------------------------------------------------------------


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
    for _ in range(3):
        member = next(m for m in world.plan.members if m.slot.pod == pod)
        world.down(member, restarting=True)
        world.settle()
        world.up(pod)
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


# The end --------------------------------------------------------------------


def test_the_job_is_complete_when_all_have_finished(start: Start) -> None:
    world = start(replicas=2, stages=2)
    for member in world.plan.members[:-1]:
        world.finish(member)
        assert not world.state.terminal
    world.finish(world.plan.members[-1])
    assert world.state.phase is JobPhase.COMPLETE
    assert [f.stage for f in world.state.finals] == [0, 1]


def test_a_death_after_every_stage_has_finished_does_not_hang_the_job(start: Start) -> None:
    world = start(replicas=2, stages=2)
    slow = world.member(1, 1)
    for member in world.plan.members:
        if member != slow:
            world.finish(member)
    world.down(slow)
    assert world.state.phase is JobPhase.COMPLETE


def test_a_trainer_that_leaves_after_it_finished_is_no_fault(start: Start) -> None:
    world = start(replicas=2, stages=1)
    one, other = world.plan.members
    world.finish(one)
    world.down(one)
    assert world.plan.quorum.id == 1
    world.finish(other)
    assert world.state.phase is JobPhase.COMPLETE


def test_a_joiner_that_came_too_late_is_not_waited_for(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=1)
    world.down(world.member(1, 0))
    world.settle()
    below = world.recoveries()[2].quorum
    stayed = world.member(0, 0)
    assert any(m.joining for m in world.plan.members)
    world.tell(world.about(FactKind.FINISHED, stayed, quorum=below))
    assert not world.state.terminal
    world.finish(stayed)
    assert not world.state.terminal, "told twice, the digests came too late"


def test_cells_of_a_stage_that_end_differently_are_announced(start: Start) -> None:
    world = start(replicas=2, stages=1)
    world.finish(world.member(0, 0))
    world.finish(world.member(1, 0), masters="other")
    assert "DigestMismatch" in world.announced()


def test_a_user_error_fails_the_job_with_its_words(start: Start) -> None:
    world = start()
    world.tell(world.about(FactKind.FAILED, world.member(0, 0), evidence="no module named x"))
    assert world.state.phase is JobPhase.FAILED
    assert "no module named x" in world.ended().reason


def test_a_stopped_job_accepts_whatever_still_arrives(start: Start) -> None:
    world = start()
    world.send(StopRequested())
    after = world.state
    world.down(world.member(0, 0))
    world.tick()
    world.commit()
    assert world.state == after
    assert after.phase is JobPhase.STOPPED


# Times and records ----------------------------------------------------------


def test_the_five_times_of_a_recovery(start: Start) -> None:
    world = start()
    world.commit()
    victim = world.member(1, 0)
    world.now_s = 100.0
    world.send(
        FaultFired(fault="f", pod=victim.slot.pod, slot=0, rank=str(victim.rank), at_s=99.5)
    ) if False else None
    world.tell(
        world.fact(
            FactKind.TRAINER_DOWN,
            victim.slot.pod,
            incarnation=victim.incarnation,
            observed_at_s=100.0,
        ),
        after_s=0.5,
    )
    plan = world.plan
    world.send(PlanDurable(quorum=plan.quorum, at_s=100.75))
    for member in plan.members:
        world.tell(world.about(FactKind.ADOPTED, member, step=1, observed_at_s=101.0))
    for member in plan.members:
        world.tell(world.about(FactKind.SETTLED, member, step=1, observed_at_s=101.5))
    world.send(StepsCommitted(step=1, quorum=plan.quorum, committed_at_s=103.5, step_s=2.0))
    recovery = world.recoveries()[2]
    times = recovery.times
    assert (times.detect_s, times.decide_s, times.fence_s, times.load_s, times.resume_s) == (
        0.5,
        0.25,
        0.25,
        0.5,
        2.0,
    )
    assert recovery.first_commit_after_s == pytest.approx(3.5 - 0.01)
    assert recovery.done
    assert recovery.from_step == 1
    assert recovery.slots == (victim.slot,)
    assert "r1.s0.i0" in recovery.fault
    assert victim.slot.pod in recovery.fault


def test_an_injected_fault_dates_the_death(start: Start) -> None:
    fault = FaultPoint(id="f0", step=1, action=FaultAction.KILL_TRAINER, replica=1, stage=0)
    world = start(faults=(fault,))
    victim = world.member(1, 0)
    pod = PodUid(victim.slot.pod)
    fired = FaultFired(fault="f0", pod=pod, slot=0, rank="r1.s0.i0", at_s=world.now_s)
    world.send(fired)
    world.tell(world.down_fact(victim), after_s=0.25)
    assert world.recoveries()[2].times.detect_s == pytest.approx(0.26)
    assert world.plan.faults_fired == ("f0",)


def test_a_fault_fires_once_but_the_one_allowed_may_ask_again(start: Start) -> None:
    fault = FaultPoint(id="f0", step=1, action=FaultAction.KILL_TRAINER, replica=1, stage=0)
    world = start(faults=(fault,))
    fired = FaultFired(fault="f0", pod=PodUid("pod-2"), slot=0, rank="r1.s0.i0", at_s=5.0)
    world.send(fired)
    world.send(fired)
    with pytest.raises(RemoteProtocolError, match="already fired"):
        world.send(FaultFired(fault="f0", pod=PodUid("pod-3"), slot=0, rank=None, at_s=6.0))
    with pytest.raises(RemoteProtocolError, match="no fault"):
        world.send(FaultFired(fault="f1", pod=PodUid("pod-3"), slot=0, rank=None, at_s=6.0))


def test_a_fault_on_a_spare_is_handed_to_its_pod_at_its_step(start: Start) -> None:
    fault = FaultPoint(id="f0", step=1, action=FaultAction.KILL_POD, spare=0)
    world = start(spares=1, faults=(fault,))
    world.tick()
    assert not [a for a in world.actions if isinstance(a, Inject)]
    world.commit()
    world.commit()
    assert [a.pod for a in world.actions if isinstance(a, Inject)] == ["spare-0"]


def test_a_join_is_recorded_with_what_it_repairs(start: Start) -> None:
    world = start(spares=1)
    world.down(world.member(1, 0))
    world.settle()
    world.settle()
    world.commit()
    assert {q: (r.method, r.done) for q, r in world.recoveries().items()} == {
        2: (Method.MASK, True),
        3: (Method.JOIN, True),
    }
    assert "spare-0/0" in world.recoveries()[3].reason


def test_two_faults_in_a_row_are_both_timed_to_the_next_commit(start: Start) -> None:
    world = start()
    world.down(world.member(1, 0))
    world.down(world.member(2, 0))
    world.settle()
    world.commit()
    assert all(r.done and r.times.resume_s is not None for r in world.recoveries().values())
    assert len(world.recoveries()) >= 2


# The table ------------------------------------------------------------------


def test_an_illegal_event_raises_and_changes_nothing(new_world: Start) -> None:
    world = new_world()
    with pytest.raises(RemoteProtocolError, match="forming accepts no StepsCommitted"):
        world.send(StepsCommitted(step=0, quorum=QuorumId(id=1, nonce="x"), committed_at_s=0.0))
    with pytest.raises(LocalProtocolError):
        world.send(PlanDurable(quorum=QuorumId(id=1, nonce="x"), at_s=0.0))


def test_a_pod_that_did_not_register_is_told_to(start: Start) -> None:
    world = start()
    with pytest.raises(UnregisteredPodError, match="register it"):
        world.up("stranger")
    world.pod_gone("pod-3")
    with pytest.raises(UnregisteredPodError, match="counts as gone"):
        world.up("pod-3")


def test_a_commit_of_a_newer_quorum_than_the_plan_is_refused(start: Start) -> None:
    world = start()
    with pytest.raises(RemoteProtocolError, match="newer than the plan"):
        world.commit(quorum=QuorumId(id=9, nonce="x"))


def test_silence_is_measured_against_the_others(start: Start) -> None:
    world = start(heartbeat_timeout_s=15.0)
    world.tick(**{"pod-1": 14.0})
    assert world.plan.quorum.id == 1
    world.tick(**{"pod-1": 16.0})
    assert world.plan.quorum.id == 2
    assert "silent for 16.0 s" in world.recoveries()[2].fault


def test_a_quiet_tick_changes_nothing(start: Start) -> None:
    world = start()
    before = world.state
    assert coordinator.step(before, Tick(), world.now_s + 1, "n").state == before
    assert not coordinator.is_pending(before)


def test_the_state_survives_the_store(start: Start) -> None:
    world = start(spares=1)
    world.park(world.member(0, 0), Slot(pod=PodUid("pod-2"), index=0))
    world.stored()
    world.down(world.member(1, 0))
    world.stored()
    world.settle()
    world.stored()
