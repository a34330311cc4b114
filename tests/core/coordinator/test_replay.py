"""Row 3 of the ladder: who is asked for snapshots, and what becomes of one that falls short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import PlanReported, PublishPlan
from mainstay_core.coordinator.stores import keeps_segments
from mainstay_core.job.config import SnapshotConfig
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method
from mainstay_core.wire.recoveries import Replayed, describe_replays

Start = Callable[..., Any]
SNAPSHOTS = SnapshotConfig(memory_bytes=1 << 30)


@pytest.fixture
def world(start: Start) -> Any:
    """Two replicas of two stages that have committed five steps, and a spare; all with stores."""
    world = start(spares=2, replicas=2, stages=2, snapshots=SNAPSHOTS)
    for _ in range(5):
        world.commit()
    return world


def lose_a_stage(world: Any) -> None:
    world.tell(world.down_fact(world.member(0, 1)), world.down_fact(world.member(1, 1)))


def adopt(world: Any, reached: int | None) -> None:
    for member in world.plan.members:
        told = {} if reached is None else {"reached": reached}
        world.tell(world.about(FactKind.ADOPTED, member, **told))


def record(world: Any) -> Any:
    """The newest record of a loss, as it was stored last."""
    return [r for r in world.recoveries().values() if r.method is not Method.JOIN][-1]


def test_a_lost_stage_is_replayed_and_loses_nothing(world: Any) -> None:
    lose_a_stage(world)
    plan = world.plan
    assert (plan.method, plan.planned, plan.lineage) == (Method.REPLAY, False, 0)
    stayed = [m for m in plan.members if not m.joining]
    assert {m.rank.stage for m in stayed} == {0}, "the living stay with their state"
    adopt(world, 5)
    world.settle(step=5)
    world.commit(step=5)
    assert (record(world).method, record(world).lost_steps) == (Method.REPLAY, 0)
    assert (record(world).from_step, world.state.restarted_id) == (5, 0)
    world.stored()


def test_a_replay_that_comes_back_to_an_older_step_was_a_restart(world: Any) -> None:
    lose_a_stage(world)
    adopt(world, 6)
    world.settle(step=3)
    assert world.state.restarted_id == world.plan.quorum.id
    world.commit(step=3)
    assert (record(world).method, record(world).lost_steps) == (Method.RESTART, 3)
    assert record(world).from_step == 6, "the sixth step was applied, the ledger had not told"
    assert record(world).reason.endswith("in the end all went on from step 3")
    assert world.state.step == 4


def test_a_step_that_only_the_dead_had_applied_is_not_lost(world: Any) -> None:
    lose_a_stage(world)
    adopt(world, 4)
    world.settle(step=4)
    world.commit(step=4)
    assert (record(world).method, record(world).lost_steps) == (Method.REPLAY, 0)
    assert world.state.step == 5


@pytest.mark.parametrize(
    ("step", "method", "lost"), [(5, Method.REPLAY, 0), (4, Method.RESTART, 1)]
)
def test_where_nobody_was_left_the_ledger_says_where_the_job_was(
    world: Any, step: int, method: Method, lost: int
) -> None:
    members = world.plan.members
    world.tell(*(world.down_fact(m, restarting=True) for m in members))
    for member in members:
        world.up(member.slot.pod)
    assert world.plan.method is Method.REPLAY
    assert all(m.joining for m in world.plan.members)
    adopt(world, None)
    world.settle(step=step)
    world.commit(step=step)
    assert (record(world).method, record(world).lost_steps) == (method, lost)


def test_steps_are_lost_once_although_two_replays_failed(world: Any) -> None:
    lose_a_stage(world)
    first = world.plan.quorum.id
    world.down(next(m for m in world.plan.members if m.joining))
    assert world.plan.quorum.id > first
    assert world.plan.method is Method.REPLAY
    adopt(world, 5)
    world.settle(step=2)
    world.commit(step=2)
    told = world.recoveries()
    assert [told[i].lost_steps for i in sorted(told)] == [3, 0]
    assert {told[i].method for i in told} == {Method.RESTART}


def test_a_commit_of_the_quorum_before_counts_unless_it_was_undone(world: Any) -> None:
    old = world.plan.quorum
    lose_a_stage(world)
    adopt(world, 6)
    world.settle(step=6)
    world.commit(step=5, quorum=old)
    assert world.state.step == 6


def test_only_stores_that_were_there_are_worth_asking(start: Start) -> None:
    world = start(replicas=1, stages=2, snapshots=SNAPSHOTS)
    first, second = (host.pod for host in world.plan.hosts)
    world.pod_gone(first)
    assert keeps_segments(world.state)
    world.register(second, pid=77, snapshots="elsewhere:9")
    assert not keeps_segments(world.state), "another supervisor has another store"
    world.register("later")
    assert not keeps_segments(world.state), "what comes later keeps nothing"


def test_without_snapshots_a_lost_stage_restarts(start: Start) -> None:
    world = start(spares=1, replicas=2, stages=2)
    world.commit()
    lose_a_stage(world)
    assert world.plan.method is Method.RESTART
    assert not keeps_segments(world.state)


def test_after_the_store_forgot_a_replay_no_older_commit_counts(world: Any) -> None:
    old = world.plan.quorum
    lose_a_stage(world)
    world.settle(step=3)
    world.commit(step=3)
    world.state = machine.initial(world.state.config, world.now_s)
    plan = next(a.plan for a in reversed(world.actions) if isinstance(a, PublishPlan))
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan))
    assert (world.plan, world.state.restarted_id) == (plan, plan.quorum.id)
    assert keeps_segments(world.state), "the plan names the stores"
    world.commit(step=4)
    world.commit(step=5, quorum=old)
    assert world.state.step == 5


def test_a_record_says_how_a_state_was_made_anew_and_every_text_says_the_same(world: Any) -> None:
    lose_a_stage(world)
    adopt(world, 5)
    joiners = [m for m in world.plan.members if m.joining]
    slow = [replayed(seconds=0.5), replayed(seconds=1.25, num_damaged=2)]
    for member, told in zip(joiners, slow, strict=True):
        world.tell(world.about(FactKind.SETTLED, member, step=5, replayed=told))
        world.tell(world.about(FactKind.SETTLED, member, step=5, replayed=told))
    world.settle(step=5)
    world.commit(step=5)

    (found,) = record(world).replays
    assert found == replayed(seconds=1.25, num_damaged=2)
    sentence = (
        "s1 made anew from gradients and the states of versions 2 to 3: 2 steps replayed "
        "(3 planned) in 1.250 s; 2 copies found damaged"
    )
    assert describe_replays(record(world).replays) == sentence
    assert record(world).reason.endswith(f"; {sentence}")
    assert f"go on at step 5; {sentence}" in world.messages()


def test_a_replay_from_boundary_logs_is_called_one() -> None:
    told = describe_replays([replayed("boundary", seconds=0.5)])
    assert told.startswith("s1 made anew from boundary logs and the states of versions 2 to 3: ")


def replayed(kind: str = "gradients", **fields: Any) -> Replayed:
    return Replayed(
        stage=1, inner=0, kind=kind, first=2, last=3, version=5, planned_steps=3, steps=2,
        **fields,
    )  # fmt: skip


def test_without_a_replay_nothing_is_said_of_one(world: Any) -> None:
    lose_a_stage(world)
    adopt(world, 5)
    world.settle(step=5)
    world.commit(step=5)
    assert record(world).replays == ()
    assert "made anew from" not in record(world).reason


def stores_named(world: Any) -> list[str]:
    return [other.pod for other in world.plan.other_stores]


def test_a_plan_names_the_stores_of_spares_and_they_are_worth_asking(world: Any) -> None:
    # With the first one there are as many pods as copies want, far enough from each other.
    assert stores_named(world) == ["spare-0"]
    world.pod_gone(*(host.pod for host in world.plan.hosts))
    assert keeps_segments(world.state), "a spare has a store"


def test_a_named_store_that_is_gone_is_named_no_more_by_a_plan_that_interrupts_nobody(
    world: Any,
) -> None:
    before = world.plan
    world.settle(step=5)
    world.pod_gone("spare-0")

    plan = world.plan
    assert (plan.method, plan.planned) == (Method.REFORM, True)
    assert stores_named(world) == ["spare-1"]
    assert [m.slot for m in plan.members] == [m.slot for m in before.members]
    assert plan.reason.startswith("stores of pods without a member are gone: spare-0")
    world.settle(step=5)
    assert world.plan == plan, "and no other plan follows"


@pytest.mark.parametrize(("peers", "is_named"), [(0, False), (1, True)])
def test_a_store_that_comes_later_is_named_at_once_where_copies_lack_holders(
    start: Start, peers: int, is_named: bool
) -> None:
    snapshots = SnapshotConfig(memory_bytes=1 << 30, peers=peers, domains=1)
    world = start(replicas=1, stages=2, snapshots=snapshots)
    world.commit()
    world.register("later")

    assert (stores_named(world) == ["later"]) == is_named
    assert world.plan.planned == is_named


def test_a_job_without_snapshots_names_no_stores(start: Start) -> None:
    world = start(spares=2, replicas=1, stages=2)
    world.commit()
    assert stores_named(world) == []
