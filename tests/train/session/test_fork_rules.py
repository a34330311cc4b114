"""By which rules a trainer makes lost stages anew, if a later plan orders it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.worlds.pods import make_config

from mainstay_core.job.config import ApproximateConfig
from mainstay_core.wire.reinitialisation import BlockOutline, Outline
from mainstay_train.session.rules import fork_rules

OUTLINE: Outline = ((BlockOutline(name="a", kind="a"),), (BlockOutline(name="b", kind="b"),))
TRAINING: Any = SimpleNamespace(outline=lambda: OUTLINE)


def test_a_trainer_of_two_stages_has_them_before_the_policy_changes() -> None:
    """With staleSteps a stage of two may be ordered to be loaded alone, and staleSteps may come."""
    config = make_config(stages=2)
    assert config.approximate is None
    before = fork_rules(config, TRAINING)
    after = fork_rules(replace(config, approximate=ApproximateConfig(stale_steps=4)), TRAINING)
    assert before is not None
    assert after is not None
    assert before.outline == after.outline == OUTLINE


def test_a_job_of_one_stage_has_none() -> None:
    assert fork_rules(make_config(stages=1), TRAINING) is None
