"""A trainer plans its own checks: bits, flips, memory, and plans from files."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.checks.step import MODELS, Spot, Step
from tests.train.checks.test_flips import draw, has_effect
from tests.worlds.pods import make_config

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr import schedule
from mainstay_core.dmr.coverage import verify_plan
from mainstay_core.dmr.flips import Execution
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.plan import Method, Plan
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.schedule import Part, RefusedPlanError, plan_here
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.static import plan_checks
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks.planned import NO_STANDING, WHOLE, Window
from mainstay_train.checks.planned import Spot as PlannedSpot
from mainstay_train.dmr.ordered_plans import read_plan_file
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner
from mainstay_train.kernels import imprints

MUCH, LITTLE = 1 << 30, 9000
PROFILED = 2
TICK_S = 5e-5
Setting = tuple[str, bool, int, int]
"""Model, recompute, stages, budget."""
QUICK: list[Setting] = [("llama bf16", True, 2, MUCH), ("moe", True, 2, MUCH)]
ALL: list[Setting] = [
    (model, recompute, stages, budget)
    for model in MODELS
    for recompute in (False, True)
    for stages in (1, 2)
    for budget in (0, LITTLE, MUCH)
]


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait is measured as a second, in which everything fits."""
    received = RunPlanner.received

    def second(self: RunPlanner, window: Window, tensor: torch.Tensor, wait_s: float) -> None:
        del wait_s
        received(self, window, tensor, 1.0)

    monkeypatch.setattr(RunPlanner, "received", second)


def even_clock() -> Callable[[], float]:
    """Return a clock by which each operator takes as long as any other, on whatever machine."""
    ticks = itertools.count()
    return lambda: next(ticks) * TICK_S


def planned(setting: Setting) -> Step:
    """A step with a plan: what makes constants, the profile steps, and the first one by plan."""
    model, recompute, stages, budget = setting
    step = Step(
        model,
        recompute=recompute,
        stages=stages,
        waiting_bytes=budget,
        profile_steps=PROFILED,
        clock=even_clock(),
    )
    clean = step.run(Mode.OFF)
    for number in range(PROFILED + 2):
        assert not step.told, number
        ended = step.run(Mode.FULL)
        assert ended.digests == clean.digests
        assert ended.findings == []
        assert ended.num_refused == 0
    assert [told.plan for told in step.told] == ["Auto"] * stages, step.told
    return step


def profiles_of(step: Step) -> list[Profile]:
    planners = [engine.checks.planner for engine in step._engines[Mode.FULL]]
    assert all(isinstance(planner, RunPlanner) for planner in planners)
    planned = [planner.profiles for planner in planners if isinstance(planner, RunPlanner)]
    return [profile for profiles in planned for profile in profiles.values()]


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_bits_are_those_without_checks_and_the_plan_keeps_the_rule(setting: Setting) -> None:
    step = planned(setting)

    for engine, profile in zip(step._engines[Mode.FULL], profiles_of(step), strict=True):
        plan, ordered = plan_here(profile)
        verify_plan(profile, plan)
        orders = engine.checks._planned
        assert len(orders.later) == len(ordered.later)
        assert len(orders.parts) == len(ordered.parts)
        assert len(orders.later) + len(orders.parts) > 10
        assert orders.parts, "segments of blocks are replayed"
        assert bool(engine.checks._planned.piggyback) == (setting[1] and engine.stage == 0)
        assert 0 <= engine.checks.waiting.most_bytes <= setting[-1]
        assert not engine.checks.waiting
        assert not engine.checks.replays._inside
    assert any(engine.checks.waiting.most_bytes for engine in step._engines[Mode.FULL])
    first, second = (orders_met(step, micro_batch) for micro_batch in (0, 1))
    # By far most of them. Which kernels a plan has an order for depends on times.
    assert 2 * second.total() > first.total(), "plans are made of the first micro-batch alone"


def orders_met(step: Step, micro_batch: int) -> Counter[tuple[int, PlannedSpot]]:
    """The kernels of one micro-batch of each type, by stages, for which a plan has an order.

    Without those of weight gradients, which later micro-batches add to what the first has written.
    """
    planned_of = [engine.checks._planned for engine in step._engines[Mode.FULL]]
    return Counter(
        (spot.stage, known)
        for spot in step.list(Mode.FULL)
        if spot.place.micro_batch == micro_batch
        and spot.place.in_pass is not Pass.WEIGHT
        and (known := planned_spot(spot))
        in planned_of[spot.stage].later.keys() | planned_of[spot.stage].parts.keys()
    )


def test_the_recompute_of_a_layer_with_experts_is_compared_with_its_forward() -> None:
    step = planned(("moe", True, 2, MUCH))

    for engine, profile in zip(step._engines[Mode.FULL], profiles_of(step), strict=True):
        plan, _ = plan_here(profile)
        verify_plan(profile, plan)
        recomputed = {
            number for number, block in enumerate(engine.state.blocks) if not block.spec.is_last
        }
        assert engine.checks._planned.piggyback == recomputed
        by_recompute = [c for c in plan.choices if c.method is Method.PIGGYBACK]
        assert len({c.operator.partition("/")[0] for c in by_recompute}) == len(recomputed)


def check_flips(setting: Setting, num_flips: int, flipped: list[bool]) -> Counter[str]:
    """Run steps by plan with one flip each; return how many have an effect without checks."""
    step = planned(setting)
    clean = step.run(Mode.OFF)
    spots = [spot for spot in step.list(Mode.FULL) if spot.place.in_pass is not Pass.STEP]
    unprotected = frozenset(step.list(Mode.OFF))
    rng = random.Random(str(setting))
    effective: Counter[str] = Counter()
    for _ in range(num_flips):
        spot, flip = draw(rng, spots)
        flip = replace(flip, execution=Execution.PRIMARY)
        flipped.clear()
        ended = step.run(Mode.FULL, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        is_effective = spot in unprotected and has_effect(step, clean, spot, flip)
        part = part_at(step, spot)
        if part is None or part.helps or is_effective:
            # Of a segment all but what leaves it may differ without being seen.
            assert [len(ended.findings)] == [int(changed) for changed in flipped[:1]], (spot, flip)
        assert len(ended.findings) <= 1
        for finding in ended.findings:
            where = finding.operator, finding.ordinal
            told = "forward", 0
            assert part is not None or where in (told, (spot.kernel, spot.ordinal))
            assert part is None or finding.block == spot.place.name
            assert ended.num_refused == (finding.remedy is Remedy.VOID_TYPE)
        if is_effective:
            effective[spot.place.in_pass.value] += 1
            effective["replayed"] += part is not None and not part.helps
    return effective


def part_at(step: Step, spot: Spot) -> Part | None:
    """The part of a kernel in a segment that is replayed."""
    checks = step._engines[Mode.FULL][spot.stage].checks
    return checks._planned.parts.get(planned_spot(spot))


def planned_spot(spot: Spot) -> PlannedSpot:
    """A kernel as plans of trainers know it."""
    at = spot.place
    return PlannedSpot(at.phase, at.in_pass, at.block, spot.ordinal, spot.kernel)


@pytest.mark.parametrize(
    "setting",
    [QUICK[0], *(pytest.param(each, marks=pytest.mark.chaos) for each in QUICK[1:])],
    ids=str,
)
def test_a_flip_is_found_whenever_the_plan_has_its_check_executed(
    setting: Setting, flipped: list[bool]
) -> None:
    assert sum(check_flips(setting, 8, flipped).values()) > 0


@pytest.mark.parametrize(
    "execution",
    [Execution.PRIMARY, pytest.param(Execution.CHECKER, marks=pytest.mark.chaos)],
)
def test_a_flip_inside_a_segment_is_found_where_it_leaves(
    execution: Execution, flipped: list[bool]
) -> None:
    step = planned(QUICK[0])
    clean = step.run(Mode.OFF)
    spots = [
        spot
        for spot in step.list(Mode.FULL)
        if (part := part_at(step, spot)) is not None and not part.helps and not part.compared
    ]
    rng = random.Random(1)
    num_found = 0
    for spot in rng.sample(spots, 6):
        flip = spot.flip(element=rng.randrange(1 << 20), bit=30, execution=execution)
        ended = step.run(Mode.FULL, flip, spot)
        assert ended.digests == clean.digests
        for finding in ended.findings:
            num_found += 1
            assert finding.block == spot.place.name
            is_primary = execution is Execution.PRIMARY
            assert finding.verdict is (Verdict.PRIMARY_HIT if is_primary else Verdict.CHECKER_HIT)
            assert ended.num_refused == is_primary
    assert num_found >= 3
    assert all(flipped)


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_of_many_flips_each_effective_one_is_found(setting: Setting, flipped: list[bool]) -> None:
    effective = check_flips(setting, 40, flipped)

    logging.getLogger(__name__).info("%s: %s", setting, dict(effective))
    assert sum(effective.values()) >= 5


def test_flips_are_found_where_executing_twice_is_cheaper_than_imprints(
    monkeypatch: pytest.MonkeyPatch, flipped: list[bool]
) -> None:
    dear = schedule.ImprintPrice(start_s=1.0, s_per_byte=0.0)
    monkeypatch.setattr(imprints, "price", lambda: dear)
    step = planned(("llama", True, 1, MUCH))
    (engine,) = step._engines[Mode.FULL]
    cheap = engine.checks._planned.cheap
    assert len(cheap) > 20
    clean = step.run(Mode.OFF)
    spots = [s for s in step.list(Mode.FULL) if planned_spot(s) in cheap]
    rng = random.Random(2)
    for spot in rng.sample(spots, 6):
        flipped.clear()
        ended = step.run(Mode.FULL, spot.flip(element=rng.randrange(99), bit=21), spot)
        assert ended.digests == clean.digests
        assert ended.num_refused == 0, "it is repaired at once"
        assert [len(ended.findings)] == [int(changed) for changed in flipped]


@pytest.mark.parametrize("budget", [0, LITTLE])
def test_with_little_memory_less_waits_and_with_none_nothing(budget: int) -> None:
    step = planned(("llama", False, 2, budget))

    for engine in step._engines[Mode.FULL]:
        assert engine.checks.waiting.most_bytes <= budget
        orders = engine.checks._planned
        assert (budget == 0) == (not orders.later and not orders.parts)


def with_file(plan_of_stage: dict[int, Plan]) -> Step:
    """A step that follows plans made from other profiles."""
    step = Step("llama", recompute=True, stages=2, waiting_bytes=MUCH, profile_steps=PROFILED)
    for engine in step._engines[Mode.FULL]:
        step.attach(engine, {WHOLE: plan_of_stage[engine.stage]})
    return step


def test_a_plan_from_a_file_is_followed_if_it_keeps_the_rule_and_else_ends_the_job() -> None:
    profiles = profiles_of(planned(("llama", True, 2, MUCH)))
    plans = {profile.stage: plan_here(profile)[0] for profile in profiles}

    step = with_file(plans)
    clean = step.run(Mode.OFF)
    for _ in range(PROFILED + 2):
        assert step.run(Mode.FULL).digests == clean.digests
    assert [told.plan for told in step.told] == ["File", "File"]

    for bad, message in (
        ({0: plans[1], 1: plans[1]}, "plan of stage 0 is refused: "),
        (
            {0: plan_checks(profiles[0], replays=False, budget_bytes=0), 1: without_check(plans)},
            "plan of stage 1 is refused: .* no piece checks it",
        ),
    ):
        step = with_file(bad)
        for _ in range(PROFILED + 1):
            assert step.run(Mode.FULL).digests == clean.digests
        with pytest.raises(InvalidSpecError, match=rf"spec\.detection\.dmr\.plan: the {message}"):
            step.run(Mode.FULL)


def without_check(plans: dict[int, Plan]) -> Plan:
    """A plan in which nobody checks some operator."""
    return replace(plans[1], pieces=plans[1].pieces[1:])


def test_a_file_is_missing_torn_or_another_jobs(tmp_path: Path) -> None:
    (profile, *_) = profiles_of(planned(("llama", False, 1, MUCH)))
    plan, _ = plan_here(profile)
    path = tmp_path / "0.json"
    path.write_text(codec.dumps(plan))
    named = str(tmp_path / "{stage}.json")

    assert read_plan_file(named, 0, "job") == plan
    with pytest.raises(InvalidSpecError, match=r"1\.json cannot be read: No such file"):
        read_plan_file(named, 1, "job")
    with pytest.raises(InvalidSpecError, match=r"0\.json is of the fingerprint .*job"):
        read_plan_file(named, 0, "another")
    path.write_text(codec.dumps(plan)[:99])
    with pytest.raises(InvalidSpecError, match=r"0\.json is no plan that can be read"):
        read_plan_file(named, 0, "job")


def test_a_stage_that_cannot_be_described_stays_naive_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("llama", recompute=False, waiting_bytes=MUCH, profile_steps=1)
    clean = step.run(Mode.OFF)
    problem = InvalidSpecError("spec.workload.entrypoint", "block 'x' computes past the dispatcher")

    def refuse(*_: object) -> None:
        raise problem

    monkeypatch.setattr("mainstay_train.dmr.recorder.PassageRecord.see", refuse)
    for _ in range(3):
        assert step.run(Mode.FULL).digests == clean.digests

    (told,) = step.told
    assert (told.plan, told.shares) == ("Naive", "naive 100 %")
    assert "computes past the dispatcher" in told.reason


def make_planner(told: list[str], *, starts: bool) -> RunPlanner:
    """A planner whose engine is never asked for anything."""
    engine: Any = SimpleNamespace(reducer=SimpleNamespace(reduced=torch.zeros(1)))
    stage = PlannedStage(
        shape=make_config().shape,
        stage=0,
        fingerprint="job",
        profile_steps=PROFILED,
        memory_bytes=MUCH,
    )
    return RunPlanner(
        stage,
        engine,
        ordered=None,
        clock=lambda: 0.0,
        tell=lambda said: told.append(said.reason),
        starts=starts,
    )


def test_a_rank_without_a_planner_leaves_its_whole_cell_without_a_plan() -> None:
    told: list[str] = []
    planner = make_planner(told, starts=True)
    for _ in range(3):
        planner.align([planner.standing, NO_STANDING])
        assert planner.begin_program({}) is None
    assert len(told) == 1, told
    assert "another rank of the cell" in told[0]

    fresh = make_planner(told, starts=False)
    standings = [planner.standing, fresh.standing]
    planner.align(standings)
    fresh.align(standings)
    assert planner.standing == fresh.standing, "one that has a planner came: all begin anew"


def test_a_plan_of_a_file_fails_no_job_once_its_start_is_over() -> None:
    told: list[str] = []
    planner = make_planner(told, starts=True)
    planner._ordered = {}
    error = RefusedPlanError("it is of another stage")
    with pytest.raises(InvalidSpecError, match="the plan of stage 0 is refused"):
        planner._give_up(error)
    planner.align([planner.standing, (1, 2, 1, 77, 0)])

    planner._give_up(error)

    assert told == ["no plan is followed: it is of another stage"]


@pytest.mark.parametrize(
    "where",
    ["mainstay_train.dmr.recorder.PassageRecord.see", "mainstay_train.dmr.run_planner.plan_here"],
)
def test_a_mistake_of_planning_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    step = Step("llama", recompute=False, waiting_bytes=MUCH, profile_steps=1)
    clean = step.run(Mode.OFF)

    def fail(*_: object) -> None:
        raise KeyError("0/forward/7")

    monkeypatch.setattr(where, fail)
    for _ in range(3):
        assert step.run(Mode.FULL).digests == clean.digests

    (told,) = step.told
    assert (told.plan, told.shares) == ("Naive", "naive 100 %")
    assert "it has failed to " in told.reason
    assert "0/forward/7" in told.reason
