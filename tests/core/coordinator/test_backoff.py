"""Trainers that end again and again: one sentence per test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mainstay_core.coordinator.intake.backoff import clear_failures
from mainstay_core.coordinator.state import with_slot
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind

Start = Callable[..., Any]


def flap(world: Any, pod: str, times: int) -> None:
    """The pod's trainer ends and comes up again, so often, with no commit in between."""
    for _ in range(times):
        member = next((m for m in world.plan.members if m.slot.pod == pod), None)
        slot = next(s for s in world.state.slots if s.slot.pod == pod)
        life = member.incarnation if member else slot.incarnation
        world.tell(
            world.fact(
                FactKind.TRAINER_DOWN, pod, 0, incarnation=life, restarting=True, evidence="x"
            )
        )
        world.settle()
        world.up(pod)


def is_in(world: Any, pod: str) -> bool:
    return pod in {m.slot.pod for m in world.plan.members}


def test_the_first_end_holds_nobody_back(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1)
    flap(world, "pod-1", 1)
    assert is_in(world, "pod-1")


def test_each_further_end_in_a_row_doubles_the_pause(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1, hold_back_s=1.0, hold_back_max_s=3.0)
    pauses = []
    flap(world, "pod-1", 1)
    for _ in range(4):
        flap(world, "pod-1", 1)
        assert not is_in(world, "pod-1")
        held = next(s for s in world.state.slots if s.slot.pod == "pod-1").held_until_s
        pauses.append(round(held - world.now_s))
        world.tick(after_s=held - world.now_s - 0.2)
        assert not is_in(world, "pod-1")
        world.tick(after_s=0.2)
        assert is_in(world, "pod-1")
    assert pauses == [1, 2, 3, 3]


def test_a_commit_clears_the_record(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1)
    flap(world, "pod-1", 1)
    world.settle()
    world.commit()
    flap(world, "pod-1", 1)
    assert is_in(world, "pod-1")
    assert world.state.domains.keys() == {"pod-1"}
    world.settle()
    world.commit()
    assert world.state.domains == {}


def test_a_commit_ends_the_hold_back_of_the_slots_that_voted_and_of_no_other(start: Start) -> None:
    world = start(spares=1, replicas=2, lanes=2, stages=1)
    state = world.state
    for slot in state.slots:
        state = with_slot(state, replace(slot, failures=0, held_until_s=1e9))

    held = {slot.slot: slot.held_until_s for slot in clear_failures(state).slots}

    members = {m.slot for m in world.plan.members}
    assert {slot for slot, until_s in held.items() if not until_s} == members
    assert len(held) == len(members) + 1


def test_a_pod_made_anew_on_a_bad_node_is_held_back_too(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1)
    world.pod_gone("pod-1")
    world.settle()
    for i in (2, 3):
        world.register(f"pod-{i}", domain="bad")
        world.up(f"pod-{i}")
        assert is_in(world, f"pod-{i}")
        world.settle()
        world.pod_gone(f"pod-{i}")
        world.settle()
    world.register("pod-4", domain="bad")
    world.up("pod-4")
    assert not is_in(world, "pod-4")
    world.register("pod-5", domain="good")
    world.up("pod-5")
    assert is_in(world, "pod-5")


def test_a_spare_takes_the_place_of_who_is_held_back_at_once(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1, restart_grace_s=1000.0)
    flap(world, "pod-1", 2)
    assert not is_in(world, "pod-1")
    world.register("spare-0")
    world.up("spare-0")
    assert is_in(world, "spare-0")


def test_a_job_that_stands_still_waits_for_nobody_held_back(start: Start) -> None:
    world = start(replicas=1, lanes=1, stages=1, hold_back_s=50.0)
    for _ in range(3):
        member = world.plan.members[0]
        world.down(member, restarting=True)
        assert world.state.phase is JobPhase.WAITING
        world.up(member.slot.pod)
        assert world.state.phase is JobPhase.RECOVERING
        world.settle()


def test_who_leaves_as_planned_leaves_no_mark_on_its_node(start: Start) -> None:
    world = start(replicas=2, lanes=2, stages=1)
    for i in range(3):
        world.tell(world.fact(FactKind.LEAVING, f"pod-{1 + i}", None, evidence="SIGTERM"))
        world.settle()
        world.pod_gone(f"pod-{1 + i}")
        world.register(f"pod-{2 + i}", domain="node")
        world.up(f"pod-{2 + i}")
        world.settle()
        assert is_in(world, f"pod-{2 + i}")
    assert world.state.domains == {}
