"""How jobs end, what is recorded, and what is refused, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import PodUid, QuorumId, Slot
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    FaultFired,
    Inject,
    PlanStored,
    StepsCommitted,
    StopRequested,
    Tick,
)
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.dmr.flips import Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]


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
    assert world.state.phase is JobPhase.COMPLETE


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
    world.now_s = 99.0
    world.commit()
    victim = world.member(1, 0)
    world.now_s = 100.0
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
    world.send(PlanStored(quorum=plan.quorum, at_s=100.75))
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
    # By the ledger: 4.5 s passed between two commits, and a step takes 0.01 s.
    assert recovery.first_commit_after_s == pytest.approx(4.5 - 0.01)
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


@pytest.mark.parametrize(
    "harmless",
    [
        {"action": FaultAction.SLOW, "slow_ms": 5.0},
        {"action": FaultAction.FLIP, "flip": Flip(in_pass=Pass.FORWARD, element=0, bit=0)},
    ],
)
def test_a_fault_that_harms_no_process_explains_no_death(
    start: Start, harmless: dict[str, Any]
) -> None:
    fault = FaultPoint(id="f0", step=1, replica=1, stage=0, **harmless)
    world = start(faults=(fault,))
    victim = world.member(1, 0)
    pod = PodUid(victim.slot.pod)
    long_ago_s = world.now_s - 100.0
    world.send(FaultFired(fault="f0", pod=pod, slot=0, rank="r1.s0.i0", at_s=long_ago_s))
    world.tell(world.down_fact(victim))

    (recovery,) = world.recoveries().values()
    assert recovery.times.detect_s < 1.0


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


# Silence --------------------------------------------------------------------


def fall_silent(world: Any, pod: str, silent_s: float, *, behind_s: float | None = None) -> None:
    lag_s = silent_s if behind_s is None else behind_s
    world.now_s += 0.01
    heard_at_s = world.now_s - silent_s
    world.send(Tick(behind_s={pod: lag_s}, heard_at_s={pod: heard_at_s}), after_s=0.0)


def go_on(world: Any) -> Any:
    """Settle and commit; return the recovery of the newest quorum but joins."""
    quorum = world.plan.quorum
    for kind in (FactKind.ADOPTED, FactKind.SETTLED):
        for member in world.plan.members:
            world.tell(world.about(kind, member, quorum=quorum, step=world.state.step))
    world.commit(quorum=quorum)
    return world.recoveries()[quorum.id]


def test_a_silent_pod_is_lost_since_its_last_sign_of_life(start: Start) -> None:
    world = start(heartbeat_timeout_s=15.0)
    world.now_s = 100.0
    world.commit()
    world.now_s = 117.0
    fall_silent(world, "pod-1", 16.5)
    recovery = go_on(world)
    times = recovery.times
    assert times.detect_s == pytest.approx(16.5)
    assert recovery.started_at_s == pytest.approx(117.01 - 16.5)
    told_s = sum(s for s in times.by_stage.values() if s is not None)
    last = world.state.last_commit
    assert recovery.started_at_s + told_s == pytest.approx(last.at_s)
    assert recovery.first_commit_after_s == pytest.approx(last.at_s - 100.0 - 0.01)


def test_a_silence_through_an_outage_began_before_the_outage(start: Start) -> None:
    """Nobody counts as silent for that long, but nobody heard of the pod since."""
    world = start(heartbeat_timeout_s=15.0)
    world.commit()
    world.now_s = 200.0
    fall_silent(world, "pod-1", 76.0, behind_s=16.0)
    assert go_on(world).times.detect_s == pytest.approx(76.0)


def test_a_commit_is_a_sign_of_life_of_all_who_voted(start: Start) -> None:
    """Its way to the api is cut, not the others' way to it: nobody has waited for it."""
    world = start(heartbeat_timeout_s=15.0)
    world.commit()
    world.now_s = 100.0
    fall_silent(world, "pod-1", 10.0)
    world.now_s = 105.0
    world.commit()
    world.now_s = 106.0
    fall_silent(world, "pod-1", 16.0)
    recovery = go_on(world)
    assert recovery.started_at_s == pytest.approx(105.0)
    assert recovery.times.detect_s == pytest.approx(1.01)


def test_a_commit_without_a_pod_is_no_sign_of_its_life(start: Start) -> None:
    world = start(spares=1, heartbeat_timeout_s=15.0)
    world.down(world.member(1, 0))
    world.settle()
    below = world.recoveries()[2].quorum
    (joiner,) = (m for m in world.plan.members if m.joining)
    world.now_s = 100.0
    fall_silent(world, joiner.slot.pod, 10.0)
    world.now_s = 105.0
    world.commit(quorum=below)
    fall_silent(world, joiner.slot.pod, 16.0)
    assert world.recoveries()[4].started_at_s == pytest.approx(100.01 - 10.0)


def test_whoever_tells_of_a_silent_pods_end_it_is_lost_since_it_was_silent(start: Start) -> None:
    world = start(heartbeat_timeout_s=60.0)
    world.now_s = 100.0
    world.commit()
    world.now_s = 141.0
    fall_silent(world, "pod-1", 40.0)
    assert world.plan.quorum.id == 1
    world.pod_gone("pod-1")
    recovery = go_on(world)
    assert recovery.started_at_s == pytest.approx(101.01)
    assert recovery.times.detect_s == pytest.approx(40.01)


def test_a_supervisor_that_comes_back_after_a_silence_was_away_since_it_began(start: Start) -> None:
    world = start(heartbeat_timeout_s=60.0)
    world.now_s = 100.0
    world.commit()
    world.now_s = 141.0
    fall_silent(world, "pod-1", 40.0)
    world.register("pod-1", pid=2)
    assert world.recoveries()[2].started_at_s == pytest.approx(101.01)
    assert world.state.pod(PodUid("pod-1")).silent_since_s == 0.0


def test_a_silence_that_is_over_dates_nothing(start: Start) -> None:
    world = start(heartbeat_timeout_s=60.0)
    world.now_s = 100.0
    world.commit()
    world.now_s = 141.0
    fall_silent(world, "pod-1", 40.0)
    # Another replica watches from now on: it has counted no lag yet, but knows who was not heard.
    fall_silent(world, "pod-1", 41.0, behind_s=0.0)
    assert world.state.pod(PodUid("pod-1")).silent_since_s == pytest.approx(101.01)
    fall_silent(world, "pod-1", 0.2, behind_s=0.0)
    world.pod_gone("pod-1")
    assert world.recoveries()[2].started_at_s == pytest.approx(world.now_s, abs=0.1)


def test_a_commit_that_is_told_late_makes_no_later_one_late(start: Start) -> None:
    world = start()
    quorum = world.plan.quorum
    world.now_s = 100.0
    world.commit()
    world.now_s = 110.0
    world.down(world.member(1, 0))
    world.send(StepsCommitted(step=2, quorum=quorum, committed_at_s=109.0, step_s=0.01))
    world.send(StepsCommitted(step=1, quorum=quorum, committed_at_s=108.0, step_s=0.01))
    recovery = go_on(world)
    late_s = world.state.last_commit.at_s - 109.0 - 0.01
    assert recovery.first_commit_after_s == pytest.approx(late_s)


# The table ------------------------------------------------------------------


def test_an_illegal_event_raises_and_changes_nothing(new_world: Start) -> None:
    world = new_world()
    before = world.state
    with pytest.raises(RemoteProtocolError, match="forming accepts no StepsCommitted"):
        world.send(StepsCommitted(step=0, quorum=QuorumId(id=1, nonce="x"), committed_at_s=0.0))
    assert world.state == before


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
    assert machine.step(before, Tick(), world.now_s + 1, "n").state == before
    assert not machine.is_pending(before)


def test_the_state_survives_the_store(start: Start) -> None:
    world = start(spares=1)
    world.park(world.member(0, 0), Slot(pod=PodUid("pod-2"), index=0))
    world.stored()
    world.down(world.member(1, 0))
    world.stored()
    world.settle()
    world.stored()
