"""``mainstay faults`` on a job that runs: what is asked for happens, what cannot be is refused."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import MAINSTAY, Layout, LocalJob, local_job, make_job

pytestmark = pytest.mark.slow

TARGET = ("--target", "replica=1,stage=0", "--action")


def faults(job: LocalJob, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAINSTAY, "faults", *arguments], capture_output=True, text=True, env=job.environment
    )


def inject(job: LocalJob, *arguments: str) -> list[dict[str, Any]]:
    done = faults(job, "inject", "tiny", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def test_a_running_job_is_broken_where_it_was_asked_for(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    gates = tmp_path / "gates"
    gates.mkdir()
    layout = Layout(lanes=2)
    job = make_job(layout, 12, matrix.write_corpus(corpus), gates, [4, 10])
    with local_job(tmp_path, job) as run:
        run.wait_for_members(4, layout.num_cells)
        late = faults(run, "inject", "tiny", *TARGET, "stop", "--at-step", "1")
        nobody = faults(run, "inject", "tiny", "--target", "replica=7,stage=0", "--action", "stop")
        inject(run, *TARGET, "kill-trainer", "--at-step", "5", "--phase", "vote")
        # Pushed to a trainer that waits in step 4, and fired by it in step 5.
        (gates / "4").touch()
        run.wait_for_members(10, layout.num_cells)
        inject(run, "--target", "process=redis", "--action", "kill")
        run.wait_until(lambda: all(fault["fired"] for fault in run.fetch("faults")))
        listed = faults(run, "ls", "tiny")
        (gates / "10").touch()
        report = run.report()
    assert (late.returncode, nobody.returncode) == (1, 1)
    assert "has committed 4 steps already" in late.stderr
    assert "replica: is 7, must be a whole number from 0 to 1" in nobody.stderr
    assert "fired on redis" in listed.stdout
    fired = {fault["id"]: fault["fired"] for fault in report["faults"]}
    assert [where["rank"] for where in fired.values()] == ["r1.s0.i0", None]
    assert report["recoveries"][0]["from_step"] == 5
    assert report["steps"]["lost"] == 0
    assert len(report["digests"]["steps"]) == 12
