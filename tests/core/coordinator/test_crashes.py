"""The same exception at the same step fails the job, however many commits lie between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.worlds.pods import PlayedPods

from mainstay_core.base import codec
from mainstay_core.coordinator.intake.crashes import MAX_KINDS
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Member, Method

Start = Callable[..., Any]
FRAME = "/job/data.py:12 in read"


def crash_fact(world: PlayedPods, member: Member, step: int, **fields: Any) -> Any:
    crash = Crash(
        **{
            "type": "OSError",
            "message": f"no file, tried by {member.rank}",
            "frames": (FRAME,),
            "rank": member.rank,
            "quorum": world.plan.quorum,
            "step": step,
            **fields,
        }
    )
    return world.about(
        FactKind.TRAINER_DOWN,
        member,
        restarting=True,
        crash=crash,
        evidence=crash.describe(),
    )


def fail_together(world: PlayedPods, step: int, **fields: Any) -> None:
    """Every member fails at the step; all restart, and the steps before it are done again."""
    members = world.plan.members
    facts = [crash_fact(world, m, step, **fields) for m in members]
    world.tell(*facts)
    if world.state.terminal:
        return
    for member in members:
        world.up(member.slot.pod, member.slot.index)
    world.tick(after_s=600.0)
    assert world.plan.method is Method.RESTART
    while not all(m.index in world.state.settled_at_s for m in world.plan.members):
        world.settle(0)
    while world.state.step < step:
        world.commit()
        world.settle()


def test_an_exception_that_comes_back_at_its_step_fails_the_job_though_steps_are_committed(
    start: Start,
) -> None:
    world = start(replicas=2, stages=1, max_restarts=3)
    world.commit()
    for attempt in range(1, 4):
        fail_together(world, 1)
        assert not world.state.terminal, f"attempt {attempt}"
        assert world.state.crash.times == attempt
    fail_together(world, 1)
    assert world.state.phase is JobPhase.FAILED
    reason = world.ended().reason
    assert reason.startswith("4 tries of step 1 ended with the same exception")
    assert "recovery.maxRestarts is 3" in reason
    assert "OSError: no file, tried by r" in reason
    assert FRAME in reason
    assert reason in world.messages()


def test_all_trainers_that_it_ends_in_one_quorum_are_one_attempt(start: Start) -> None:
    world = start(replicas=4, stages=2, max_restarts=3)
    facts = [crash_fact(world, m, 0) for m in world.plan.members]
    world.tell(*facts[:3])
    world.tell(*facts)
    assert not world.state.terminal
    assert world.state.crash.times <= 2, "a plan may have come between"


def test_a_replica_that_takes_the_step_over_and_ends_alike_is_another_attempt(start: Start) -> None:
    world = start(replicas=4, stages=1, max_restarts=2)
    for replica in range(3):
        assert not world.state.terminal
        world.tell(crash_fact(world, world.member(replica, 0), 0))
        world.settle()
    assert world.state.phase is JobPhase.FAILED


def test_a_step_that_others_commit_is_overcome(start: Start) -> None:
    world = start(replicas=3, stages=1, max_restarts=1)
    for _ in range(6):
        victim = world.plan.members[-1]
        world.tell(crash_fact(world, victim, world.state.step))
        world.settle()
        world.commit()
        assert world.state.crashes == ()
        world.up(victim.slot.pod)
        world.tick(after_s=10.0)
        world.settle()
        world.commit()
    assert world.state.phase is JobPhase.RUNNING
    assert world.state.crash.crash.step == 10


def test_other_exceptions_at_the_step_are_counted_apart_and_not_without_bound(
    start: Start,
) -> None:
    world = start(replicas=2, stages=1, max_restarts=100)
    for number in range(MAX_KINDS + 3):
        world.settle()
        victim = world.plan.members[-1]
        world.tell(crash_fact(world, victim, 0, type=f"Error{number}"))
        world.up(victim.slot.pod)
        world.tick(after_s=100.0)
    assert not world.state.terminal
    assert len(world.state.crashes) == MAX_KINDS


def test_one_failure_is_no_repetition_even_where_no_restart_is_wanted(start: Start) -> None:
    world = start(replicas=3, stages=1, max_restarts=0)
    world.tell(crash_fact(world, world.member(0, 0), 0))
    assert not world.state.terminal
    world.settle()
    world.tell(crash_fact(world, world.member(1, 0), 0))
    assert world.state.phase is JobPhase.FAILED


def test_a_crash_that_is_told_after_the_end_counts_and_told_again_changes_nothing(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1)
    victim = world.member(0, 0)
    fact = crash_fact(world, victim, 0)
    world.down(victim, restarting=True)
    assert world.state.crash is None
    world.tell(fact)
    assert f"had ended: {fact.evidence}" in world.messages()
    known = world.state
    assert known.crash.trainer == f"{victim.slot.pod}/0"
    world.tell(fact)
    assert world.state.crash == known.crash
    assert world.state.crashes == known.crashes


def test_before_the_first_plan_attempts_are_left_to_the_slots_restarts(new_world: Start) -> None:
    world = new_world(replicas=1, stages=1, lanes=1, max_restarts=1)
    world.register("pod-0")
    for number in range(5):
        crash = Crash(type="ImportError", message="no module", frames=(FRAME,))
        fact = world.fact(FactKind.TRAINER_DOWN, "pod-0", incarnation=f"x{number}", crash=crash)
        world.tell(fact)
    assert not world.state.terminal
    assert world.state.crash.crash == crash


def test_the_exception_of_a_trainer_that_cannot_go_on_is_kept(start: Start) -> None:
    world = start(replicas=2, stages=1)
    crash = Crash(type="ValueError", message="two labels", frames=(FRAME,), step=0)
    world.tell(world.about(FactKind.FAILED, world.member(1, 0), evidence="x", crash=crash))
    assert world.state.phase is JobPhase.FAILED
    assert world.state.crash.crash == crash


def test_a_state_that_was_stored_before_is_read(start: Start) -> None:
    data = codec.encode(start(replicas=2, stages=1).state)
    del data["crash"], data["crashes"]
    read = codec.decode(CoordinatorState, data)
    assert (read.crash, read.crashes) == (None, ())
