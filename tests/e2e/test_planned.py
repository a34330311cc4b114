"""Planned changes of membership of running jobs: nobody stops, and the bits stay the same."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, run_undisturbed
from tests.e2e.planned import (
    NUM_STEPS,
    check,
    command,
    gated,
    joining,
    leaving,
    members,
    open_gate,
    ranks,
    supervisor_of,
)

pytestmark = pytest.mark.slow

LAYOUT = Layout(lanes=3, stages=2, shards_per_lane=2, spares=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), LAYOUT.least, NUM_STEPS, corpus)


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
        assert Path(f"/proc/{pid}").exists(), "it serves until the plan is adopted"
        open_gate(tmp_path, 4)
        job.wait_until(lambda: not Path(f"/proc/{pid}").exists())
        open_gate(tmp_path, 5)
        job.wait_for_members(9, 6)
        after = ranks(job)
        open_gate(tmp_path, 9)
        report = job.report()
    assert check(report, undisturbed) == ["hand-over"]
    assert {r for r in before if before[r] != after[r]} == {"r1.s0.i0"}


@pytest.mark.chaos
def test_sigterm_of_two_pods_without_a_spare(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    with local_job(tmp_path, gated(tmp_path, corpus, [3, 4, 9], spares=0)) as job:
        job.wait_for_members(3, 6)
        before = ranks(job)
        pids = [supervisor_of(job, before[rank]) for rank in ("r0.s0.i0", "r2.s1.i0")]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        job.wait_until(lambda: job.fetch("plan")["plan"]["method"] == "hand-over")
        open_gate(tmp_path, 3)
        # Who was heard of after the plan was made goes with the next one.
        job.wait_until(lambda: not set(ranks(job).values()) & leaving(job))
        open_gate(tmp_path, 4)
        for pid in pids:
            job.wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        # New pods are made for them, and join together.
        job.wait_for_members(9, 6)
        open_gate(tmp_path, 9)
        report = job.report()
    methods = check(report, undisturbed)
    assert methods[0] == "hand-over"
    assert methods[-1] == "join"


@pytest.mark.chaos
def test_the_successor_dies_in_mid_hand_over(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    with local_job(tmp_path, gated(tmp_path, corpus, [3, 4, 5, 9], spares=1)) as job:
        job.wait_until_all_up(7)
        job.wait_for_members(3, 6)
        leaver = ranks(job)["r2.s1.i0"]
        pid = supervisor_of(job, leaver)
        os.kill(pid, signal.SIGTERM)
        job.wait_until(lambda: len(ranks(job)) == 7)
        (successor,) = joining(job)
        os.kill(int(successor["pid"]), signal.SIGKILL)
        # What lasts is awaited: the next life may be seated before anybody has looked.
        job.wait_until(lambda: [r["method"] for r in job.fetch("recoveries")][:1] == ["mask"])
        open_gate(tmp_path, 3)
        # Its next life, or the pod made for the one that leaves, is seated in its stead.
        job.wait_until(lambda: _has_successor(job, leaver, successor["pid"]))
        open_gate(tmp_path, 4)
        job.wait_until(lambda: leaver not in ranks(job).values())
        open_gate(tmp_path, 5)
        job.wait_until(lambda: not Path(f"/proc/{pid}").exists())
        job.wait_for_members(9, 6)
        open_gate(tmp_path, 9)
        report = job.report()
    assert report["digests"] == undisturbed["digests"]
    assert report["steps"]["lost"] == 0
    methods = [r["method"] for r in report["recoveries"]]
    assert methods[0] == "mask"
    assert "hand-over" in methods
    downs = [e["message"] for e in report["events"] if e["reason"] == "TrainerDown"]
    assert all(report["pods"][leaver] not in down for down in downs), "the leaver did not die"


def _has_successor(job: LocalJob, leaver: str, dead: int) -> bool:
    """Whether somebody alive is seated beside the leaver, or has its place already."""
    pods = {m["pod"] for m in members(job) if m["pid"] != dead}
    return len(pods) == 7 or leaver not in pods


def test_scale_down_and_up_again(tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]) -> None:
    with local_job(tmp_path, gated(tmp_path, corpus, [3, 5, 9], spares=1)) as job:
        job.wait_until_all_up(7)
        job.wait_for_members(3, 6)
        refused = command(job, "scale", "tiny", "--replicas", "4")
        assert (refused.returncode, "minReplicas..lanes, 1..3" in refused.stderr) == (1, True)
        done = command(job, "scale", "tiny", "--replicas", "2")
        assert done.stdout.strip() == "tiny: 2 replicas wanted, 2 now", done.stderr
        open_gate(tmp_path, 3)
        job.wait_for_members(5, 4)
        job.wait_until(lambda: job.fetch()["pods"] == 5)
        assert {m["replica"] for m in members(job)} == {0, 1}
        assert command(job, "scale", "tiny", "--replicas", "3").returncode == 0
        job.wait_until(lambda: len(ranks(job)) == 6)
        open_gate(tmp_path, 5)
        job.wait_for_members(9, 6)
        job.wait_until(lambda: job.fetch()["pods"] == 7)
        assert "whole: 3 of 3 replicas" in command(job, "status", "tiny").stdout
        open_gate(tmp_path, 9)
        report = job.report()
    assert check(report, undisturbed) == ["join"]
    assert [e["message"] for e in report["events"] if e["reason"] == "Scaled"] == [
        "wanted: 2 replicas instead of 3: a user asked for it",
        "wanted: 3 replicas instead of 2: a user asked for it",
    ]
