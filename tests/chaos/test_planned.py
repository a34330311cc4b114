"""Planned changes, the long ones: a rolling restart of all pods, growth, the only replica."""

import os
import signal
from pathlib import Path

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job, run_undisturbed
from tests.e2e.planned import (
    NUM_STEPS,
    check,
    command,
    gated,
    joining,
    members,
    open_gate,
    ranks,
    supervisor_of,
)

LATE = Path(__file__).parents[1] / "e2e" / "late_llama.py"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def test_every_pod_is_drained_one_after_the_other(tmp_path: Path, corpus: Path) -> None:
    """A rolling restart of all nodes, with one spare, in the midst of training."""
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    (tmp_path / "gates").mkdir()
    layout = Layout(lanes=3, stages=2, shards_per_lane=2, spares=1)
    expected = run_undisturbed(tmp_path / "undisturbed", layout, 22, corpus)
    spec = make_job(layout, 22, corpus, tmp_path / "gates", range(2, 20))
    with local_job(tmp_path / "disturbed", spec) as job:
        for number in range(6):
            step = 2 + 3 * number
            job.wait_until_all_up(7)
            job.wait_for_members(step, 6)
            pod = ranks(job)[f"r{number // 2}.s{number % 2}.i0"]
            name = next(m["slot"] for m in members(job) if m["pod"] == pod).partition("/")[0]
            pid = supervisor_of(job, pod)
            assert command(job, "drain", "tiny", name).returncode == 0
            job.wait_until(lambda: len(joining(job)) == 1)
            open_gate(tmp_path, step)
            job.wait_until(lambda pod=pod: pod not in ranks(job).values())
            open_gate(tmp_path, step + 1)
            job.wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
            open_gate(tmp_path, step + 2)
        report = job.report()
    assert check(report, expected) == ["hand-over"] * 6


def test_the_only_replica_leaves_when_its_successor_has_come(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(lanes=1, spares=0)
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    (tmp_path / "gates").mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout, 8, corpus)
    spec = make_job(layout, 8, corpus, tmp_path / "gates", [3])
    with local_job(tmp_path / "disturbed", spec) as job:
        job.wait_for_members(3, 1)
        before = ranks(job)["r0.s0.i0"]
        pid = supervisor_of(job, before)
        os.kill(pid, signal.SIGTERM)
        job.wait_until(lambda: len(ranks(job)) == 2)
        open_gate(tmp_path, 3)
        job.wait_until(lambda: not Path(f"/proc/{pid}").exists())
        report = job.report()
    assert check(report, expected) == ["hand-over"]
    assert "LeaveWaits" in [e["reason"] for e in report["events"]]


def test_scale_from_two_to_four(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(lanes=4, shards_per_lane=2, spares=0)
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    (tmp_path / "gates").mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout, 8, corpus)
    spec = make_job(layout, 8, corpus, tmp_path / "gates", [3, 6])
    spec["spec"]["parallelism"]["replicas"] = 2
    with local_job(tmp_path / "disturbed", spec) as job:
        job.wait_for_members(3, 2)
        assert command(job, "scale", "tiny", "--replicas", "4").returncode == 0
        job.wait_until(lambda: len(ranks(job)) > 2)
        open_gate(tmp_path, 3)
        job.wait_for_members(6, 4, or_joining=True)
        open_gate(tmp_path, 6)
        report = job.report()
    assert set(check(report, expected)) == {"join"}
    assert report["steps"]["committed"] == 8


def test_a_job_starts_with_min_replicas_and_grows(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(lanes=3, stages=2, shards_per_lane=2, spares=0)
    (tmp_path / "undisturbed").mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout, NUM_STEPS, corpus)
    # Long enough for four trainers on a machine that does other things as well.
    spec = gated(tmp_path, corpus, [2], spares=0, scheduling={"startupDeadlineSeconds": 60})
    spec["spec"]["parallelism"]["minReplicas"] = 2
    workload = spec["spec"]["workload"]
    workload["entrypoint"] = f"{LATE}:workload"
    gates, *steps = workload["args"]
    workload["args"] = [gates, "5,6", *steps]
    with local_job(tmp_path, spec) as job:
        job.wait_for_members(2, 4)
        assert job.fetch()["replicas"] == 2
        open_gate(tmp_path, "late")
        job.wait_until(lambda: len(ranks(job)) == 6)
        open_gate(tmp_path, 2)
        report = job.report()
    assert check(report, expected) == ["join"]
