"""Row 5 of the ladder, carried out: who is ordered to be made anew, and in which lineage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.coordinator.events import JobSubmitted, StepsCommitted
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method
from mainstay_core.wire.reinitialisation import BlockOutline, Outline

Start = Callable[..., Any]
ALLOWED = ApproximateConfig(after_lost_steps=2)
OUTLINE: Outline = tuple((BlockOutline(name=f"layers.{i}", kind="layer"),) for i in range(5))


@pytest.fixture
def world(start: Start) -> Any:
    """One replica of five stages that has committed five steps, and four spares."""
    world = start(spares=4, replicas=1, lanes=1, stages=5, approximate=ALLOWED)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    return world


def lose(world: Any, *stages: int) -> None:
    world.tell(*(world.down_fact(world.member(0, stage)) for stage in stages))


def adopt(world: Any, *, step: int, reached: int) -> None:
    """All survivors hold all settle reports."""
    stayed = [m for m in world.plan.members if not m.joining]
    world.tell(*(world.about(FactKind.ADOPTED, m, step=step, reached=reached) for m in stayed))


def record(world: Any) -> Any:
    return [*world.recoveries().values()][-1]


def test_a_lost_inner_stage_is_ordered_to_be_made_anew_in_a_new_lineage(world: Any) -> None:
    lose(world, 1)

    plan = world.plan
    assert (plan.method, plan.planned, plan.lineage) == (Method.APPROXIMATE, False, 1)
    assert (plan.fork.positions, plan.fork.since) == ((1,), 0)
    assert [m.rank.stage for m in plan.members if m.joining] == [1]
    world.settle(step=5)
    world.commit(step=5)
    assert (record(world).method, record(world).exact) == (Method.APPROXIMATE, False)
    assert record(world).lost_steps == 0
    world.stored()


def test_what_follows_a_fork_is_exact_again_and_stays_in_its_lineage(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5)
    world.commit(step=5)
    world.park(world.member(0, 2))
    world.tick(10.0)

    plan = world.plan
    assert plan.method is Method.REFORM
    assert (plan.fork, plan.lineage) == (None, 1)
    assert record(world).exact or record(world).quorum.id < plan.quorum.id


def test_a_second_loss_after_a_fork_is_another_fork_of_the_next_lineage(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5)
    world.commit(step=5)
    lose(world, 3)

    plan = world.plan
    assert (plan.fork.positions, plan.fork.since, plan.lineage) == ((3,), 1, 2)


@pytest.mark.parametrize("settled", [0, 3])
def test_a_loss_in_the_middle_of_a_fork_repeats_the_order(world: Any, settled: int) -> None:
    lose(world, 1)
    others = [m for m in world.plan.members if m.rank.stage != 1][:settled]
    world.tell(*(world.about(FactKind.SETTLED, member, step=5) for member in others))
    lose(world, 3)

    plan = world.plan
    assert plan.fork.positions == (1, 3), "the maker of stage 1 may have got nowhere"
    assert (plan.fork.since, plan.lineage) == (0, 2), "who missed the first plan counts as well"


def test_the_maker_of_a_stage_that_dies_is_replaced_under_the_same_order(world: Any) -> None:
    lose(world, 1)
    lose(world, 1)

    assert (world.plan.fork.positions, world.plan.fork.since) == ((1,), 0)
    assert world.plan.method is Method.APPROXIMATE


def test_a_meeting_that_fails_in_the_middle_of_a_fork_repeats_the_order(world: Any) -> None:
    lose(world, 1)
    world.park(world.member(0, 2))
    world.tick(10.0)

    plan = world.plan
    assert plan.method is Method.REFORM
    assert (plan.fork.positions, plan.fork.since, plan.lineage) == ((1,), 0, 2)


@pytest.mark.parametrize("lost", [(0,), (4,), (1, 2)])
def test_what_has_no_two_neighbours_goes_back_to_the_exact_source(
    world: Any, lost: tuple[int, ...]
) -> None:
    lose(world, *lost)

    assert (world.plan.method, world.plan.fork, world.plan.lineage) == (Method.RESTART, None, 0)


def test_inner_ranks_of_an_unfinished_fork_are_made_anew_together(start: Start) -> None:
    """One of two makers has told that it has its state, the other one is lost."""
    world = start(spares=4, replicas=1, lanes=1, stages=3, ranks_per_stage=2, approximate=ALLOWED)
    world.register("teller")
    copies = BlockOutline(name="layer", kind="layer", copied=("norm",))
    world.up("teller", outline=tuple((replace(copies, name=f"layer.{i}"),) for i in range(3)))
    for _ in range(5):
        world.commit()
    ranks = [m for m in world.plan.members if m.rank.stage == 1]
    world.tell(*(world.down_fact(m) for m in ranks))
    assert world.plan.fork.positions == (2, 3)
    done, lost = (m for m in world.plan.members if m.rank.stage == 1)
    world.tell(world.about(FactKind.SETTLED, done, step=5))
    world.tell(world.down_fact(lost))

    assert world.plan.method is Method.APPROXIMATE
    assert (world.plan.fork.positions, world.plan.fork.since) == ((2, 3), 0)


def test_a_neighbour_that_dies_in_the_middle_of_a_fork_ends_it(world: Any) -> None:
    lose(world, 1)
    lose(world, 2)

    plan = world.plan
    assert (plan.method, plan.fork) == (Method.RESTART, None)
    assert plan.lineage == 2, "all load"


def test_after_a_restart_no_state_from_a_fork_counts(world: Any) -> None:
    """The job may come to the same versions again, on a course without the fork."""
    lose(world, 1)
    world.settle(step=5)
    world.send(
        StepsCommitted(
            step=5,
            quorum=world.plan.quorum,
            committed_at_s=world.now_s,
            step_s=0.01,
            exact=False,
        )
    )
    world.park(world.member(0, 3))
    world.tick(10.0)
    world.settle(step=6)
    assert (world.plan.fork, world.plan.lineage) == (None, 1)
    lose(world, 0)

    plan = world.plan
    assert (plan.method, plan.fork, plan.lineage) == (Method.RESTART, None, 2)


def test_a_fork_that_went_back_to_a_checkpoint_was_a_restart(world: Any) -> None:
    """Its members found one on the disk of which the coordinator had not heard."""
    lose(world, 1)
    adopt(world, step=4, reached=6)
    world.settle(step=4)
    assert world.state.restarted_id == world.plan.quorum.id
    world.commit(step=4)
    assert (record(world).method, record(world).lost_steps) == (Method.RESTART, 2)
    assert not record(world).exact, "as the plan had it"
    assert world.state.step == 5


def test_a_fork_that_a_restart_ended_stays_a_fork_in_the_records(world: Any) -> None:
    lose(world, 1)
    adopt(world, step=5, reached=5)
    lose(world, 2)
    assert world.plan.method is Method.RESTART
    world.settle(step=0)
    world.commit(step=0)

    told = world.recoveries()
    assert [told[i].method for i in sorted(told)] == [Method.APPROXIMATE, Method.RESTART]


def test_a_fork_below_a_step_that_only_the_dead_had_applied_is_one(world: Any) -> None:
    lose(world, 1)
    adopt(world, step=4, reached=4)
    world.settle(step=4)
    world.commit(step=4)
    assert (record(world).method, record(world).exact) == (Method.APPROXIMATE, False)
    assert world.state.restarted_id == 0


def test_without_permission_no_plan_of_another_lineage_comes_about(start: Start) -> None:
    world = start(spares=4, replicas=1, lanes=1, stages=5)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    lose(world, 1)

    assert (world.plan.method, world.plan.fork, world.plan.lineage) == (Method.RESTART, None, 0)


def test_trainers_that_told_no_outline_are_not_made_anew(start: Start) -> None:
    world = start(spares=4, replicas=1, lanes=1, stages=5, approximate=ALLOWED)
    for _ in range(5):
        world.commit()
    lose(world, 1)

    assert world.plan.method is Method.RESTART


def test_permission_cannot_change_in_a_job_that_exists(world: Any) -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.recovery\.allowApproximate"):
        world.send(JobSubmitted(config=replace(world.state.config, approximate=None)))


def test_who_had_finished_before_a_fork_finishes_again(world: Any) -> None:
    first = world.member(0, 0)
    world.finish(first, masters="exact")
    (told,), before = world.state.finals, world.plan.quorum
    lose(world, 1)
    assert world.state.finals == ()
    late = world.about(FactKind.FINISHED, first, final=told)
    world.tell(replace(late, quorum=before))
    assert world.state.finals == (), "what is told late is of the lineage before"
    world.settle(step=5)
    world.finish(first, masters="exact", history="h")

    assert [f.history for f in world.state.finals] == ["h"]


def test_a_job_says_since_when_it_is_approximate_until_it_goes_back(world: Any) -> None:
    def commit(step: int, *, exact: bool) -> None:
        world.send(
            StepsCommitted(
                step=step,
                quorum=world.plan.quorum,
                committed_at_s=world.now_s,
                step_s=0.01,
                exact=exact,
            )
        )

    assert world.state.approximate_since is None
    lose(world, 1)
    world.settle(step=5)
    for step in (5, 6, 7):
        commit(step, exact=False)
        assert world.state.approximate_since == 5
    lose(world, 1, 2)
    world.settle(step=0)
    commit(0, exact=True)
    assert world.state.approximate_since is None
