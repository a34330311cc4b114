"""A permission that is given ahead of a loss: for one recovery, and within its limit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.coordinator.test_approximate import (
    FORKED,
    OUTLINE,
    commit,
    fork_at,
    lose,
    record,
    told,
)

from mainstay_core.coordinator.events import (
    ApproximationAllowed,
    ApproximationWithdrawn,
    JobSubmitted,
    PlanReported,
    StopRequested,
    StoreReopened,
    SuspendRequested,
)
from mainstay_core.coordinator.lineage import show_lineage
from mainstay_core.coordinator.permission import NotApplicableError, judge_permission
from mainstay_core.coordinator.suspension import suspend_now
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

Start = Callable[..., Any]
LIMIT = 2
SAVES = {"checkpoint_every_steps": 10, "checkpoint_dir": "/ckpt"}


def running(start: Start, *, spares: int = 4, **fields: Any) -> Any:
    """A job of five stages without the policy that has committed five steps."""
    world = start(spares=spares, replicas=1, lanes=1, stages=5, **fields)
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=OUTLINE))
    for _ in range(5):
        world.commit()
    return world


@pytest.fixture
def whole(start: Start) -> Any:
    """One that has trainers to spare."""
    return running(start)


def allow(world: Any, *stages: int, who: str = "alice", limit: int | None = LIMIT) -> None:
    event = ApproximationAllowed(who=who, stages=stages or None, after_lost_steps=limit)
    world.send(event)


def withdraw(world: Any) -> None:
    world.send(ApproximationWithdrawn(who="bob"))


def refusal(world: Any, *stages: int, limit: int = LIMIT) -> str:
    verdict = judge_permission(world.state, stages or None, world.now_s, limit)
    assert not verdict.applies
    with pytest.raises(NotApplicableError) as caught:
        allow(world, *stages, limit=limit)
    assert str(caught.value) == verdict.reason
    return verdict.reason


def test_a_job_with_a_trainer_to_spare_has_gone_back_before_anybody_can_be_asked(
    whole: Any,
) -> None:
    """So who would not go back so far has to say so before."""
    with pytest.raises(NotApplicableError, match="the job is whole"):
        allow(whole, limit=None)
    lose(whole, 1)

    assert (whole.plan.method, whole.state.phase) == (Method.RESTART, JobPhase.RECOVERING)
    for limit in (None, LIMIT):
        with pytest.raises(NotApplicableError, match="recovers already, by restart"):
            allow(whole, limit=limit)


def test_a_permission_given_ahead_is_for_one_recovery_and_recorded_with_the_name(
    whole: Any,
) -> None:
    allow(whole)
    assert (
        "alice gives a permission ahead of the loss, for one recovery of stages 0 to 4 that would "
        "lose more than 2 steps otherwise: the job is approximate from there on. Now it would go "
        "back to the seed, and lose 5 steps"
    ) in whole.messages()
    ahead = show_lineage(whole.state).ahead
    assert ahead is not None
    assert (ahead.who, ahead.after_lost_steps) == ("alice", LIMIT)
    for _ in range(2):
        whole.commit()
    whole.stored()
    assert whole.state.ahead == ahead, "steps do not use it up"
    lose(whole, 1)

    assert (whole.plan.method, whole.plan.fork.positions) == (Method.APPROXIMATE, (1,))
    assert whole.plan.fork.how == ApproximateConfig(after_lost_steps=LIMIT)
    assert record(whole).allowed_by == "alice"
    assert record(whole).reason.endswith("; alice allowed it")
    assert show_lineage(whole.state).ahead is None
    assert show_lineage(whole.state).permitted_by == "alice"
    whole.stored()
    whole.settle(step=7, history=FORKED)
    assert (whole.state.permission, whole.state.ahead) == (None, None)
    commit(whole, 7, 5)
    lose(whole, 3)
    assert whole.plan.method is Method.RESTART


def test_a_permission_given_ahead_lasts_while_its_recovery_is_interrupted(whole: Any) -> None:
    allow(whole)
    lose(whole, 1)
    lose(whole, 3)

    assert (whole.plan.method, whole.plan.fork.positions) == (Method.APPROXIMATE, (1, 3))
    assert whole.plan.fork.how.after_lost_steps == LIMIT


def test_a_job_that_loses_no_more_than_its_giver_would_goes_back_and_keeps_the_permission(
    whole: Any,
) -> None:
    allow(whole)
    whole.state = replace(whole.state, durable=3)
    lose(whole, 1)
    assert whole.plan.method is Method.RESTART
    whole.settle(step=3)
    for step in range(3, 8):
        whole.commit(step=step)
    lose(whole, 1)

    assert whole.plan.method is Method.APPROXIMATE


def test_a_permission_given_ahead_counts_for_no_stage_that_it_does_not_name(whole: Any) -> None:
    allow(whole, 1)
    lose(whole, 1, 3)

    assert whole.plan.method is Method.RESTART
    assert whole.state.ahead is not None


def test_what_a_person_allows_of_a_job_that_waits_leaves_what_was_given_ahead(start: Start) -> None:
    world = running(start, spares=0)
    allow(world, limit=9)
    lose(world, 1)
    assert world.state.phase is JobPhase.WAITING
    allow(world, who="carol", limit=None)
    world.register("spare")
    world.up("spare")

    assert (world.plan.method, record(world).allowed_by) == (Method.APPROXIMATE, "carol")
    assert world.state.ahead is not None


def test_a_holder_that_is_only_cut_off_is_waited_for_and_the_permission_stays(start: Start) -> None:
    rules = ApproximateConfig(wait_s=20.0)
    world = running(start, permitted=rules)
    allow(world)
    silent = world.member(0, 1)
    world.tick(**{silent.slot.pod: 99.0})
    assert f"unless {silent.slot.pod} is heard in time" in world.state.waiting.reason
    assert world.state.ahead is not None
    world.register(silent.slot.pod)
    world.up(silent.slot.pod, life=silent.incarnation)

    assert world.plan.fork is None
    assert world.plan.member_of(silent.slot, silent.incarnation) is not None
    world.settle()
    world.commit()
    assert world.state.ahead is not None


def test_a_permission_given_ahead_is_taken_back_until_a_plan_uses_it(whole: Any) -> None:
    with pytest.raises(NotApplicableError, match="nobody has given a permission"):
        withdraw(whole)
    allow(whole)
    withdraw(whole)
    assert (
        "bob takes back what alice has allowed for one recovery of stages 0 to 4 that would lose "
        "more than 2 steps otherwise"
    ) in whole.messages()
    assert whole.state.ahead is None
    allow(whole)
    lose(whole, 1)
    with pytest.raises(NotApplicableError, match="is carried out already, as alice has allowed it"):
        withdraw(whole)
    whole.settle(step=5, history=FORKED)
    with pytest.raises(NotApplicableError, match="nobody has given a permission"):
        withdraw(whole)


def test_a_permission_for_the_recovery_that_a_job_waits_for_is_taken_back(start: Start) -> None:
    world = running(start, spares=0)
    lose(world, 1)
    assert world.state.phase is JobPhase.WAITING
    allow(world, limit=None)
    withdraw(world)
    world.register("spare")
    world.up("spare")

    assert world.plan.method is Method.RESTART


def test_a_second_permission_takes_the_place_of_the_first(whole: Any) -> None:
    allow(whole)
    allow(whole, 1, who="bob", limit=50)
    assert "This replaces what alice has allowed ahead" in whole.messages()
    lose(whole, 1)

    assert whole.plan.method is Method.RESTART


def test_a_permission_given_ahead_is_refused_where_it_would_have_no_effect(
    whole: Any, start: Start
) -> None:
    assert refusal(whole, 7) == "the job has stages 0 to 4, and no stage 7"
    assert refusal(whole, 0).startswith("stage 0 is an end of the pipeline")
    assert refusal(whole, 1, 4).startswith("stage 4 is an end of the pipeline")
    policy = running(start, approximate=ApproximateConfig(after_lost_steps=9))
    assert "recovery.allowApproximate is on, and needs no permission" in refusal(policy)
    assert "no trainer has told" in refusal(start(replicas=1, lanes=1, stages=5))
    assert "no other to make it anew from" in refusal(start(replicas=1, lanes=1, stages=1))
    waiting = running(start, spares=0)
    lose(waiting, 1)
    assert "waits already, and lost is stage 1: allow that recovery" in refusal(waiting)
    whole.send(StopRequested())
    assert "the job is stopped" in refusal(whole)
    with pytest.raises(NotApplicableError, match="the job is stopped"):
        withdraw(whole)


@pytest.mark.parametrize("stages", [2, 5])
def test_a_limit_by_which_all_go_back_to_every_young_checkpoint_lets_no_stage_load_its_own(
    start: Start, stages: int
) -> None:
    """A checkpoint that an end of the pipeline may load alone is never older than the limit."""
    world = start(
        spares=2, replicas=1, lanes=1, stages=stages, permitted=ApproximateConfig(stale_steps=10)
    )
    outline = (OUTLINE[0], *OUTLINE[1 : stages - 1], OUTLINE[-1])
    world.tell(world.about(FactKind.TRAINER_UP, world.member(0, 0), outline=outline))
    for _ in range(5):
        world.commit()
    world.state = replace(world.state, durable=4)
    for limit in (10, 11, 59):
        why = refusal(world, 0, limit=limit)
        assert why.startswith(
            "stage 0 is an end of the pipeline" if stages > 2 else "with two stages none has two"
        )
        assert why.endswith(
            f"; after_lost_steps: is {limit}, so that all stages go back to a checkpoint of at "
            "most 10 steps ago; must be less than 10 for a stage to load its own alone"
        )
    allow(world, 0, limit=9)

    assert show_lineage(world.state).stages[0].reason == "its own checkpoint of step 4"


def test_an_end_is_allowed_ahead_of_the_checkpoint_that_it_may_load_alone(start: Start) -> None:
    """None is young enough yet. The loss may come when one is."""
    world = running(start, permitted=ApproximateConfig(stale_steps=10))
    why = refusal(world, 0, limit=10)
    assert why.startswith("stage 0 is an end of the pipeline")
    assert why.endswith("must be less than 10 for a stage to load its own alone")
    allow(world, 0, 4)
    assert (
        "; stages 0, 4 can be made anew only if there is a checkpoint of at most 10 steps ago by "
        "then, which is loaded there alone: now there is none"
    ) in world.messages()
    before = world.state
    lose(world, 0)
    assert (world.plan.method, world.state.ahead) == (Method.RESTART, before.ahead)
    world.state = replace(before, durable=2)
    lose(world, 0)
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (0,))


def test_by_a_limit_that_lets_no_stage_load_its_own_checkpoint_neighbours_are_told(
    start: Start,
) -> None:
    world = running(start, permitted=ApproximateConfig(stale_steps=10))
    world.state = replace(world.state, durable=4)
    allow(world, limit=10)

    reasons = [prospect.reason for prospect in show_lineage(world.state).stages]
    assert reasons[1].startswith("stages 0 and 2, weighed by")
    assert reasons[0].startswith("stage 0 is an end of the pipeline")


def test_a_policy_that_is_switched_on_uses_no_permission(whole: Any) -> None:
    allow(whole)
    policy = ApproximateConfig(after_lost_steps=0)
    whole.send(JobSubmitted(config=replace(whole.state.config, approximate=policy)))
    lose(whole, 1)

    assert (whole.plan.method, record(whole).allowed_by) == (Method.APPROXIMATE, "")
    assert whole.state.ahead is not None


def test_a_store_that_was_started_again_gives_no_permission_back(whole: Any) -> None:
    """It may have been used, or taken back, since."""
    whole.send(StoreReopened(server="one"))
    allow(whole)
    whole.send(StoreReopened(server="two"))
    assert whole.state.ahead is None
    assert "the permission of alice does not count any more" in whole.messages()


def test_a_store_that_is_given_a_newer_plan_forgets_a_permission(whole: Any) -> None:
    allow(whole)
    before = whole.state
    lose(whole, 1)
    plan = whole.plan
    whole.state = before
    whole.send(PlanReported(pod=plan.members[0].slot.pod, plan=plan, step=5))

    assert whole.plan == plan
    assert (whole.state.ahead, whole.state.permission) == (None, None)


def test_a_permission_given_ahead_outlasts_a_suspension_and_no_end(whole: Any) -> None:
    allow(whole)
    suspended = suspend_now(whole.state, whole.now_s).state
    assert suspended.phase is JobPhase.SUSPENDED
    assert suspended.ahead == whole.state.ahead
    whole.send(StopRequested())
    assert whole.state.ahead is None


@pytest.fixture
def cut_short(start: Start) -> Any:
    """A job that is suspended as the only maker of a stage is lost, by a permission ahead."""
    world = running(start, spares=1, **SAVES)
    allow(world)
    given = world.state.ahead
    lose(world, 1)
    assert (world.state.permission, world.state.ahead) == (given, None)
    lose(world, 1)
    assert world.state.phase is JobPhase.WAITING
    world.send(SuspendRequested(suspend=True))
    assert world.state.phase is JobPhase.SUSPENDED
    return world


def form_again(world: Any) -> None:
    world.send(SuspendRequested(suspend=False))
    for number in range(5):
        world.register(f"new-{number}")
        world.up(f"new-{number}", outline=OUTLINE)
    assert (world.plan.method, world.plan.fork) == (Method.START, None)


def test_a_permission_counts_again_if_its_recovery_is_cut_short_by_a_suspension(
    cut_short: Any,
) -> None:
    given = cut_short.state.permission
    suspended = show_lineage(cut_short.state, {})
    assert (suspended.ahead, suspended.permitted_by) == (given, "")
    form_again(cut_short)
    assert show_lineage(cut_short.state, {}).ahead == given
    cut_short.settle(step=0)

    assert (cut_short.state.permission, cut_short.state.ahead) == (None, given)
    assert "nothing was made anew: what alice has allowed counts again" in cut_short.messages()


def test_a_permission_is_used_up_if_a_checkpoint_has_what_was_made_by_it(cut_short: Any) -> None:
    """All had gone on and written it before the maker was lost, and had told nobody."""
    form_again(cut_short)
    cut_short.settle(step=10, history=replace(FORKED, made=False))

    assert cut_short.state.approximate_since == 5
    assert (cut_short.state.permission, cut_short.state.ahead) == (None, None)


def test_a_permission_is_used_up_by_a_fork_that_has_taken_the_place_of_another_one(
    start: Start,
) -> None:
    """Stage 1 was made anew at this version already, and stages 1 and 3 by the permission."""
    world = running(start, spares=3, **SAVES)
    allow(world)
    lose(world, 1)
    world.settle(step=5, history=FORKED)
    allow(world, who="carol")
    lose(world, 1, 3)
    assert (world.plan.fork.positions, world.state.permission.who) == ((1, 3), "carol")
    lose(world, 1)
    world.send(SuspendRequested(suspend=True))
    form_again(world)
    world.settle(step=10, history=told(fork_at(5, 1, 3), made=False))

    assert (world.state.permission, world.state.ahead) == (None, None)


def test_a_permission_counts_again_though_a_commit_is_told_before_all_go_on(
    cut_short: Any,
) -> None:
    """The first member has told that no state is approximate, and the commit that all go on."""
    given = cut_short.state.permission
    form_again(cut_short)
    first = cut_short.plan.members[0]
    cut_short.tell(cut_short.about(FactKind.SETTLED, first, step=0))
    commit(cut_short, 0, None)

    assert (cut_short.state.permission, cut_short.state.ahead) == (None, given)


@pytest.mark.parametrize("commits", [False, True])
def test_a_permission_that_a_checkpoint_may_have_used_makes_nothing_before_all_go_on(
    start: Start, commits: bool
) -> None:
    """A stage is lost before all have told that they do; a commit that says so is told last."""
    world = running(start, spares=1, **SAVES)
    allow(world, limit=0)
    lose(world, 1)
    lose(world, 1)
    world.send(SuspendRequested(suspend=True))
    form_again(world)
    lost = world.member(0, 1)
    others = [m for m in world.plan.members if m.slot != lost.slot]
    how = {"step": 10, "history": replace(FORKED, made=False)}
    world.tell(*(world.about(FactKind.SETTLED, m, **how) for m in others))
    lose(world, 1)
    assert world.state.phase is JobPhase.WAITING
    if commits:
        commit(world, 10, 5)
    assert (world.state.permission is None) is commits
    world.register("spare-later")
    world.up("spare-later", outline=OUTLINE)

    assert (world.plan.method, world.plan.fork) == (Method.RESTART, None)


def test_who_allows_the_recovery_at_hand_ends_what_was_given_ahead_and_cut_short(
    cut_short: Any,
) -> None:
    form_again(cut_short)
    others = [m for m in cut_short.plan.members if m.rank.stage != 1]
    cut_short.tell(*(cut_short.about(FactKind.SETTLED, m, step=0) for m in others[1:]))
    lose(cut_short, 1)
    assert cut_short.state.phase is JobPhase.WAITING
    allow(cut_short, who="carol", limit=None)

    assert cut_short.state.permission.who == "carol"
    assert "This ends what alice has allowed ahead" in cut_short.messages()


def test_a_permission_for_the_recovery_at_hand_ends_where_all_go_back(start: Start) -> None:
    """All had gone on from what was made by it, and written that, before they had told anybody."""
    world = running(start, spares=0, **SAVES)
    lose(world, 1)
    allow(world, limit=None)
    for number in range(4):
        world.register(f"new-{number}")
        world.up(f"new-{number}")
    assert (world.plan.method, world.plan.fork.positions) == (Method.APPROXIMATE, (1,))
    lose(world, 0, 1)
    assert world.plan.method is Method.RESTART
    others = [m for m in world.plan.members if m.rank.stage != 1]
    how = {"step": 10, "history": replace(FORKED, made=False)}
    world.tell(*(world.about(FactKind.SETTLED, m, **how) for m in others))
    lose(world, 1)

    assert (world.plan.method, world.state.permission) == (Method.RESTART, None)


@pytest.mark.parametrize("forms", [False, True])
def test_a_permission_whose_recovery_was_cut_short_is_taken_back(
    cut_short: Any, forms: bool
) -> None:
    if forms:
        form_again(cut_short)
    withdraw(cut_short)

    assert "bob takes back what alice has allowed for one recovery" in cut_short.messages()
    assert (cut_short.state.permission, cut_short.state.ahead) == (None, None)


def test_a_permission_for_the_recovery_at_hand_ends_with_a_suspension(start: Start) -> None:
    world = running(start, spares=0, **SAVES)
    lose(world, 1)
    allow(world, limit=None)
    world.send(SuspendRequested(suspend=True))

    assert world.state.phase is JobPhase.SUSPENDED
    assert (world.state.permission, world.state.ahead) == (None, None)


def can_be_made(lost: Sequence[int]) -> bool:
    """Whether each of some stages out of five has two neighbours that are not lost."""
    return all(0 < s < 4 and not {s - 1, s + 1} & set(lost) for s in lost)


@pytest.mark.parametrize("part", range(4))
def test_whatever_is_lost_a_permission_is_used_as_a_brute_force_says(
    start: Start, part: int
) -> None:
    """Exactly if all that is lost is named and can be made anew, and too many steps would go."""
    rng = random.Random(f"ahead {part}")
    used = 0
    for _ in range(40):
        world = running(start, spares=5)
        named = rng.choice(((), (), (1, 2), (1, 3), (1, 2, 3), (2,)))
        limit = rng.choice((0, 1, 3, 10))
        given = rng.random() < 0.85
        if given:
            allow(world, *named, limit=limit)
            if rng.random() < 0.15:
                withdraw(world)
                given = False
        step = rng.randint(5, 14)
        for number in range(5, step):
            world.commit(step=number)
        durable = rng.choice((0, rng.randint(0, step)))
        world.state = replace(world.state, durable=durable)
        stages = range(1, 4) if rng.random() < 0.7 else range(5)
        lost = sorted(rng.sample(stages, rng.choice((1, 1, 2))))
        lose(world, *lost)

        expected = (
            given
            and set(lost) <= set(named or range(5))
            and step - durable > limit
            and can_be_made(lost)
        )
        what = f"{given=} {named=} {limit=} {step=} {durable=} {lost=}: {world.plan.reason}"
        assert world.plan.method is (Method.APPROXIMATE if expected else Method.RESTART), what
        assert (world.state.ahead is not None) is (given and not expected), what
        assert (world.state.permission is not None) is expected, what
        used += expected
    assert 5 < used < 35


def test_a_permission_counts_again_if_its_recovery_has_made_nothing_anew(whole: Any) -> None:
    """The members have found a checkpoint that had become durable just before the loss."""
    allow(whole)
    given = whole.state.ahead
    lose(whole, 1)
    assert (whole.plan.method, whole.state.ahead) == (Method.APPROXIMATE, None)
    whole.settle(step=4)

    assert (whole.state.permission, whole.state.ahead) == (None, given)
    assert (
        "nothing was made anew: what alice has allowed counts again, for one recovery of stages 0 "
        "to 4 that would lose more than 2 steps otherwise"
    ) in whole.messages()
    for step in range(4, 12):
        whole.commit(step=step)
    lose(whole, 2)
    assert (whole.plan.method, record(whole).allowed_by) == (Method.APPROXIMATE, "alice")
    whole.settle(step=12, history=told(fork_at(12, 2)))
    assert (whole.state.permission, whole.state.ahead) == (None, None)


def test_a_permission_counts_again_if_another_stage_is_lost_and_all_go_back(whole: Any) -> None:
    allow(whole, 1)
    lose(whole, 1)
    lose(whole, 3)
    assert whole.plan.method is Method.RESTART
    withdrawn = replace(whole.state)
    whole.settle(step=0)

    assert whole.state.ahead is not None
    whole.state = withdrawn
    withdraw(whole)
    whole.settle(step=0)
    assert whole.state.ahead is None


@pytest.mark.parametrize("settled", ["as made before", "not told"])
def test_a_permission_is_used_up_where_something_may_have_been_made_anew(
    whole: Any, settled: str
) -> None:
    """A fork that was made before an interruption is known by the states' history alone."""
    allow(whole)
    lose(whole, 1)
    lose(whole, 3)
    if settled == "not told":
        assert whole.state.permission is not None
        for step in range(5, 9):
            whole.commit(step=step)
    else:
        whole.settle(step=5, history=replace(FORKED, made=False))

    assert (whole.state.permission, whole.state.ahead) == (None, None)


def test_what_is_allowed_already_is_not_allowed_again(start: Start) -> None:
    """The one that is at hand has no limit, and would be used in place of the one ahead."""
    world = running(start, spares=0)
    allow(world)
    lose(world, 1)
    assert world.state.waiting.reason.endswith(
        "; lost stages are made anew then, as alice has allowed it"
    )
    with pytest.raises(NotApplicableError, match="alice has allowed it already, at 1970-01-01"):
        allow(world, who="bob", limit=None)
    withdraw(world)
    assert "alice" not in world.state.waiting.reason
    allow(world, who="bob", limit=None)
    world.register("spare")
    world.up("spare")

    assert (world.plan.method, record(world).allowed_by) == (Method.APPROXIMATE, "bob")
    assert world.state.ahead is None


def test_a_limit_that_no_loss_can_pass_is_refused_by_its_field(whole: Any) -> None:
    steps = whole.state.shape.steps
    for limit in (steps, 2**53):
        with pytest.raises(NotApplicableError, match=f"^after_lost_steps: is {limit}, and the job"):
            allow(whole, limit=limit)
    allow(whole, limit=steps - 1)


def test_an_ordered_recovery_that_waits_for_a_trainer_is_not_taken_back(start: Start) -> None:
    world = running(start, spares=1)
    allow(world)
    lose(world, 1)
    lose(world, 3)
    assert world.state.phase is JobPhase.WAITING
    with pytest.raises(NotApplicableError, match="is ordered, and goes on once a trainer comes"):
        withdraw(world)
