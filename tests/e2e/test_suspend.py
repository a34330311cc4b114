"""A job that is suspended leaves nothing but its checkpoint, and goes on from it, bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmarks.support.census import supervisors
from tests.e2e import matrix
from tests.e2e.harness import (
    MAINSTAY,
    Layout,
    LocalJob,
    local_job,
    make_job,
    run_undisturbed,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 10
LAYOUT = Layout(stages=2, lanes=2, shards_per_lane=2, spares=1)
# Only the suspension, and the end, ever write one.
CHECKPOINT = {"everySteps": 100}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Any:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), LAYOUT.least, NUM_STEPS, corpus)


def ask(job: LocalJob, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAINSTAY, what, "tiny"],
        capture_output=True,
        text=True,
        check=False,
        env=job.environment,
        cwd=job.directory,
    )


def wait_until_it_stands(job: LocalJob) -> None:
    job.wait_until(lambda: job.fetch()["state"] == "suspended")
    pods = {path.name for path in job.state_dir.glob("pods/*")}
    job.wait_until(lambda: pods.isdisjoint(supervisors()))


def test_a_suspended_job_goes_on_with_the_same_bits(
    tmp_path: Path, corpus: Path, undisturbed: Any
) -> None:
    """Twice, the second time while a rank is being replaced."""
    gates = tmp_path / "gates"
    gates.mkdir()
    spec = make_job(LAYOUT, NUM_STEPS, corpus, gates, [2, 5, 6], checkpoint=CHECKPOINT)
    with local_job(tmp_path, spec) as job:
        for step in (2, 5):
            job.wait_for_members(step, LAYOUT.num_ranks)
            if step == 5:
                job.kill_one("launcher")
            asked = ask(job, "suspend")
            assert asked.returncode == 0, asked.stderr
            if step == 5:
                # What was computed with the lost rank is finished before others are planned for.
                (gates / "5").touch()
            # Held until then: the few steps that are left take less time than a plan.
            job.wait_until(lambda: job.fetch("plan")["plan"]["pause"])
            (gates / ("6" if step == 5 else "2")).touch()
            wait_until_it_stands(job)
            summary = job.fetch("summary")
            saved = summary["checkpoint"]["step"]
            # The step that was held is finished first, and nothing is computed beyond it.
            assert saved == summary["training"]["step"] >= step + 1
            assert summary["replicas"]["whole"] == 0
            assert (job.fetch("pods")["num_pods"], job.fetch("pods")["pods"]) == (0, [])
            if step == 2:
                assert "suspended" in ask(job, "status").stdout
            resumed = ask(job, "resume")
            assert f"checkpoint of step {saved}" in resumed.stdout, resumed.stderr
        report = job.report()
    assert report["digests"] == undisturbed["digests"]
    assert report["steps"]["lost"] == 0
    reasons = [event["reason"] for event in report["events"]]
    assert (reasons.count("Suspended"), reasons.count("Resumed")) == (2, 2)
    assert report["state"] == "complete"


@pytest.mark.chaos
def test_a_job_without_checkpoints_is_not_suspended(tmp_path: Path, corpus: Path) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    spec = make_job(Layout(lanes=1, spares=0), 3, corpus, gates, [1])
    with local_job(tmp_path, spec) as job:
        job.wait_for_members(1, 1)
        refused = ask(job, "suspend")
        assert refused.returncode != 0
        assert "everySteps" in refused.stderr
        (gates / "1").touch()
        assert len(job.report()["digests"]["steps"]) == 3
