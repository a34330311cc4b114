"""A plan that was made offline goes the whole way: profile, plan, file, and a run by it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.train.checks.step import Step

from mainstay_core.base import codec
from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.static import plan_checks
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.profiling import ProfileQuestion
from mainstay_train.dmr.answer import profile_stage
from mainstay_train.dmr.ordered_plans import read_plan_file
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner

MUCH, STAGES = 1 << 30, 2


def plan_offline(config: JobConfig, stage: int, path: Path) -> Plan:
    """What ``mainstay dmr profile`` and ``mainstay dmr plan --out`` write, read as a job does."""
    question = ProfileQuestion(config=config, stage=stage, steps=2, window_s=1.0, budget_bytes=MUCH)
    profile = profile_stage(question, time.perf_counter)
    path.write_text(codec.dumps(plan_checks(profile)))
    return read_plan_file(str(path), stage, profile.fingerprint)


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
            planned, engine, ordered=plan, clock=time.perf_counter, tell=step.told.append
        )
    clean = step.run(Mode.OFF)

    for _ in range(4):
        ended = step.run(Mode.FULL)
        assert ended.digests == clean.digests
        assert ended.findings == []

    assert [told.plan for told in step.told] == ["File"] * STAGES
    waited = [engine.checks.waiting.most_bytes > 0 for engine in step._engines[Mode.FULL]]
    assert waited == [not once] * STAGES
