"""Drawn wrong bits: what a campaign in one process says of them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.train.checks.step import LLAMA, MOE, SMALL

from mainstay_cli.chaos import flips
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.flip_trials import ClassResult, FlipAnswer, FlipQuestion
from mainstay_train.checks import checker
from mainstay_train.checks.checker import Checks
from mainstay_train.dmr import flip_trials
from mainstay_train.dmr.cell_trials import COMPUTED_WITH, STATE

EXAMPLES = Path(__file__).parents[3] / "examples"
STATES = {STATE, COMPUTED_WITH}


def question(num_flips: int, **changes: Any) -> FlipQuestion:
    shape = JobShape(
        lanes=2,
        shards_per_lane=2,
        replicas=2,
        min_replicas=1,
        stages=2,
        steps=2,
        seed=3,
        micro_batches=1,
    )
    config = JobConfig(
        job=JobUid("job"),
        name="job",
        shape=shape,
        entrypoint=LLAMA,
        workload=SMALL,
        device="cpu",
        recompute=True,
    )
    return FlipQuestion(config=replace(config, **changes), num_flips=num_flips, seed=4)


def test_each_effective_flip_of_a_small_campaign_is_found_and_no_digest_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker, "MAX_TOLD", 1)  # of a step: each trial is one of its own
    found = flip_trials.answer(question(11))

    assert (found.problem, found.broken) == ("", ())
    assert {result.name for result in found.classes if result.name not in STATES} == {
        "apply",
        "backward pass",
        "batch",
        "forward pass",
        "recompute",
        "reduce",
        "sums of types",
        "vote",
        "weight pass",
        "wire",
    }
    promised = [result for result in found.classes if result.is_promised]
    assert all(result.drawn == result.equal == 1 for result in promised)
    assert sum(result.effective for result in promised) >= 4
    assert all(result.found == result.effective for result in promised)
    assert sum(result.drawn for result in found.classes) == 11


def test_a_flip_that_nothing_finds_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign is no better than what it looks at: checks that tell nothing fail it."""
    monkeypatch.setattr(Checks, "tell", lambda *_, **__: None)

    found = flip_trials.answer(question(11))

    assert 4 <= len(found.broken) <= 11
    assert not flips.keeps_promise(found)
    assert flips.describe(found)[-1] == "FAIL"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compile": "blocks"},
            "spec.runtime.compile: is Blocks: calls of compiled code",
        ),
        (
            {"entrypoint": f"{EXAMPLES}/own_loop.py:train"},
            "spec.workload.entrypoint: .* is a training loop of its own",
        ),
    ],
)
def test_a_job_without_operators_is_refused_by_its_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        flip_trials.run_trials(question(1, **changes))
    assert flip_trials.answer(question(1, **changes)).problem


def test_the_table_has_a_row_for_each_class_and_their_sum() -> None:
    rows = [
        ClassResult(name="apply", drawn=10, effective=9, found=9, equal=10),
        ClassResult(name="weight pass", drawn=5, effective=3, found=3, equal=5),
    ]
    lines = flips.describe(FlipAnswer(classes=tuple(rows)))
    assert lines[:4] == [
        "class        drawn  effective  found  digests equal",
        "apply           10          9      9             10",
        "weight pass      5          3      3              5",
        "all             15         12     12             15",
    ]
    assert lines[4].startswith("PASS")


def test_a_class_of_which_nothing_is_promised_is_counted_apart() -> None:
    rows = [
        ClassResult(name="state", drawn=3, effective=2, found=2, equal=3),
        ClassResult(
            name="state computed with", drawn=4, effective=4, found=1, equal=0, is_promised=False
        ),
    ]
    lines = flips.describe(FlipAnswer(classes=tuple(rows)))
    assert lines[2].split() == ["state", "computed", "with", "4", "4", "1", "0"]
    assert lines[3].split()[-4:] == ["3", "2", "2", "3"]
    assert lines[3].startswith("all but state computed with")
    assert "nothing is promised of it" in lines[4]
    assert lines[5].startswith("PASS")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("entrypoint", "dtype", "recompute"),
    [*itertools.product((LLAMA, MOE), ("float32", "bfloat16"), (False, True))],
)
def test_the_command_draws_flips_and_all_effective_ones_are_found(
    tmp_path: Path, entrypoint: str, dtype: str, recompute: bool
) -> None:
    job = yaml.safe_load((EXAMPLES / "chaos.yaml").read_text())
    workload = job["spec"]["workload"]
    experts = {"experts": 4, "activeExperts": 2, "expertHidden": 8} if entrypoint == MOE else {}
    workload |= {"entrypoint": entrypoint, "config": SMALL | experts | {"dtype": dtype}}
    job["spec"]["runtime"]["recompute"] = recompute
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "mainstay_cli.commands.main", "chaos", "job.yaml"]
    options = ["--flips", "40", "--seed", "5", "--report", "report.json"]

    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert sum(result["drawn"] for result in report["classes"]) == 40
    assert sum(result["effective"] for result in report["classes"]) > 10
