"""What follows when the same cause ends quorum after quorum, one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.worlds.pods import PlayedPods

from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.repeats import MAX_KINDS
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Cause, FactKind
from mainstay_core.wire.plan import Member, Method

Start = Callable[..., Any]


def park(world: PlayedPods, *members: Member, kind: Cause, **fields: Any) -> None:
    """The members give their quorum up, and meet again after the pause."""
    facts = [world.about(FactKind.PARKED, m, evidence="why", cause=kind, **fields) for m in members]
    world.tell(*facts)
    world.tick(after_s=20.0)
    if not world.state.terminal:
        world.settle()


def slots(world: PlayedPods) -> set[Slot]:
    return {m.slot for m in world.plan.members}


def test_sources_go_first_and_then_the_witness_that_has_it_from_others_too(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=3)
    witness, source, other = (world.member(r, 0) for r in (0, 3, 2))
    for _ in range(2):
        park(world, witness, kind=Cause.HEAL, sources=(source.slot,))
        assert world.plan.method is Method.REFORM
    park(world, witness, kind=Cause.HEAL, sources=(source.slot,))
    assert world.plan.method is Method.MASK
    assert source.slot not in slots(world)
    assert world.plan.reason.startswith(
        "3 quorums ended for the same cause, heal from pod-3/0 seen"
    )
    assert world.state.slot(source.slot).held_until_s > world.now_s
    park(world, world.member(0, 0), kind=Cause.HEAL, sources=(other.slot,))
    assert witness.slot not in slots(world)
    assert other.slot in slots(world)


def test_what_is_named_by_chance_drops_out(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=2)
    a, b, c = (world.member(r, 0).slot for r in (1, 2, 3))
    park(world, world.member(0, 0), kind=Cause.MEETING, sources=(a, b))
    park(world, world.member(0, 0), kind=Cause.MEETING, sources=(b, c))
    assert slots(world) == {world.member(0, 0).slot, a, c}


@pytest.mark.parametrize("kinds", [(Cause.HEAL, Cause.REDUCTION), (Cause.CHAIN, Cause.MEETING)])
def test_another_kind_is_another_cause(start: Start, kinds: tuple[Cause, Cause]) -> None:
    world = start(replicas=4, stages=1, escalate_after=2)
    for kind in kinds:
        park(world, world.member(0, 0), kind=kind)
        assert world.plan.method is Method.REFORM
    assert [r.count for r in world.state.repetitions] == [1, 1]


def test_the_same_kind_that_names_nobody_again_is_another_cause(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=2)
    for replica in range(4):
        park(world, world.member(replica, 0), kind=Cause.REDUCTION)
        assert world.plan.method is Method.REFORM


def test_who_was_only_told_is_no_witness_but_may_name_the_source(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=2)
    for _ in range(2):
        first, *others = world.plan.members
        told = [
            world.about(
                FactKind.PARKED,
                member,
                evidence="ended by others",
                cause=Cause.MEETING,
                sources=(others[-1].slot,),
                was_told=True,
            )
            for member in others[:-1]
        ]
        saw = world.about(FactKind.PARKED, first, evidence="lost", cause=Cause.MEETING)
        last = others[-1].slot
        world.tell(*told, saw)
        world.tick(after_s=20.0)
        world.settle()
    (known,) = world.state.repetitions
    assert (known.sources, known.witnesses) == ((last,), (first.slot,))
    assert last not in slots(world)


def test_nobody_is_left_out_that_the_others_need(start: Start) -> None:
    world = start(replicas=1, stages=2, lanes=1, escalate_after=1)
    first, second = world.plan.members
    for _ in range(2):
        park(world, first, kind=Cause.CHAIN, sources=(second.slot,))
        assert world.plan.method is Method.REFORM
        assert slots(world) == {first.slot, second.slot}


def test_a_restart_voids_what_is_held_and_leaves_out_who_is_named_if_others_are_free(
    start: Start,
) -> None:
    world = start(spares=1, replicas=1, stages=2, lanes=1, escalate_after=1)
    first, second = world.plan.members
    world.commit()
    before = world.plan.lineage
    for _ in range(3):
        park(world, *world.plan.members[:1], kind=Cause.RESULT)
    assert world.plan.method is Method.RESTART
    assert world.plan.lineage == before + 1
    assert first.slot not in slots(world)
    assert second.slot in slots(world)
    assert world.state.restarted_id == world.plan.quorum.id


def test_a_cause_without_end_fails_the_job_with_the_reason(start: Start) -> None:
    world = start(replicas=1, stages=1, lanes=1, escalate_after=2)
    for number in range(1, 9):
        assert world.state.phase is not JobPhase.FAILED, number
        park(world, world.plan.members[0], kind=Cause.LOAD)
    assert world.state.phase is JobPhase.FAILED
    reason = world.ended().reason
    assert reason.startswith("8 quorums ended for the same cause, load seen by pod-0/0 (why)")
    assert "recovery.escalateAfter is 2" in reason


def test_one_commit_between_is_not_enough_but_two_are(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=2)
    bad = world.member(3, 0)
    for commits in (2, 2, 1):
        assert bad.slot in slots(world)
        park(world, world.member(0, 0), kind=Cause.STATE, sources=(bad.slot,))
        for _ in range(commits):
            world.commit()
    park(world, world.member(0, 0), kind=Cause.STATE, sources=(bad.slot,))
    assert bad.slot not in slots(world)


def test_who_comes_back_with_the_cause_is_left_out_at_once_and_nothing_worse_follows(
    start: Start,
) -> None:
    world = start(replicas=3, stages=1, escalate_after=2)
    witness = world.member(2, 0).slot
    for _ in range(4):
        assert witness in slots(world)
        park(world, world.member(2, 0), kind=Cause.HEAL)
    assert witness not in slots(world)
    for _ in range(6):
        for _ in range(3):
            world.commit()
        while witness not in slots(world):
            world.tick(after_s=500.0)
        world.settle()
        back = next(m for m in world.plan.members if m.slot == witness)
        park(world, back, kind=Cause.HEAL)
        assert witness not in slots(world)
        assert world.plan.method is Method.MASK
    assert world.state.phase is not JobPhase.FAILED


def test_a_death_that_is_known_is_no_repetition(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=1)
    victim = world.member(3, 0)
    told = world.about(FactKind.PARKED, world.member(0, 0), evidence="x", cause=Cause.REDUCTION)
    world.tell(told, world.down_fact(victim))
    assert world.plan.method is Method.MASK
    assert world.state.repetitions == ()


def test_the_next_meeting_is_where_none_has_failed_yet(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=10)
    hosts = [world.plan.rendezvous.pod]
    for _ in range(3):
        park(world, *world.plan.members, kind=Cause.MEETING)
        hosts.append(world.plan.rendezvous.pod)
    assert len(set(hosts)) == 4


def test_without_a_cause_the_members_just_meet_again(start: Start) -> None:
    world = start(replicas=2, stages=1, escalate_after=1)
    for _ in range(8):
        world.park(world.member(0, 0))
        world.tick(after_s=20.0)
        world.settle()
        assert world.plan.method is Method.REFORM
    assert world.state.repetitions == ()


def test_causes_are_kept_within_a_bound(start: Start) -> None:
    world = start(replicas=4, stages=1, escalate_after=1000)
    for number in range(3 * MAX_KINDS):
        kind = list(Cause)[number % len(Cause)]
        park(world, world.member(number % 4, 0), kind=kind)
    assert len(world.state.repetitions) <= MAX_KINDS


def test_a_state_that_was_stored_before_is_read_and_no_setting_divides_by_zero(
    start: Start,
) -> None:
    world = start(replicas=2, stages=1)
    world.park(world.member(0, 0))
    data = codec.encode(world.state)
    del data["repetitions"], data["suspicion"]["causes"], data["config"]["escalate_after"]
    read = codec.decode(CoordinatorState, data)
    assert (read.repetitions, read.suspicion.causes) == ((), ())
    assert read.config.escalate_after == 10
    with pytest.raises(MalformedError, match=r"JobConfig\.escalate_after"):
        codec.decode(JobConfig, {**data["config"], "escalate_after": 0})
