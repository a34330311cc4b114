"""A stage whose every copy is gone is made anew from its neighbours, by permission, and alike each
time."""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import TINY_MODEL, Layout, local_job, make_job

from mainstay_cli.base.comparison import compare_reports

pytestmark = pytest.mark.slow

LAYOUT = Layout(stages=4, lanes=1, shards_per_lane=2, spares=1)
NUM_STEPS = 12
LOST_AT = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def kill(stage: int, step: int = LOST_AT, phase: str = "backward") -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": phase},
        "target": {"replica": 0, "stage": stage},
        "action": "kill-trainer",
    }


def run(
    directory: Path, corpus: Path, faults: list[dict[str, Any]], **recovery: Any
) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    job = make_job(LAYOUT, NUM_STEPS, corpus, recovery=recovery)
    job["spec"]["workload"]["config"] = TINY_MODEL | {"layers": 8, "data": {"path": str(corpus)}}
    with local_job(directory, job, faults) as running:
        return running.report()


def by_step(report: dict[str, Any]) -> dict[int, Any]:
    return {entry["step"]: entry for entry in report["digests"]["steps"]}


def test_a_lost_inner_stage_is_made_anew_with_the_same_bits_each_time(
    tmp_path: Path, corpus: Path
) -> None:
    allowed = {"allowApproximate": True, "approximateAfterLostSteps": 4}
    first = run(tmp_path / "first", corpus, [kill(1)], **allowed)
    print(first["recoveries"])
    second = run(tmp_path / "second", corpus, [kill(1)], **allowed)
    assert compare_reports(first, second) == []
