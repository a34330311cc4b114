"""Rows 3 and 5 in one job: pods' memory first, then what other stages give, with permission."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    ApproximationAllowed,
    PlanReported,
    StepsCommitted,
    Tick,
)
from mainstay_core.coordinator.intake.facts import MAX_ASKS
from mainstay_core.coordinator.lineage import show_lineage
from mainstay_core.coordinator.permission import judge_permission
from mainstay_core.job.config import ApproximateConfig, SnapshotConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.rank.forks.histories import tell_history
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method
from mainstay_core.wire.reinitialisation import BlockOutline, Fork, Outline, Reinitialisation

Start = Callable[..., Any]
SNAPSHOTS = SnapshotConfig(memory_bytes=1 << 30)
ALLOWED = ApproximateConfig(after_lost_steps=2)
OUTLINE: Outline = tuple((BlockOutline(name=f"layers.{i}", kind="layer"),) for i in range(3))
FORKED = tell_history(
    (Fork(version=5, chain="c", made=Reinitialisation(positions=(), reason="so")),), made=True
)


def job(start: Start, spares: int = 2, **how: Any) -> Any:
    """One replica of three stages with stores, which has committed five steps."""
    world = start(spares=spares, replicas=1, lanes=1, stages=3, snapshots=SNAPSHOTS, **how)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=OUTLINE))
    for _ in range(5):
        world.commit()
    return world


@pytest.fixture
def world(start: Start) -> Any:
    return job(start, approximate=ALLOWED)


def lose(world: Any, stage: int) -> None:
    world.tell(world.down_fact(world.member(0, stage)))


def ask(world: Any, wait_s: float = 10.0, **how: Any) -> None:
    """All members have found that no store brings the stage back."""
    how |= {"unreached": True, "evidence": "unit 0 of position 1 has gaps"}
    world.tell(*(world.about(FactKind.PARKED, m, **how) for m in world.plan.members))
    world.tick(wait_s)


def newest(world: Any) -> Any:
    return [*world.recoveries().values()][-1]


def test_what_pods_keep_comes_first_and_its_members_ask_before_they_go_back(world: Any) -> None:
    lose(world, 1)

    plan = world.plan
    assert (plan.method, plan.fork, plan.lineage) == (Method.REPLAY, None, 0)
    assert plan.asks_first
    assert "if these are not complete, go on as the next rows say" in plan.reason
    world.settle(step=5)
    world.commit(step=5)
    assert (newest(world).method, newest(world).exact) == (Method.REPLAY, True)


def test_where_no_store_brings_a_stage_back_it_is_made_anew_of_others(world: Any) -> None:
    lose(world, 1)
    ask(world)

    plan = world.plan
    assert (plan.method, plan.lineage, plan.fork.positions) == (Method.APPROXIMATE, 1, (1,))
    assert not plan.asks_first
    assert newest(world).fault == "no store brings back what is lost: unit 0 of position 1 has gaps"
    world.settle(step=5, history=FORKED)
    world.commit(step=5)
    assert (newest(world).approximate_since, newest(world).lost_steps) == (5, 0)
    world.stored()
    lose(world, 1)
    assert (world.plan.method, world.plan.lineage) == (Method.REPLAY, 1), "kept since the fork"


def test_members_ask_again_where_a_store_did_not_answer(world: Any) -> None:
    """It may have a complete window. What answers then counts."""
    lose(world, 1)
    ask(world, unasked=True)
    assert (world.plan.method, world.plan.asks_first) == (Method.REFORM, True)
    assert "not all is known of what pods keep" in world.plan.reason
    ask(world)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def test_a_store_that_never_answers_counts_as_empty_in_the_end(world: Any) -> None:
    lose(world, 1)
    methods = []
    for _ in range(MAX_ASKS + 1):
        ask(world, 1000.0, unasked=True)
        methods.append(world.plan.method)
    assert methods == [*[Method.REFORM] * MAX_ASKS, Method.APPROXIMATE]


def cut_off(world: Any, stage: int) -> Any:
    """The only holder of a stage falls silent, and another trainer has its place."""
    silent = world.member(0, stage)
    world.tick(**{silent.slot.pod: 99.0})
    assert (world.plan.method, world.plan.asks_first) == (Method.REPLAY, True)
    return silent


def hear(world: Any, member: Any) -> None:
    world.register(member.slot.pod)
    world.up(member.slot.pod, life=member.incarnation)


def test_a_holder_that_was_cut_off_is_taken_back_before_its_stage_is_made_anew(world: Any) -> None:
    silent = cut_off(world, 1)
    hear(world, silent)
    ask(world)

    plan = world.plan
    assert (plan.method, plan.lineage, plan.fork, plan.asks_first) == (Method.REFORM, 0, None, True)
    back = plan.member_of(silent.slot, silent.incarnation)
    assert (back.rank.position, back.rank.replica, back.joining) == ((1, 0), None, True)
    world.settle(step=5)
    world.commit(step=5)
    assert newest(world).exact


def test_a_holder_that_comes_back_without_its_state_is_taken_back_once(world: Any) -> None:
    silent = cut_off(world, 1)
    hear(world, silent)
    ask(world)
    ask(world)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def test_another_life_on_the_slot_of_who_was_cut_off_has_no_state(world: Any) -> None:
    silent = cut_off(world, 1)
    world.register(silent.slot.pod)
    world.up(silent.slot.pod)
    ask(world)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def test_who_waits_after_it_asked_never_meets_without_an_answer(start: Start) -> None:
    """A plan that only repeats the one before would have all load the seed."""
    world = job(start, spares=1, approximate=ALLOWED)
    lose(world, 1)
    ask(world, 0.0)
    joiner = world.member(0, 1)
    world.tick(**{joiner.slot.pod: 99.0})
    assert world.state.phase is JobPhase.WAITING
    world.register(joiner.slot.pod)
    world.up(joiner.slot.pod, life=joiner.incarnation)
    world.tick(10.0)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def test_a_rival_plan_does_not_bring_those_together_who_have_asked(world: Any) -> None:
    lose(world, 1)
    ask(world, 0.0)
    world.state = replace(world.state, rivals=("x",), suspicion=None)
    world.tick(10.0)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def lose_store(world: Any, *, are_told: bool = True) -> None:
    """The api's store has lost the job, and hears of it by its members' pods again."""
    plan, step = world.plan, world.state.step
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=step))
    for member in plan.members:
        world.register(member.slot.pod)
        if are_told:
            world.up(member.slot.pod, life=member.incarnation, outline=OUTLINE)
    world.send(Tick(heard=world.state.unheard))


def test_a_store_that_is_lost_while_members_ask_costs_no_steps(world: Any) -> None:
    """Nobody has gone back in that plan: what was committed before it counts."""
    before = world.plan.quorum
    lose(world, 1)
    lose_store(world)
    told = {"committed_at_s": world.now_s, "step_s": 0.01}
    world.send(StepsCommitted(step=world.state.step - 1, quorum=before, **told))
    ask(world)
    assert (world.plan.method, world.state.step) == (Method.APPROXIMATE, 5)
    lose(world, 1)
    assert (world.plan.method, world.state.step) == (Method.APPROXIMATE, 5)


def test_members_that_have_asked_are_answered_once_one_has_told_of_its_blocks(world: Any) -> None:
    """Their word reaches a store that lost the job before it knows of what the stages consist."""
    lose(world, 1)
    before = world.plan
    lose_store(world, are_told=False)
    ask(world)
    assert world.plan == before, "no restart for want of what the next fact tells"
    assert "of what blocks the stages consist" in world.state.waiting.reason
    first = before.members[0]
    world.up(first.slot.pod, life=first.incarnation, outline=OUTLINE)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def test_trainers_that_tell_of_no_blocks_are_waited_for_no_longer(world: Any) -> None:
    lose(world, 1)
    before = world.plan
    lose_store(world, are_told=False)
    ask(world)
    for member in before.members:
        assert world.plan == before
        world.up(member.slot.pod, life=member.incarnation)
    assert world.plan.method is Method.RESTART


def test_a_store_that_falls_back_does_not_know_what_members_told_since(world: Any) -> None:
    lose(world, 1)
    ask(world, 0.0)
    newer = replace(world.plan.quorum, id=world.plan.quorum.id + 2)
    plan = replace(world.plan, quorum=newer, unplanned_id=newer.id)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=5))
    assert not world.state.unreached


def test_a_maker_that_dies_before_all_have_settled_is_replaced_under_the_same_order(
    world: Any,
) -> None:
    """What stores keep is of the lineage before: they are not asked again."""
    lose(world, 1)
    ask(world)
    lose(world, 1)
    plan = world.plan
    assert (plan.method, plan.lineage, plan.fork.since) == (Method.APPROXIMATE, 2, 0)


def test_an_end_that_no_store_brings_back_has_the_ladders_next_answer(world: Any) -> None:
    lose(world, 0)
    ask(world)
    assert (world.plan.method, world.plan.fork) == (Method.RESTART, None)
    assert "for want of anything newer" in world.plan.reason


def test_a_replay_whose_members_fail_to_meet_still_asks(world: Any) -> None:
    lose(world, 1)
    world.tell(*(world.about(FactKind.PARKED, m) for m in world.plan.members))
    world.tick(10.0)
    assert (world.plan.method, world.plan.asks_first) == (Method.REFORM, True)
    ask(world)
    assert world.plan.method is Method.APPROXIMATE


def test_who_loses_no_stage_does_not_ask(world: Any) -> None:
    world.tell(*(world.about(FactKind.PARKED, m) for m in world.plan.members))
    world.tick(10.0)
    assert (world.plan.method, world.plan.asks_first) == (Method.REFORM, False)


def test_without_permission_nobody_asks(start: Start) -> None:
    world = job(start)
    lose(world, 1)
    assert (world.plan.method, world.plan.asks_first) == (Method.REPLAY, False)


def test_a_person_allows_what_is_done_if_no_store_brings_a_stage_back(start: Start) -> None:
    world = job(start, spares=0)
    assert show_lineage(world.state).stages[1].possible
    lose(world, 1)
    assert world.state.phase is JobPhase.WAITING
    verdict = judge_permission(world.state, None, world.now_s)
    assert verdict.applies
    assert verdict.reason.startswith("unless what pods keep in memory brings it back: stage 1 is")
    world.send(ApproximationAllowed(who="alice", stages=(1,)))
    world.register("spare")
    world.up("spare")
    assert (world.plan.method, world.plan.asks_first) == (Method.REPLAY, True)
    ask(world)

    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))
    assert newest(world).allowed_by == "alice"
