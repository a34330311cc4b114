"""Planned changes of membership of running jobs: nobody stops, and the bits stay the same."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import (
    MAINSTAY,
    Layout,
    LocalJob,
    local_job,
    make_job,
    processes_of,
    run_undisturbed,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 12
LAYOUT = Layout(lanes=3, stages=2, shards_per_lane=2, spares=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), LAYOUT, NUM_STEPS, corpus)


def gated(
    tmp_path: Path, corpus: Path, gates: Sequence[int], spares: int, **spec: Any
) -> dict[str, Any]:
    (tmp_path / "gates").mkdir()
    layout = Layout(lanes=3, stages=2, shards_per_lane=2, spares=spares)
    return make_job(layout, NUM_STEPS, corpus, tmp_path / "gates", gates, **spec)


def open_gate(tmp_path: Path, step: int) -> None:
    (tmp_path / "gates" / str(step)).touch()


def supervisor_of(job: LocalJob, pod: str) -> int:
    """Return the pid of a pod's supervisor: of its two halves the one named after its module."""
    directory = f"/pods/{pod}"
    return next(
        int(line.split()[0])
        for line in processes_of(job.state_dir)
        if "mainstay_agent" in line and directory in os.readlink(f"/proc/{line.split()[0]}/fd/1")
    )


def ranks(job: LocalJob) -> dict[str, str]:
    """Return the pod of each rank, by its text."""
    return {m["rank"]: m["pod"] for m in job.fetch("members") if m["rank"] != "spare"}


def check(report: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    """Check the bits, and that nothing was lost or done again; return the recoveries' methods."""
    assert report["digests"] == undisturbed["digests"]
    assert (report["steps"]["lost"], report["steps"]["redone"]) == (0, 0)
    reasons = [event["reason"] for event in report["events"]]
    assert "TrainerDown" not in reasons[: reasons.index("Complete")], "somebody died"
    assert all(r["exact"] and r["done"] for r in report["recoveries"])
    return [r["method"] for r in report["recoveries"]]


def command(job: LocalJob, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAINSTAY, *arguments], env=job.environment, capture_output=True, text=True, check=False
    )


def test_sigterm_of_a_pod_with_a_spare(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    with local_job(tmp_path, gated(tmp_path, corpus, [3, 4, 5, 9], spares=1)) as job:
        job.wait_until_all_up(7)
        job.wait_for_members(3, 6)
        before = ranks(job)
        leaver = before["r1.s0.i0"]
        pid = supervisor_of(job, leaver)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGTERM)
        # The successor joins at the end of this step, and swaps places at the end of the next.
        job.wait_until(lambda: len(ranks(job)) == 7)
        open_gate(tmp_path, 3)
        job.wait_until(lambda: leaver not in ranks(job).values())
        assert os.path.exists(f"/proc/{pid}"), "it serves until the plan is adopted"
        open_gate(tmp_path, 4)
        job.wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        open_gate(tmp_path, 5)
        job.wait_for_members(9, 6)
        after = ranks(job)
        open_gate(tmp_path, 9)
        report = job.report()
    assert check(report, undisturbed) == ["hand-over"]
    assert {r for r in before if before[r] != after[r]} == {"r1.s0.i0"}
