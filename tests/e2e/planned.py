"""What tests of planned changes need to see and do: gates, ranks, pods, commands."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.census import supervisors
from tests.e2e.harness import MAINSTAY, Layout, LocalJob, make_job

NUM_STEPS = 12


def gated(
    tmp_path: Path, corpus: Path, gates: Sequence[int], spares: int, **spec: Any
) -> dict[str, Any]:
    (tmp_path / "gates").mkdir()
    layout = Layout(lanes=3, stages=2, shards_per_lane=2, spares=spares)
    return make_job(layout, NUM_STEPS, corpus, tmp_path / "gates", gates, **spec)


def open_gate(tmp_path: Path, step: int | str) -> None:
    (tmp_path / "gates" / str(step)).touch()


def supervisor_of(job: LocalJob, pod: str) -> int:
    """Return the pid of a pod's supervisor."""
    assert (job.state_dir / "pods" / pod).is_dir()
    return supervisors()[pod]


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


def joining(job: LocalJob) -> list[dict[str, Any]]:
    return [m for m in members(job) if m["joining"] and not m["settled"]]


def members(job: LocalJob) -> list[dict[str, Any]]:
    return [m for m in job.fetch("members") if m["rank"] != "spare"]


def leaving(job: LocalJob) -> set[str]:
    return set(job.fetch("pods")["leaving"])
