"""Row 5 of the ladder, carried out: who is ordered to be made anew, and in which lineage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, RemoteProtocolError
from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.base.shape import Order
from mainstay_core.coordinator import ladder, machine
from mainstay_core.coordinator.events import (
    Announce,
    ApproximationAllowed,
    JobSubmitted,
    PlanReported,
    ScaleRequested,
    StepsCommitted,
    StopRequested,
    StoreReopened,
    SuspendRequested,
    Tick,
    Transition,
)
from mainstay_core.coordinator.intake.refused_states import MORE_STATES
from mainstay_core.coordinator.lineage import list_keys, show_lineage, splice, tell_forks
from mainstay_core.coordinator.permission import NotApplicableError, judge_permission
from mainstay_core.coordinator.returning import wait_for_outline, wait_for_silent
from mainstay_core.coordinator.situation import find_situation
from mainstay_core.coordinator.state import COMMITS_THAT_SETTLE
from mainstay_core.job.config import MAX_FORKS, ApproximateConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.rank.forks.histories import tell_history
from mainstay_core.wire.facts import Cause, FactKind
from mainstay_core.wire.ledger import ForkedState, LedgerEntry
from mainstay_core.wire.plan import Member, Method, Plan
from mainstay_core.wire.reinitialisation import (
    MAX_REFUSED_STATES,
    MAX_TOLD_FORKS,
    BlockOutline,
    BlockSource,
    Fork,
    History,
    MadeBlock,
    MadePosition,
    Outline,
    Reinitialisation,
    SourceKind,
    ToldHistory,
    digest_of_fork,
)

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


def fork_at(version: int, *stages: int) -> Fork:
    places = tuple(
        MadePosition(
            stage=stage,
            blocks=(
                MadeBlock(
                    block=f"layers.{stage}",
                    sources=tuple(
                        BlockSource(
                            kind=SourceKind.NEIGHBOUR,
                            stage=other % 5,
                            block=f"layers.{other % 5}",
                            weight=0.5,
                        )
                        for other in (stage - 1, stage + 1)
                    ),
                ),
            ),
        )
        for stage in stages
    )
    reason = "; ".join(f"stage {stage} is made anew from its neighbours" for stage in stages)
    made = Reinitialisation(positions=places, reason=reason)
    return Fork(version=version, chain=f"c{version}", made=made)


def told(*forks: Fork, made: bool = True) -> ToldHistory:
    history = tell_history(forks, made=made)
    assert history is not None
    return history


FORKED = told(fork_at(5, 1))
"""As the first member tells it after stage 1 was made anew at version 5."""


def lose(world: Any, *stages: int) -> None:
    world.tell(*(world.down_fact(world.member(0, stage)) for stage in stages))


def adopt(world: Any, *, step: int, reached: int, loads: bool | None = None) -> None:
    """All survivors hold all settle reports."""
    stayed = [m for m in world.plan.members if not m.joining]
    about = {"step": step, "reached": reached, "loads": loads}
    world.tell(*(world.about(FactKind.ADOPTED, m, **about) for m in stayed))


def record(world: Any) -> Any:
    return [*world.recoveries().values()][-1]


def test_a_lost_inner_stage_is_ordered_to_be_made_anew_in_a_new_lineage(world: Any) -> None:
    lose(world, 1)

    plan = world.plan
    assert (plan.method, plan.planned, plan.lineage) == (Method.APPROXIMATE, False, 1)
    assert (plan.fork.positions, plan.fork.since) == ((1,), 0)
    assert [m.rank.stage for m in plan.members if m.joining] == [1]
    world.settle(step=5, history=FORKED)
    world.commit(step=5)
    assert (record(world).method, record(world).exact) == (Method.APPROXIMATE, False)
    assert (record(world).lost_steps, record(world).approximate_since) == (0, 5)
    assert "; stage 1 is made anew from its neighbours" in record(world).reason
    world.stored()


def test_a_history_that_names_no_fork_is_refused_before_it_is_kept(world: Any) -> None:
    lose(world, 1)
    first = next(m for m in world.plan.members if m.index == 0)
    fact = world.about(FactKind.SETTLED, first, step=5, history=replace(FORKED, newest=()))

    with pytest.raises(RemoteProtocolError, match="names no fork"):
        world.tell(fact)
    world.settle(step=5, history=FORKED)
    world.commit(step=5)
    assert record(world).approximate_since == 5


def test_a_restart_for_copies_that_differ_begins_a_new_lineage_after_a_fork(start: Start) -> None:
    """It may go back before the fork, and come to the same versions on another course."""
    world = start(spares=3, replicas=2, lanes=2, stages=3, approximate=ALLOWED, escalate_after=5)
    world.register("teller")
    world.up("teller", outline=OUTLINE[:3])
    for _ in range(5):
        world.commit()
    world.tell(*(world.down_fact(m) for m in world.plan.members if m.rank.stage == 1))
    assert (world.plan.method, world.plan.lineage) == (Method.APPROXIMATE, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, since=5)
    members = [m for m in world.plan.members if m.rank.stage == 0]
    facts = [world.about(FactKind.PARKED, m, evidence="differ", cause=Cause.STATE) for m in members]
    world.tell(*facts)
    world.tick(10.0)

    assert (world.plan.method, world.plan.lineage) == (Method.RESTART, 2)


def test_what_follows_a_fork_is_exact_again_and_stays_in_its_lineage(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5, history=FORKED)
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
    world.settle(step=5, history=FORKED)
    world.send(
        StepsCommitted(
            step=5,
            quorum=world.plan.quorum,
            committed_at_s=world.now_s,
            step_s=0.01,
            approximate_since=5,
        )
    )
    world.park(world.member(0, 3))
    world.tick(10.0)
    world.settle(step=6, history=told(fork_at(5, 1), made=False))
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
    assert record(world).exact, "nothing was made anew"
    assert world.state.step == 5
    assert world.state.approximate_since is None


@pytest.mark.parametrize("is_repeated", [False, True])
def test_what_is_lost_while_all_go_back_to_the_seed_is_loaded_again(
    world: Any, is_repeated: bool
) -> None:
    """The steps that are counted are given up already: the seed is as good as where all are."""
    lose(world, 0)
    assert world.plan.method is Method.RESTART
    if is_repeated:
        world.park(world.member(0, 2))
        world.tick(10.0)
        assert world.plan.method is Method.REFORM
    joined = world.member(0, 0)
    world.tell(world.about(FactKind.SETTLED, joined, step=0))
    lose(world, 1)

    assert (world.plan.method, world.plan.fork) == (Method.RESTART, None)


def test_what_is_lost_after_a_return_to_the_seed_is_judged_by_the_steps_since(world: Any) -> None:
    lose(world, 0)
    world.settle(step=0)
    for step in range(3):
        world.commit(step=step)
    lose(world, 1)

    assert world.plan.method is Method.APPROXIMATE


def test_a_fork_at_a_version_on_the_disk_that_somebody_held_was_a_mask(world: Any) -> None:
    """The very version is durable, and nobody loads it."""
    lose(world, 1)
    adopt(world, step=5, reached=5, loads=False)
    facts = [world.about(FactKind.SETTLED, m, step=5, durable=5) for m in world.plan.members]
    world.tell(*facts)
    world.commit(step=5)

    assert (record(world).method, record(world).exact) == (Method.MASK, True)
    assert "nothing was made anew, as somebody held it" in record(world).reason


@pytest.mark.parametrize("loads", [True, None])
@pytest.mark.parametrize(
    ("step", "where"), [(0, "the seed's initial state"), (4, "step 4, which is on the disk")]
)
def test_a_fork_at_an_exact_source_was_a_restart_that_lost_nothing(
    world: Any, step: int, where: str, loads: bool | None
) -> None:
    """Pods of the version before do not say whether they load."""
    lose(world, 1)
    adopt(world, step=step, reached=step, loads=loads)
    members = world.plan.members
    facts = [world.about(FactKind.SETTLED, m, step=step, durable=step) for m in members]
    world.tell(*facts)
    world.commit(step=step)

    assert (record(world).method, record(world).lost_steps) == (Method.RESTART, 0)
    assert record(world).exact
    assert f"nothing was made anew: all went on from {where}" in record(world).reason


def test_a_fork_that_a_restart_ended_stays_a_fork_in_the_records(world: Any) -> None:
    lose(world, 1)
    adopt(world, step=5, reached=5)
    lose(world, 2)
    assert world.plan.method is Method.RESTART
    world.settle(step=0)
    world.commit(step=0)

    records = world.recoveries()
    assert [records[i].method for i in sorted(records)] == [Method.APPROXIMATE, Method.RESTART]
    assert all(recovery.exact for recovery in records.values()), (
        "the job is what it would have been"
    )


def test_a_fork_below_a_step_that_only_the_dead_had_applied_is_one(world: Any) -> None:
    lose(world, 1)
    adopt(world, step=4, reached=4)
    world.settle(step=4, history=told(fork_at(4, 1)))
    commit(world, 4, 4)
    assert (record(world).method, record(world).exact) == (Method.APPROXIMATE, False)
    assert world.state.approximate_since == 4
    assert world.state.restarted_id == 0


def test_a_fork_that_was_made_before_its_meeting_failed_is_no_exact_recovery(world: Any) -> None:
    """All but one have told that they go on; then the same order is repeated, and all hold it."""
    lose(world, 1)
    for member in world.plan.members[:-1]:
        first = {"history": FORKED} if member.index == 0 else {}
        world.tell(world.about(FactKind.SETTLED, member, step=5, **first))
    world.park(world.member(0, 2))
    world.tick(10.0)
    assert (world.plan.method, world.plan.fork.positions) == (Method.REFORM, (1,))
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)

    records = [world.recoveries()[i] for i in sorted(world.recoveries())]
    assert [(r.exact, r.approximate_since) for r in records] == [(False, 5), (False, 5)]
    assert world.announced().count("StageReinitialised") == 1


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


def commit(world: Any, step: int, since: int | None) -> None:
    world.send(
        StepsCommitted(
            step=step,
            quorum=world.plan.quorum,
            committed_at_s=world.now_s,
            step_s=0.01,
            approximate_since=since,
        )
    )


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


@pytest.mark.parametrize("forked", [True, False])
def test_a_store_that_fell_back_keeps_no_final_digests_of_a_lineage_before(
    world: Any, forked: bool
) -> None:
    """Who had finished finishes again, on another course."""
    world.finish(world.member(0, 0), masters="m", history="")
    before = world.state
    if forked:
        lose(world, 1)
    else:
        world.park(world.member(0, 2))
        world.tick(after_s=60.0)
    plan = world.plan
    assert (plan.quorum.id, plan.lineage) == (2, int(forked))
    world.state = before
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=5))

    assert world.plan == plan
    assert [f.stage for f in world.state.finals] == ([] if forked else [0])


@pytest.mark.parametrize("forks", [True, False])
def test_a_store_that_fell_back_behind_a_fork_tells_no_half_of_a_history(
    world: Any, forks: bool
) -> None:
    """Who makes the job again by its report would make another one."""
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    before = world.state
    if forks:
        lose(world, 3)
        world.settle(step=6, history=told(fork_at(5, 1), fork_at(6, 3)))
    else:
        world.park(world.member(0, 2))
        world.tick(after_s=60.0)
    plan = world.plan
    world.state = before
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=6))
    for step in range(6, 10):
        commit(world, step, 5)

    page = show_lineage(world.state)
    assert world.plan == plan
    assert page.approximate_since == 5
    assert (page.num_forks, len(page.forks)) == ((0, 0) if forks else (1, 1))


@pytest.fixture
def suspended(start: Start) -> Any:
    """A job that has made two stages anew, one member of which has finished, and can't go on."""
    saves = {"checkpoint_every_steps": 10, "checkpoint_dir": "/ckpt"}
    world = start(spares=2, replicas=1, lanes=1, stages=5, approximate=ALLOWED, **saves)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=OUTLINE))
    for _ in range(5):
        world.commit()
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    lose(world, 3)
    world.settle(step=6, history=told(fork_at(5, 1), fork_at(6, 3)))
    for step in range(6, world.state.shape.steps):
        commit(world, step, 5)
    world.finish(world.member(0, 0), masters="two forks", history="h2")
    lose(world, 4)
    world.send(SuspendRequested(suspend=True))
    assert world.state.phase is JobPhase.SUSPENDED
    return world


def resume(world: Any) -> None:
    world.send(SuspendRequested(suspend=False))
    for number in range(5):
        world.register(f"new-{number}")
        world.up(f"new-{number}", outline=OUTLINE)
    assert world.plan.method is Method.START


def test_who_had_finished_before_a_suspension_finishes_again(suspended: Any) -> None:
    """The newest checkpoint may be from before a fork."""
    assert [f.history for f in suspended.state.finals] == ["h2"]
    resume(suspended)
    suspended.settle(step=5, history=replace(FORKED, made=False))
    suspended.finish(suspended.member(0, 0), masters="one fork", history="h1")

    assert [f.history for f in suspended.state.finals] == ["h1"]
    assert "DigestMismatch" not in suspended.announced()


def test_a_store_that_fell_back_behind_a_suspension_knows_no_forks_of_the_course_before(
    suspended: Any,
) -> None:
    """All go on from a checkpoint that has but the first of them."""
    before = suspended.state
    resume(suspended)
    plan = suspended.plan
    suspended.state = before
    suspended.send(SuspendRequested(suspend=False))
    suspended.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=6))
    for step in range(6, 10):
        commit(suspended, step, 5)

    page = show_lineage(suspended.state)
    assert (suspended.plan, page.approximate_since) == (plan, 5)
    assert (page.num_forks, page.forks, suspended.state.finals) == (0, (), ())


def test_a_job_says_since_when_it_is_approximate_until_it_goes_back(world: Any) -> None:
    assert world.state.approximate_since is None
    lose(world, 1)
    assert world.state.approximate_since is None, "nothing is made anew yet"
    world.settle(step=5, history=FORKED)
    assert world.state.approximate_since == 5
    assert "approximate since step 5: step 5: stage 1 is made anew" in world.messages()
    for step in (5, 6, 7):
        commit(world, step, 5)
        assert (world.state.approximate_since, world.state.history) == (5, (fork_at(5, 1),))
    lose(world, 1, 2)
    world.settle(step=0)
    commit(world, 0, None)
    assert (world.state.approximate_since, world.state.history) == (None, ())
    assert [code for code in world.announced() if code in ("StageReinitialised", "ExactAgain")] == [
        "StageReinitialised",
        "ExactAgain",
    ]


def test_a_second_fork_does_not_change_since_when_and_is_told(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    lose(world, 3)
    world.settle(step=6, history=told(fork_at(5, 1), fork_at(6, 3)))

    state = world.state
    assert (state.approximate_since, state.num_forks) == (5, 2)
    assert state.history == (fork_at(5, 1), fork_at(6, 3))
    assert world.announced().count("StageReinitialised") == 2


def test_how_many_forks_there_are_on_a_course_that_commits_alone_tell_is_not_known(
    world: Any,
) -> None:
    """The job went back before all of its forks, and made a stage anew, while no api was up."""
    lose(world, 1)
    world.settle(step=5, history=told(fork_at(2, 1), fork_at(3, 2), fork_at(5, 1)))
    commit(world, 5, 2)
    lose(world, 1)
    commit(world, 6, 6)

    assert world.state.approximate_since == 6
    assert (world.state.num_forks, world.state.history) == (0, ())


def test_a_commit_from_before_a_fork_that_comes_late_says_nothing_of_it(world: Any) -> None:
    before = world.plan.quorum
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    world.commit(step=4, quorum=before)

    assert (world.state.approximate_since, world.state.num_forks) == (5, 1)


def test_a_job_that_goes_on_from_an_approximate_checkpoint_says_since_when(start: Start) -> None:
    """Not since it went on, but since the stage was made anew in the earlier run."""
    world = start(spares=1, replicas=1, lanes=1, stages=5)
    lose(world, 2)
    world.settle(step=40, history=told(fork_at(12, 1), made=False))

    assert world.state.approximate_since == 12
    assert "approximate since step 12" in world.messages()
    commit(world, 40, 12)
    assert world.state.approximate_since == 12
    assert world.state.history == (fork_at(12, 1),)


def test_a_store_that_lost_the_job_hears_since_when_with_the_next_commit(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    plan = world.plan
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=6))
    assert world.state.approximate_since is None
    commit(world, 6, 5)

    assert (world.state.approximate_since, world.state.history) == (5, ())


def test_a_store_that_lost_an_approximate_job_knows_so_from_the_first_supervisor(
    world: Any,
) -> None:
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    plan = world.plan
    world.state = machine.initial(world.state.config, world.now_s)
    held = PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=6, approximate_since=5)
    world.send(held)

    assert world.state.approximate_since == 5
    with pytest.raises(RemoteProtocolError, match=r"approximate_since: 99 is more than"):
        world.send(replace(held, approximate_since=99))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_restart_after_the_store_lost_a_fork_is_of_another_lineage(
    world: Any, is_late: bool
) -> None:
    """An entry of an older quorum that comes late says nothing of the states that are there now."""
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    forked = world.plan
    world.park(world.member(0, 2))
    world.tick(10.0)
    world.settle(step=6, history=told(fork_at(5, 1), made=False))
    plan = world.plan
    assert (plan.fork, plan.lineage) == (None, 1)
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=6))
    if is_late:
        world.send(
            StepsCommitted(
                step=5,
                quorum=forked.quorum,
                committed_at_s=world.now_s,
                step_s=0.01,
                approximate_since=5,
            )
        )
        assert world.state.last_commit is not None
    world.send(Tick(heard=world.state.unheard))
    world.register("spare")
    world.up("spare")
    lose(world, 0)
    for member in plan.members[1:]:
        world.up(member.slot.pod, life=member.incarnation, outline=OUTLINE)

    assert world.state.approximate_since is None, "it is not known"
    assert (world.plan.method, world.plan.lineage) == (Method.RESTART, 2)


def test_commits_alone_say_that_a_fork_was_made_if_its_first_member_does_not(world: Any) -> None:
    lose(world, 1)
    for step in range(5, 5 + COMMITS_THAT_SETTLE):
        commit(world, step, 5)

    assert (record(world).method, record(world).exact) == (Method.APPROXIMATE, False)
    assert record(world).approximate_since == 5
    assert (world.state.approximate_since, world.state.history) == (5, ())


def test_a_stage_that_somebody_held_after_all_leaves_the_job_exact(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5)
    world.commit(step=5)

    assert (record(world).method, record(world).exact) == (Method.MASK, True)
    assert "nothing was made anew" in record(world).reason
    assert world.state.approximate_since is None


def test_what_is_known_of_a_long_history_stays_as_it_grows() -> None:
    forks = tuple(fork_at(version, 1) for version in range(40))
    known: History = ()
    for number in range(1, 41):
        known = splice(known, told(*forks[:number]))
        assert known == forks[:number]
    lost = splice((), told(*forks))
    assert lost == forks[-MAX_TOLD_FORKS:], "the store has lost what came before"
    other = splice(known, told(*(replace(f, chain="x") for f in forks)))
    assert other == tuple(replace(f, chain="x") for f in forks[-MAX_TOLD_FORKS:])
    assert splice(known, told(*forks[:3])) == forks[:3], "after a restart"


# The policy and one permission ------------------------------------------------------


def test_the_policy_may_change_in_a_running_job_and_holds_from_the_next_loss(start: Start) -> None:
    world = start(spares=4, replicas=1, lanes=1, stages=5)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    world.send(JobSubmitted(config=replace(world.state.config, approximate=ALLOWED)))
    assert "recovery.allowApproximate false -> true" in world.messages()
    assert "recovery.approximateAfterLostSteps None -> 2" in world.messages()
    lose(world, 1)

    assert (world.plan.method, world.plan.fork.how) == (Method.APPROXIMATE, ALLOWED)


def test_a_fork_that_is_repeated_keeps_the_rules_by_which_it_was_ordered(world: Any) -> None:
    lose(world, 1)
    changed = ApproximateConfig(after_lost_steps=2, weights="Uniform", lr_boost=2.0)
    world.send(JobSubmitted(config=replace(world.state.config, approximate=changed)))
    lose(world, 1)

    assert world.plan.fork.how == ALLOWED, "the bits must not depend on who makes it"
    world.settle(step=5, history=FORKED)
    commit(world, 5, 5)
    lose(world, 3)
    assert world.plan.fork.how == changed


@pytest.fixture
def waiting(start: Start) -> Any:
    """A job without the policy that has lost stage 1, with nobody to take its place."""
    world = start(replicas=1, lanes=1, stages=5)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=OUTLINE))
    for _ in range(5):
        world.commit()
    lose(world, 1)
    assert world.state.phase is JobPhase.WAITING
    return world


def allow(world: Any, *stages: int) -> None:
    world.send(ApproximationAllowed(who="alice", stages=stages or None))


def test_a_person_allows_one_recovery_of_a_job_that_waits(waiting: Any) -> None:
    allow(waiting, 1)
    assert "alice allows one approximate recovery: stage 1 is made anew from stages 0 and 2" in (
        waiting.messages()
    )
    assert "goes back to the seed, and loses 5 steps" in waiting.messages()
    waiting.stored()
    waiting.register("spare")
    waiting.up("spare")

    plan = waiting.plan
    assert (plan.method, plan.fork.positions) == (Method.APPROXIMATE, (1,))
    assert plan.fork.how == ApproximateConfig(after_lost_steps=0)
    assert record(waiting).allowed_by == "alice"
    assert record(waiting).reason.endswith("; alice allowed it")
    waiting.settle(step=5, history=FORKED)
    assert waiting.state.permission is None, "it was for one recovery"
    assert "at 5" not in waiting.messages()
    commit(waiting, 5, 5)
    for name in ("other", "another"):
        waiting.register(name)
        waiting.up(name)
    lose(waiting, 3)
    assert waiting.plan.method is Method.RESTART


def test_a_permitted_recovery_goes_by_the_jobs_rules_though_its_policy_is_off(
    waiting: Any,
) -> None:
    rules = ApproximateConfig(weights="Uniform", stale_steps=4, wait_s=9, optimizer_state="Average")
    assert "by their squared gradient norms" in show_lineage(waiting.state).stages[1].reason
    waiting.send(JobSubmitted(config=replace(waiting.state.config, permitted=rules)))
    assert "stages 0 and 2, one half each" in show_lineage(waiting.state).stages[1].reason
    assert not show_lineage(waiting.state).allowed
    allow(waiting, 1)
    waiting.register("spare")
    waiting.up("spare")

    assert waiting.plan.fork.how == replace(rules, after_lost_steps=0, wait_s=0.0)


def test_without_a_permission_the_rules_alone_allow_nothing(start: Start) -> None:
    rules = ApproximateConfig(after_lost_steps=0)
    world = start(spares=4, replicas=1, lanes=1, stages=5, permitted=rules)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    lose(world, 1)
    assert (world.plan.method, world.plan.fork) == (Method.RESTART, None)


def test_a_permission_is_used_up_by_a_commit_though_not_all_have_told_that_they_go_on(
    waiting: Any,
) -> None:
    allow(waiting)
    for name in ("spare", "other", "another"):
        waiting.register(name)
        waiting.up(name)
    first = waiting.plan.members[0]
    waiting.tell(waiting.about(FactKind.SETTLED, first, step=5, history=FORKED))
    commit(waiting, 5, 5)
    assert waiting.state.permission is None
    lose(waiting, 1)

    assert waiting.plan.method is Method.RESTART


def test_a_commit_from_before_a_permission_that_comes_late_does_not_use_it_up(start: Start) -> None:
    world = start(replicas=1, lanes=1, stages=5)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=OUTLINE))
    world.state = replace(world.state, step=5)
    lose(world, 1)
    allow(world)
    commit(world, 5, None)

    assert world.state.permission is not None


def test_a_store_that_fell_back_gives_no_permission_back(waiting: Any) -> None:
    """It may have been used since: supervisors tell of plans and facts, and of no permission."""
    waiting.send(StoreReopened(server="one"))
    allow(waiting)
    waiting.send(StoreReopened(server="two"))

    assert waiting.state.permission is None
    assert "the permission of alice does not count any more" in waiting.messages()


def test_a_permission_lasts_while_its_recovery_is_interrupted(waiting: Any) -> None:
    allow(waiting)
    for name in ("spare", "other"):
        waiting.register(name)
        waiting.up(name)
    lose(waiting, 1)

    assert (waiting.plan.method, waiting.plan.fork.positions) == (Method.APPROXIMATE, (1,))


def test_a_permission_counts_for_no_other_stage(waiting: Any) -> None:
    allow(waiting)
    lose(waiting, 3)
    for name in ("spare", "other"):
        waiting.register(name)
        waiting.up(name)

    assert waiting.plan.method is Method.RESTART


def refusal(world: Any, *stages: int) -> str:
    verdict = judge_permission(world.state, stages or None, world.now_s)
    assert not verdict.applies
    with pytest.raises(NotApplicableError) as caught:
        allow(world, *stages)
    assert str(caught.value) == verdict.reason
    return verdict.reason


def test_a_permission_that_would_have_no_effect_is_refused(waiting: Any, start: Start) -> None:
    assert "the permission is for stage 2, and lost is stage 1" in refusal(waiting, 2)
    assert "is for stages 1, 3, and lost is stage 1" in refusal(waiting, 1, 3)
    whole = start(replicas=1, lanes=1, stages=5)
    assert "the job is whole" in refusal(whole)
    lose(waiting, 2)
    assert refusal(waiting) == "stage 1 and its neighbour stage 2 are lost together"
    assert judge_permission(waiting.state, None, 0.0).why_not[-1].startswith("row 5 (approximate)")
    for name in ("spare", "other"):
        waiting.register(name)
        waiting.up(name)
    assert "recovers already, by restart in q" in refusal(waiting)
    waiting.send(StopRequested())
    assert "the job is stopped" in refusal(waiting)


def test_a_job_whose_newest_step_is_on_the_disk_needs_no_permission(waiting: Any) -> None:
    waiting.state = replace(waiting.state, durable=5)
    assert refusal(waiting) == "an exact source (step 5) is left"


SWAPPED: Outline = tuple(
    (
        *((BlockOutline(name="embedding", kind="embedding"),) if stage == 0 else ()),
        BlockOutline(name=f"layers.{stage}", kind="layer"),
        *((BlockOutline(name="head", kind="head"),) if stage == 3 else ()),
    )
    for stage in range(4)
)


def swapped(start: Start, *, guards: int = 1, replicas: int = 1, goes_back: bool = False) -> Any:
    """A swapped pipeline of four stages with trainers to spare, which has committed no step yet."""
    how = {"order": Order.SWAPPED, "guards": guards, "approximate": ALLOWED}
    how |= {"goes_back": goes_back}
    world = start(spares=4, replicas=replicas, lanes=replicas, stages=4, **how)
    world.register("teller")
    world.up("teller", outline=SWAPPED)
    return world


@pytest.mark.parametrize("stage", [0, 2])
def test_a_person_allows_a_recovery_of_a_swapped_pipeline(start: Start, stage: int) -> None:
    """Guards keep what ends alone have though the policy is off."""
    world = start(replicas=1, lanes=1, stages=4, order=Order.SWAPPED, guards=1)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=SWAPPED))
    for _ in range(5):
        world.commit()
    lose(world, stage)
    assert world.state.phase is JobPhase.WAITING
    allow(world, stage)
    world.register("spare")
    world.up("spare")

    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (stage,))
    assert record(world).allowed_by == "alice"


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 2), (0, 3), (1,)])
def test_each_stage_of_a_swapped_pipeline_is_ordered_to_be_made_anew(
    start: Start, lost: tuple[int, ...]
) -> None:
    world = swapped(start)
    for _ in range(5):
        world.commit()
    hows = {p.stage: p.reason for p in show_lineage(world.state).stages if p.possible}
    assert sorted(hows) == [0, 1, 2, 3]
    assert hows[0] == "a copy of stage 1, and embedding exactly as guards in stage 1 have it"
    lose(world, *lost)

    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, lost)
    world.stored()


@pytest.mark.parametrize(
    ("lost", "guards", "commits"), [((0, 1), 1, 5), ((2, 3), 1, 5), ((0,), 0, 5), ((0,), 1, 0)]
)
def test_an_end_without_twin_or_guard_is_not_made_anew(
    start: Start, lost: tuple[int, ...], guards: int, commits: int
) -> None:
    world = swapped(start, guards=guards)
    for _ in range(commits):
        world.commit()
    first = show_lineage(world.state).stages[0]
    assert first.possible == (guards == 1 and commits > 0)
    lacks = "stage 0: stage 1 has no block like embedding, and no guard of embedding is left"
    assert first.possible or first.reason == lacks
    lose(world, *lost)

    assert (world.plan.method, world.plan.fork) == (Method.RESTART, None)


def test_a_job_with_guards_is_scaled_down_and_fewer_serve(start: Start) -> None:
    world = swapped(start, guards=2, replicas=2)
    world.commit()
    assert sorted(cell.end for cell in world.state.guards) == [0, 0, 3, 3]

    world.send(ScaleRequested(replicas=1))
    world.stored()
    world.settle()
    for _ in range(3):
        world.commit()

    assert len(world.plan.positions[1]) == 1
    assert sorted(cell.end for cell in world.state.guards) == [0, 3]
    lose(world, 0)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (0,))


def test_the_number_of_guards_cannot_change_in_a_running_job(start: Start) -> None:
    world = swapped(start)
    with pytest.raises(
        InvalidSpecError, match=r"approximate\.guards.*is 2, was 1: it cannot change"
    ):
        world.send(JobSubmitted(config=replace(world.state.config, guards=2)))


def test_guards_that_have_loaded_a_state_have_no_copy_until_a_step_is_committed(
    start: Start,
) -> None:
    world = swapped(start)
    for _ in range(5):
        world.commit()
    lose(world, 0, 1)
    assert world.plan.method is Method.RESTART
    assert not show_lineage(world.state).stages[0].possible
    world.settle(step=0)
    world.commit(step=0)
    assert show_lineage(world.state).stages[0].possible


def test_guards_of_tainted_steps_count_no_more(start: Start) -> None:
    world = swapped(start, replicas=2, goes_back=True)
    for _ in range(5):
        world.commit()
    assert show_lineage(world.state).stages[0].possible
    wrong = world.member(1, 2)

    world.tell(world.about(FactKind.NAMED, wrong, evidence="why", since=3, step=5))

    assert [v.version for v in world.plan.voided] == [3]
    assert not show_lineage(world.state).stages[0].possible
    world.settle(step=0)
    assert not show_lineage(world.state).stages[0].possible
    world.commit(step=0)
    assert show_lineage(world.state).stages[0].possible, "they have copied anew"


def test_what_never_has_row_5_says_why(start: Start) -> None:
    for world, words in (
        (start(replicas=1, lanes=1, stages=1), "a pipeline of one stage has no other"),
        (start(replicas=1, lanes=1, stages=3), "no trainer has told of what blocks"),
    ):
        page = show_lineage(world.state)
        assert (page.exact, page.course, page.allowed) == (True, "exact", False)
        assert all(words in stage.reason and not stage.possible for stage in page.stages)
        assert len(page.stages) == world.state.shape.stages


@pytest.mark.parametrize(
    ("limit", "words"),
    [(None, "with two stages none"), (9, "with two stages none"), (8, "no trainer has told")],
)
def test_two_stages_in_order_load_no_checkpoint_alone_that_all_would_go_back_to(
    start: Start, limit: int | None, words: str
) -> None:
    rules = ApproximateConfig(stale_steps=9, after_lost_steps=limit)
    page = show_lineage(start(replicas=1, lanes=1, stages=2, approximate=rules).state)
    assert all(words in stage.reason for stage in page.stages)


def test_the_lineage_says_what_each_stage_could_be_made_anew_from(world: Any) -> None:
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    page = show_lineage(world.state)

    assert (page.course, tuple(told.fork for told in page.forks), page.num_forks) == (
        "approximate since step 5",
        FORKED.newest,
        1,
    )
    assert page.forks[0].outcome is None, "no step with it is committed"
    assert (page.allowed, page.after_lost_steps) == (True, 2)
    assert [(stage.stage, stage.possible) for stage in page.stages] == [
        (0, False),
        (1, True),
        (2, True),
        (3, True),
        (4, False),
    ]
    assert page.stages[0].reason == "stage 0 is an end of the pipeline: it has no two neighbours"
    assert page.stages[1].reason.startswith("stages 0 and 2, weighed by their squared gradient")


def entry(stage: int, fork: Fork | None, quorum: int = 2) -> LedgerEntry:
    """Of the step at the fork's version, as the writer of a stage tells it."""
    digest = ForkedState(fork=digest_of_fork(fork), masters=f"state-{stage}") if fork else None
    return LedgerEntry(
        step=5,
        stage=stage,
        quorum=QuorumId(id=quorum, nonce="n"),
        gradient="",
        masters="later",
        data="",
        loss=1.0,
        norm=1.0,
        tokens=1,
        step_s=1.0,
        replicas=1,
        forked=digest,
    )


def test_what_came_of_a_fork_is_known_from_the_first_step_that_was_committed_with_it() -> None:
    fork = fork_at(5, 1)
    ledger = {(5, stage, 0): entry(stage, fork) for stage in range(5)}
    assert list_keys((fork,)) == ((5, 0, 0), (5, 1, 0), (5, 2, 0))

    (told,) = tell_forks((fork,), ledger)

    assert told.fork == fork
    assert told.outcome is not None
    assert told.outcome.quorum == QuorumId(id=2, nonce="n")
    assert [(s.stage, s.masters) for s in told.outcome.states] == [
        (0, "state-0"),
        (1, "state-1"),
        (2, "state-2"),
    ]


@pytest.mark.parametrize("quorums", [(2, 3, 2), (3, 2, 2), (3, 4, 2)])
def test_what_came_of_a_fork_is_known_though_its_first_step_was_rolled_forward(
    quorums: tuple[int, ...],
) -> None:
    """Who rolls forward to a step tells of the quorum in which it does, not of the one before."""
    fork = fork_at(5, 1)
    ledger = {(5, i, 0): entry(i, fork, quorum) for i, quorum in enumerate(quorums)}

    (told,) = tell_forks((fork,), ledger)

    assert told.outcome is not None
    assert told.outcome.quorum == QuorumId(id=2, nonce="n")
    assert [s.masters for s in told.outcome.states] == ["state-0", "state-1", "state-2"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="not told"),
        pytest.param({"fork": None}, id="replayed, or from before the fork"),
        pytest.param({"fork": fork_at(5, 3)}, id="of another fork of this version"),
    ],
)
def test_what_is_not_sure_to_have_come_of_a_fork_is_not_told(change: dict[str, Any]) -> None:
    fork = fork_at(5, 1)
    ledger = {(5, stage, 0): entry(stage, fork) for stage in (0, 1)}
    if change:
        ledger[5, 2, 0] = entry(2, **change)

    (told,) = tell_forks((fork,), ledger)

    assert (told.fork, told.outcome) == (fork, None)


def test_a_step_that_was_rolled_to_the_forks_version_says_nothing_of_what_follows(
    world: Any,
) -> None:
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    commit(world, 4, since=None)

    assert world.state.approximate_since == 5
    assert world.state.history == (fork_at(5, 1),)


def test_the_first_members_word_counts_though_commits_were_quicker(world: Any) -> None:
    lose(world, 1)
    for step in range(5, 5 + COMMITS_THAT_SETTLE):
        commit(world, step, since=5)
    assert world.state.history == ()
    first = next(m for m in world.plan.members if m.index == 0)
    world.tell(world.about(FactKind.SETTLED, first, step=5, history=FORKED))

    assert (world.state.approximate_since, world.state.history) == (5, (fork_at(5, 1),))


def finish_without(world: Any, *silent: Member, history: ToldHistory | None) -> None:
    """All but some members say that they go on in the plan, and that they have finished."""
    since = history.since if history is not None else None
    for member in world.plan.members:
        if member in silent:
            continue
        known = history if member.index == 0 else None
        world.tell(world.about(FactKind.SETTLED, member, step=5, history=known))
        world.finish(member, masters="m", history="h", approximate_since=since)


@pytest.fixture
def doubled(start: Start) -> Any:
    """Two replicas of five stages, and four spares."""
    world = start(spares=4, replicas=2, lanes=2, stages=5, approximate=ALLOWED)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    world.tell(*(world.down_fact(world.member(replica, 1)) for replica in (0, 1)))
    return world


def test_a_job_that_is_complete_before_all_told_that_they_go_on_says_since_when(
    doubled: Any,
) -> None:
    """As where no replica of the api was up from the plan of the fork to the last step."""
    world = doubled
    joiner = next(m for m in world.plan.members if m.joining and m.rank.replica)
    finish_without(world, joiner, history=FORKED)

    state = world.state
    assert state.phase is JobPhase.COMPLETE
    assert (state.approximate_since, state.history) == (5, (fork_at(5, 1),))
    last = record(world)
    assert (last.exact, last.approximate_since) == (False, 5)
    assert list(world.announced())[-3:] == ["StageReinitialised", "Settled", "Complete"]


def test_last_states_say_since_when_if_the_first_member_did_not(doubled: Any) -> None:
    world = doubled
    first = world.plan.members[0]
    at = {(m.rank.stage): m for m in world.plan.members if m is not first}
    for member in at.values():
        world.finish(member, masters="m", history="h", approximate_since=5)
    world.tell(world.down_fact(first))

    state = world.state
    assert state.phase is JobPhase.COMPLETE
    assert (state.approximate_since, state.history) == (5, ())
    assert "approximate since step 5: the job's last states say so" in world.messages()


def test_a_first_member_that_joins_in_a_fork_is_waited_for_as_it_alone_tells_of_it(
    start: Any,
) -> None:
    """No replica of the api was up meanwhile, and its pod is the last to reach the new one."""
    world = start(spares=4, replicas=2, lanes=2, stages=5, approximate=ALLOWED)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    lost = (world.member(0, 0), world.member(0, 1), world.member(1, 1))
    world.tell(*(world.down_fact(member) for member in lost))
    first = world.plan.members[0]
    assert world.plan.fork is not None
    assert first.joining
    how = {"masters": "m", "history": "h", "approximate_since": 5}
    for member in world.plan.members[1:]:
        world.finish(member, **how)
    assert world.state.phase is not JobPhase.COMPLETE
    world.tell(world.about(FactKind.SETTLED, first, step=5, history=FORKED))
    world.finish(first, **how)

    assert world.state.phase is JobPhase.COMPLETE
    assert (world.state.approximate_since, world.state.history) == (5, (fork_at(5, 1),))


def test_last_states_say_that_a_job_that_went_back_is_exact_again(doubled: Any) -> None:
    world = doubled
    world.settle(step=5, history=FORKED)
    commit(world, 5, since=5)
    world.tell(*(world.down_fact(world.member(replica, 0)) for replica in (0, 1)))
    assert world.plan.method is Method.RESTART
    first = world.plan.members[0]
    for member in world.plan.members[1:]:
        world.tell(world.about(FactKind.SETTLED, member, step=0))
        world.finish(member, masters="m")
    world.tell(world.down_fact(first))

    assert world.state.phase is JobPhase.COMPLETE
    assert (world.state.approximate_since, world.state.history) == (None, ())
    assert list(world.announced())[-2:] == ["ExactAgain", "Complete"]


def test_a_history_that_is_full_gets_no_further_fork(world: Any) -> None:
    world.state = replace(world.state, num_forks=MAX_FORKS)
    lose(world, 1)

    assert world.plan.method is Method.RESTART
    assert "the most that a history can hold" in show_lineage(world.state).stages[1].reason


def test_a_commit_says_since_when_though_not_all_have_told_that_they_go_on(doubled: Any) -> None:
    world = doubled
    first = world.plan.members[0]
    world.tell(world.about(FactKind.SETTLED, first, step=5, history=FORKED))
    assert world.state.approximate_since is None, "it may have gone on alone"
    commit(world, 5, since=5)

    assert world.state.approximate_since == 5
    assert "StageReinitialised" not in world.announced()
    rest = [m for m in world.plan.members if m is not first]
    world.tell(*(world.about(FactKind.SETTLED, member, step=5) for member in rest))
    assert world.state.history == (fork_at(5, 1),)
    assert world.announced().count("StageReinitialised") == 1


def park_for(world: Any, number: int) -> None:
    """All members have come to the version of a fork that they make again."""
    facts = (world.about(FactKind.PARKED, m, repeats=number) for m in world.plan.members)
    world.tell(*facts)
    world.tick(10.0)


@pytest.fixture
def repeating(start: Start) -> Any:
    """A job that makes the fork of another run again, and may not make one of its own."""
    fork = codec.encode(fork_at(5, 1))
    world = start(spares=2, replicas=1, lanes=1, stages=5, repeats=(fork,), approximate=ALLOWED)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    return world


def test_the_fork_of_another_run_is_ordered_when_all_have_come_to_its_version(
    repeating: Any,
) -> None:
    park_for(repeating, 0)

    plan = repeating.plan
    assert (plan.method, plan.planned, plan.lineage) == (Method.APPROXIMATE, False, 1)
    assert (plan.fork.positions, plan.fork.since) == ((1,), 0)
    assert plan.fork.repeats == fork_at(5, 1)
    assert not any(m.joining for m in plan.members)
    repeating.settle(step=5, history=FORKED)
    repeating.commit(step=5)
    assert record(repeating).fault == "nothing has failed"
    assert (record(repeating).exact, record(repeating).approximate_since) == (False, 5)


def test_a_fork_that_is_made_again_is_repeated_until_all_have_settled(repeating: Any) -> None:
    park_for(repeating, 0)
    repeating.park(repeating.member(0, 2))
    repeating.tick(10.0)

    assert repeating.plan.fork.repeats == fork_at(5, 1)
    assert (repeating.plan.lineage, repeating.plan.fork.since) == (2, 0)


def repeating_two(start: Start) -> Any:
    """A job that makes two forks of another run again, both at version 5."""
    both = tuple(codec.encode(fork_at(5, stage)) for stage in (1, 3))
    world = start(spares=2, replicas=1, lanes=1, stages=5, repeats=both, approximate=ALLOWED)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    park_for(world, 0)
    return world


def test_the_second_fork_of_a_version_is_ordered_once_all_have_made_the_first(start: Start) -> None:
    world = repeating_two(start)
    made = [m for m in world.plan.members if m.rank.stage != 1]
    first = world.plan.quorum
    for member in made:
        world.tell(world.about(FactKind.SETTLED, member, step=5))
        world.tell(world.about(FactKind.PARKED, member, repeats=1))
    world.tick(40.0)
    assert world.plan.quorum == first

    maker = world.member(0, 1)
    world.tell(world.about(FactKind.SETTLED, maker, step=5))
    world.tell(world.about(FactKind.PARKED, maker, repeats=1))
    world.tick(40.0)
    assert world.plan.fork.repeats == fork_at(5, 3)


def test_a_first_fork_that_failed_is_ordered_again_before_the_second(start: Start) -> None:
    world = repeating_two(start)
    first = world.plan.quorum
    asks = world.member(0, 0)
    world.tell(world.about(FactKind.SETTLED, asks, step=5, history=FORKED))
    world.tell(world.about(FactKind.PARKED, asks, repeats=1))
    world.park(world.member(0, 1))
    world.tick(40.0)

    assert world.plan.quorum != first
    assert world.plan.fork.repeats == fork_at(5, 1)


def test_a_fork_that_comes_to_nothing_again_and_again_fails_the_job(repeating: Any) -> None:
    """All settle without it, as after a restart from its very version, and ask for it again."""
    for _ in range(4):
        park_for(repeating, 0)
        repeating.tick(40.0)
        assert repeating.state.phase is not JobPhase.FAILED
        repeating.settle(step=5)
    park_for(repeating, 0)
    repeating.tick(400.0)

    assert repeating.state.phase is JobPhase.FAILED
    assert "was ordered 4 times at step 5 and came to nothing" in repeating.state.outcome


def test_a_lineage_of_other_blocks_fails_the_job(start: Start) -> None:
    world = start(
        spares=2,
        replicas=1,
        lanes=1,
        stages=5,
        repeats=(codec.encode(fork_at(5, 1)),),
        approximate=ALLOWED,
    )
    other = (*OUTLINE[:1], (BlockOutline(name="mine", kind="layer"),), *OUTLINE[2:])
    world.register("teller")
    world.up("teller", outline=other)
    for _ in range(5):
        world.commit()
    park_for(world, 0)

    assert world.state.phase is JobPhase.FAILED
    assert "stage 1 has the blocks mine here, the lineage makes layers.1" in world.state.outcome


def test_a_job_that_repeats_a_lineage_makes_no_fork_of_its_own(repeating: Any) -> None:
    lose(repeating, 2)

    assert (repeating.plan.method, repeating.plan.fork) == (Method.RESTART, None)
    page = show_lineage(repeating.state)
    assert {stage.reason for stage in page.stages} == {
        "the job repeats the lineage of another run, and makes no other fork"
    }


def test_a_trainer_that_asks_for_a_fork_that_there_is_not_fails_the_job(repeating: Any) -> None:
    park_for(repeating, 7)

    assert repeating.state.phase is JobPhase.FAILED
    assert repeating.state.outcome == "a trainer asks for fork 8 of 1"


PATIENT = replace(ALLOWED, wait_s=20.0)


def patient(start: Start, spares: int = 2) -> Any:
    world = start(spares=spares, replicas=1, lanes=1, stages=5, approximate=PATIENT)
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    return world


def test_who_was_only_cut_off_is_waited_for_and_the_job_stays_exact(start: Start) -> None:
    world = patient(start)
    silent = world.member(0, 1)
    world.tick(**{silent.slot.pod: 99.0})
    assert world.state.phase is JobPhase.WAITING
    assert f"unless {silent.slot.pod} is heard in time" in world.state.waiting.reason
    world.tick(19.0)
    world.register(silent.slot.pod)
    world.up(silent.slot.pod, life=silent.incarnation)

    assert (world.plan.method, world.plan.fork, world.plan.lineage) == (Method.REFORM, None, 0)
    assert world.plan.member_of(silent.slot, silent.incarnation) is not None


def test_who_is_not_heard_in_time_is_replaced_and_refused_by_its_lineage(start: Start) -> None:
    world = patient(start)
    silent = world.member(0, 1)
    world.tick(**{silent.slot.pod: 99.0})
    since = world.state.waiting.since_s
    world.tick(19.0)
    assert world.state.waiting.since_s == since
    world.tick(2.0)

    plan = world.plan
    assert (plan.method, plan.fork.positions, plan.lineage) == (Method.APPROXIMATE, (1,), 1)
    world.register(silent.slot.pod)
    world.up(silent.slot.pod, life=silent.incarnation)
    assert world.plan == plan
    told = {"stage": 1, "inner": 0, "step": 5, "evidence": "it is of lineage 0"}
    fact = world.about(FactKind.STATE_REFUSED, silent, **told)
    first, again = world.tell(fact), world.tell(fact)
    words = f"{silent.slot} has come back with the state of stage 1 after 5 steps, which is refused"
    assert [words in each.message for each in announced(first, "StateRefused")] == [True]
    assert not announced(again, "StateRefused"), "it was told"
    (known,) = world.state.refused_states
    assert known.describe().endswith("of which no bit is used: it is of lineage 0")
    for life in range(2 * MAX_REFUSED_STATES):
        world.tell(replace(fact, incarnation=Incarnation(f"again-{life}")))
    *old, new = world.state.refused_states
    assert (old[0].reason, new.reason) == ("", fact.evidence), "only the newest are shown"
    assert [bool(each.reason) for each in old].count(True) == MAX_REFUSED_STATES - 1
    for wrong in ({"stage": 5}, {"inner": 1}):
        with pytest.raises(RemoteProtocolError, match=r"StateRefused\.(stage|inner): \d is none"):
            world.tell(replace(fact, **wrong))
    steps = world.state.shape.steps
    with pytest.raises(RemoteProtocolError, match=rf"step: {steps + 1} is more than the job's"):
        world.tell(replace(fact, step=steps + 1))


def test_one_life_is_told_of_once_for_each_place_whatever_else_it_says(start: Start) -> None:
    world = patient(start)
    silent = world.member(0, 1)
    world.tick(**{silent.slot.pod: 99.0})
    world.tick(19.0)
    world.tick(2.0)
    world.register(silent.slot.pod)
    world.up(silent.slot.pod, life=silent.incarnation)
    shape, told = world.state.shape, 0
    for number in range(3 * MORE_STATES):
        what = {"stage": number % shape.stages, "step": number % shape.steps}
        fact = world.about(
            FactKind.STATE_REFUSED, silent, inner=0, evidence=f"it is {number}", **what
        )
        told += len(announced(world.tell(fact), "StateRefused"))
        other = replace(fact, incarnation=Incarnation(f"another-{number % MORE_STATES}"))
        world.tell(replace(other, stage=0))
    assert told == shape.stages
    assert len(world.state.refused_states) == shape.stages + MORE_STATES


def test_a_state_that_is_refused_in_an_exact_job_is_no_news(start: Start) -> None:
    """All have gone back, so that nobody has come too late."""
    world = start(spares=1, replicas=1, lanes=1, stages=5)
    told = {"stage": 1, "inner": 0, "step": 5, "evidence": "it is of lineage 0"}
    outcome = world.tell(world.about(FactKind.STATE_REFUSED, world.member(0, 1), **told))

    assert not announced(outcome, "StateRefused")
    assert world.state.refused_states == ()


def announced(outcome: Transition, code: str) -> list[Announce]:
    return [a for a in outcome.actions if isinstance(a, Announce) and a.code == code]


def test_the_wait_for_who_was_cut_off_is_another_than_that_for_an_outline(start: Start) -> None:
    """It has its own reason, and its own deadline."""
    world = patient(start)
    world.tick(**{world.member(0, 1).slot.pod: 99.0})
    answer = ladder.decide(find_situation(world.state, 1, world.now_s, PATIENT))

    answers = [wait_for_outline(world.state, answer, silent=both) for both in (False, True)]
    lacks = {a.lack for a in (*answers, wait_for_silent(world.state, answer))}
    assert len(lacks) == 3
    assert len({lack.stages for lack in lacks}) == 1


def forget_all_but_the_plan(world: Any) -> tuple[Plan, Member]:
    """Lose the store while a member is cut off; return the plan and this member."""
    plan, silent = world.plan, world.member(0, 1)
    world.state = machine.initial(world.state.config, world.now_s)
    world.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=5))
    world.send(Tick(heard=world.state.unheard))
    world.register("spare")
    world.up("spare")
    world.tick(**{silent.slot.pod: 99.0})
    return plan, silent


def test_who_waits_for_an_outline_and_for_who_was_cut_off_says_both(start: Start) -> None:
    """The store was lost, too: until it has been told of the blocks, it knows of no fork."""
    world = patient(start)
    plan, silent = forget_all_but_the_plan(world)
    outline, exact = "no trainer has told again yet", f"unless {silent.slot.pod} is heard in time"

    def reasons() -> list[bool]:
        assert world.state.phase is JobPhase.WAITING
        return [words in world.state.waiting.reason for words in (outline, exact)]

    assert reasons() == [True, True]
    world.tick(21.0)
    assert reasons() == [True, False], "the other wait is over"
    first = plan.members[0]
    world.up(first.slot.pod, life=first.incarnation, outline=OUTLINE)
    assert world.plan.method is Method.APPROXIMATE


def test_who_was_cut_off_is_waited_for_after_the_word_on_the_blocks(start: Start) -> None:
    world = patient(start)
    plan, silent = forget_all_but_the_plan(world)
    first = plan.members[0]
    world.up(first.slot.pod, life=first.incarnation, outline=OUTLINE)

    reason = world.state.waiting.reason
    assert "stage 1 has no exact source" in reason
    assert f"unless {silent.slot.pod} is heard in time" in reason
    assert "no trainer has told" not in reason


def test_who_surely_ended_is_not_waited_for(start: Start) -> None:
    world = patient(start)
    lose(world, 1)

    assert world.plan.method is Method.APPROXIMATE


def test_a_person_who_allows_a_recovery_waits_for_nobody(start: Start) -> None:
    world = patient(start)
    world.tick(**{world.member(0, 1).slot.pod: 99.0})
    world.send(ApproximationAllowed(who="ann"))

    assert world.plan.method is Method.APPROXIMATE


def test_the_wait_for_a_trainer_begins_after_that_for_who_was_cut_off(start: Start) -> None:
    """The job does not fail at a deadline that was over meanwhile."""
    world = start(
        replicas=1,
        lanes=1,
        stages=5,
        spares=1,
        approximate=replace(ALLOWED, wait_s=500.0),
        startup_deadline_s=10.0,
    )
    world.up("spare-0", outline=OUTLINE)
    for _ in range(5):
        world.commit()
    world.register("teller")
    world.up("teller", outline=OUTLINE)
    world.tick(**{world.member(0, 1).slot.pod: 99.0})
    world.tick(400.0)
    assert world.state.phase is JobPhase.WAITING
    world.tick(101.0)
    assert world.plan.method is Method.APPROXIMATE


@pytest.mark.parametrize(
    ("limit", "alone"), [(None, False), (2, True), (9, True), (10, False), (11, False)]
)
def test_prospects_name_no_checkpoint_that_the_policy_has_no_stage_load_alone(
    start: Start, limit: int | None, alone: bool
) -> None:
    policy = ApproximateConfig(after_lost_steps=limit, stale_steps=10)
    world = start(spares=2, replicas=1, lanes=1, stages=5, approximate=policy)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=OUTLINE))
    for _ in range(5):
        world.commit()
    world.state = replace(world.state, durable=2)

    inner, end = (show_lineage(world.state).stages[stage] for stage in (1, 0))
    own = "its own checkpoint of step 2"
    assert (inner.reason == own, end.reason == own) == (alone, alone)
    assert inner.possible
    assert alone or inner.reason.startswith("stages 0 and 2, weighed by")
    assert end.possible is alone
