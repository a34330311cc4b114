"""A plan that was made offline goes the whole way: profile, plan, file, and a run by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from tests.train.checks.step import Step

from mainstay_core.base import codec
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.static import plan_checks
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import Action, Op, compile_compute
from mainstay_core.planning.routes import Extent, Way, name_of, ways_of
from mainstay_core.wire.profiling import ProfileQuestion
from mainstay_train.checks.planned import WHOLE, Flow
from mainstay_train.compute.cell_checks import firsts_of
from mainstay_train.compute.interpreter import may_add_at_once
from mainstay_train.dmr.answer import profile_stage
from mainstay_train.dmr.ordered_plans import read_plan_file
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner

MUCH, STAGES = 1 << 30, 2


def plan_offline(config: JobConfig, stage: int, path: Path, way: Way = WHOLE) -> Plan:
    """What ``mainstay dmr profile`` and ``mainstay dmr plan --out`` write, read as a job does."""
    name = name_of(way)
    question = ProfileQuestion(
        config=config, stage=stage, way=name, steps=2, window_s=1.0, budget_bytes=MUCH
    )
    profile = profile_stage(question, time.perf_counter)
    path.write_text(codec.dumps(plan_checks(profile)))
    return read_plan_file(str(path), stage, profile.fingerprint, name)


def passages(step: Step, *, once: bool) -> JobShape:
    """The shape of a step's chain; ``once``: as if it had one micro-batch a step."""
    if not once:
        return step._shape
    return replace(step._shape, replicas=step._shape.num_types, lanes=4, shards_per_lane=1)


@pytest.mark.parametrize("once", [False, True])
def test_a_run_follows_the_plan_of_a_profile_that_was_recorded_alone(
    tmp_path: Path, once: bool
) -> None:
    micro_batches = 1 if once else 2
    step = Step(
        "llama",
        recompute=True,
        stages=STAGES,
        micro_batches=micro_batches,
        waiting_bytes=MUCH,
        profile_steps=1,
    )
    config = replace(step.config, shape=passages(step, once=once))
    for engine in step._engines[Mode.FULL]:
        plan = plan_offline(config, engine.stage, tmp_path / f"{engine.stage}.json")
        windows = {piece.window for piece in plan.pieces if piece.window is not None}
        assert ("REDUCE" in windows) == once, "no run of one cell has that wait"
        planned = PlannedStage(
            shape=config.shape,
            stage=engine.stage,
            fingerprint=plan.fingerprint,
            profile_steps=1,
            memory_bytes=MUCH,
        )
        engine.checks.planner = RunPlanner(
            planned, engine, ordered={WHOLE: plan}, clock=time.perf_counter, tell=step.told.append
        )
    clean = step.run(Mode.OFF)

    for _ in range(4):
        ended = step.run(Mode.FULL)
        assert ended.digests == clean.digests
        assert ended.findings == []

    assert [told.plan for told in step.told] == ["File"] * STAGES
    waited = [engine.checks.waiting.most_bytes > 0 for engine in step._engines[Mode.FULL]]
    assert waited == [not once] * STAGES


@pytest.mark.parametrize(
    ("micro_batches", "recompute"),
    [
        (2, 1.0),
        pytest.param(1, 0.0, marks=pytest.mark.chaos),
        pytest.param(4, 0.5, marks=pytest.mark.chaos),
    ],
)
def test_a_swapped_run_follows_a_plan_for_each_way_that_was_recorded_alone(
    tmp_path: Path, micro_batches: int, recompute: float
) -> None:
    step = Step(
        "llama",
        recompute=recompute,
        stages=STAGES,
        micro_batches=micro_batches,
        waiting_bytes=MUCH,
        profile_steps=1,
        order=Order.SWAPPED,
    )
    for engine in step._engines[Mode.FULL]:
        plans = {
            way: plan_offline(
                step.config, engine.stage, tmp_path / f"{engine.stage}-{name_of(way)}.json", way
            )
            for way in ways_of(Order.SWAPPED, engine.stage, STAGES)
        }
        assert [plan.way for plan in plans.values()] == [name_of(way) for way in plans]
        assert len(plans) == 2
        windows = {piece.window for plan in plans.values() for piece in plan.pieces}
        assert "NEXT_RECV" in windows
        planned = PlannedStage(
            shape=step.config.shape,
            stage=engine.stage,
            fingerprint=plans[WHOLE].fingerprint,
            profile_steps=1,
            memory_bytes=MUCH,
        )
        engine.checks.planner = RunPlanner(
            planned, engine, ordered=plans, clock=time.perf_counter, tell=step.told.append
        )
    clean = step.run(Mode.OFF)

    for _ in range(4):
        ended = step.run(Mode.FULL)
        assert ended.digests == clean.digests
        assert ended.findings == []

    assert [told.plan for told in step.told] == ["File"] * STAGES
    assert all(engine.checks.waiting.most_bytes > 0 for engine in step._engines[Mode.FULL])


def passes_of(program: Sequence[Action], flow: Flow) -> list[tuple[Op, Extent]]:
    """What a stage does of a micro-batch, in order."""
    return [(a.op, a.extent) for a in program if (a.type, a.micro_batch) == flow]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "types"), [*product((2, 3, 4), (1, 2, 4), (1, 2, 3))]
)
def test_what_is_recorded_of_a_way_is_what_each_chain_does_of_its_first_micro_batch(
    stages: int, micro_batches: int, types: int
) -> None:
    """Else a plan that was made alone would be refused by some replica."""
    for stage in range(stages):
        for way in ways_of(Order.SWAPPED, stage, stages):
            chains = [
                compile_compute(
                    range(first, first + types), micro_batches, stage, stages, Order.SWAPPED
                )
                for first in range(0, 4 * types, types)
            ]
            recorded, *others = [chain for chain in chains if way in firsts_of(chain)]
            flow = firsts_of(recorded)[way]
            for chain in others:
                first = firsts_of(chain)[way]
                assert (first[1] > 0) == (flow[1] > 0), "what adds to a sum cannot wait"
                assert set(passes_of(chain, first)) == set(passes_of(recorded, flow))
                if micro_batches > 1:  # else weight gradients come sooner or later
                    assert passes_of(chain, first) == passes_of(recorded, flow)
                    assert may_add_at_once(chain) == may_add_at_once(recorded)
