"""However a run ends, nothing of it is left running, and nothing else is touched."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import (
    MAINSTAY,
    POLL_S,
    Layout,
    LocalJob,
    local_job,
    make_job,
    processes_of,
)

pytestmark = pytest.mark.slow

LAYOUT = Layout(stages=2, lanes=1, spares=0)
HELD_AT = 2


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text").write_text(Path(__file__).read_text())
    return tmp_path / "corpus"


def held_job(tmp_path: Path, corpus: Path) -> dict[str, object]:
    """A job that waits before a step for a gate that nobody opens."""
    return make_job(LAYOUT, 5, corpus, tmp_path / "gates", [HELD_AT])


def wait_until_held(job: LocalJob) -> None:
    job.wait_for_members(HELD_AT, LAYOUT.num_cells)
    assert processes_of(job.directory)


def wait_until_gone(directory: Path) -> None:
    """Orphans end by the end of a pipe; that is an event in them, here we can only look."""
    while processes_of(directory):
        time.sleep(POLL_S)


@pytest.mark.chaos
def test_a_completed_run_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    with local_job(tmp_path, make_job(LAYOUT, 3, corpus)) as job:
        assert job.report()["steps"]["committed"] == 3
        assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)]
)
def test_ctrl_c_stops_everything(tmp_path: Path, corpus: Path, number: int) -> None:
    with local_job(tmp_path, held_job(tmp_path, corpus)) as job:
        wait_until_held(job)
        job.process.send_signal(number)
        # It asks the job to stop after its step, which the gate holds: a second one kills.
        job.process.send_signal(number)
        assert job.wait() == 130
        assert processes_of(tmp_path) == []
        assert "Traceback" not in (tmp_path / "output.log").read_text()


def test_one_ctrl_c_lets_the_step_finish(tmp_path: Path, corpus: Path) -> None:
    with local_job(tmp_path, held_job(tmp_path, corpus)) as job:
        wait_until_held(job)
        job.process.send_signal(signal.SIGINT)
        log = tmp_path / "output.log"
        job.wait_until(lambda: "stopping" in log.read_text())
        (tmp_path / "gates").mkdir()
        (tmp_path / "gates" / str(HELD_AT)).touch()
        assert job.wait() == 130
        assert processes_of(tmp_path) == []
        report = json.loads((job.state_dir / "report.json").read_text())
        assert report["state"] == "stopped"


@pytest.mark.chaos
def test_a_run_that_is_killed_with_9_takes_everything_with_it(tmp_path: Path, corpus: Path) -> None:
    with local_job(tmp_path, held_job(tmp_path, corpus)) as job:
        wait_until_held(job)
        job.process.kill()
        job.process.wait()
        wait_until_gone(tmp_path)


@pytest.mark.chaos
def test_two_runs_at_once_do_not_meet(tmp_path: Path, corpus: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "other"]
    for directory in directories:
        directory.mkdir()
    with (
        local_job(directories[0], held_job(tmp_path, corpus)) as held,
        local_job(directories[1], make_job(LAYOUT, 3, corpus)) as other,
    ):
        wait_until_held(held)
        assert other.report()["steps"]["committed"] == 3
        assert held.process.poll() is None
        assert held.fetch()["step"] == HELD_AT


@pytest.mark.chaos
def test_status_and_timeline_of_a_running_and_of_an_ended_job(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "gates").mkdir()

    def mainstay(*arguments: str) -> str:
        return subprocess.run(
            [*MAINSTAY, *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=job.environment,
        ).stdout

    with local_job(tmp_path, held_job(tmp_path, corpus)) as job:
        wait_until_held(job)
        status = json.loads(mainstay("status", "--json"))
        assert status["running"]
        assert status["job"]["step"] == HELD_AT
        assert {m["rank"] for m in status["members"]} >= {"r0.s0.i0", "r0.s1.i0"}
        assert all(m["pid"] > 0 for m in status["members"])
        assert "r0.s1.i0" in mainstay("status", "tiny")
        assert "no recoveries" in mainstay("timeline")
        (tmp_path / "gates" / str(HELD_AT)).touch()
        job.report()
        assert "complete, 5 steps committed" in mainstay("status")
        assert json.loads(mainstay("timeline", "--json"))["recoveries"] == []
        report = str(tmp_path / "report.json")
        assert "equal: 5 steps" in mainstay("report", "diff", report, report)


def test_a_user_error_in_the_workload_is_told_and_ends_the_run(
    tmp_path: Path, corpus: Path
) -> None:
    spec = make_job(LAYOUT, 3, corpus)
    spec["spec"]["workload"]["config"]["data"]["path"] = str(tmp_path / "no-corpus")
    with local_job(tmp_path, spec) as job:
        assert job.wait() == 1
        output = (tmp_path / "output.log").read_text()
        assert "no-corpus" in output
        assert "Traceback" not in output
        assert processes_of(tmp_path) == []


@pytest.mark.chaos
def test_a_pod_whose_supervisor_dies_is_made_anew(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "gates").mkdir()
    layout = Layout(stages=1, lanes=2, spares=1)
    spec = make_job(layout, 5, corpus, tmp_path / "gates", [HELD_AT])
    with local_job(tmp_path, spec) as job:
        job.wait_for_members(HELD_AT, layout.num_cells)
        job.kill_one("supervisor")
        # Its place is taken by the spare while the job is held, then the pod is made anew.
        job.wait_until(lambda: "is gone" in (tmp_path / "output.log").read_text())
        (tmp_path / "gates" / str(HELD_AT)).touch()
        report = job.report()
        assert report["steps"]["committed"] == 5
        assert report["steps"]["lost"] == 0
        assert report["recoveries"]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path | None]:
    """The state directory on a disk of its own; None without the right to mount one."""
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("MAINSTAY_DISK_MIB", "32")
    options = ["-t", "tmpfs", "-o", "size=64m"]
    mounted = subprocess.run(["mount", *options, "tmpfs", state], check=False).returncode == 0
    yield state if mounted else None
    if mounted:
        subprocess.run(["umount", state], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk and return the file to delete to make room again."""
    filler = disk / "somebody elses"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    return filler


@contextlib.contextmanager
def no_more_descriptors(pid: int) -> Iterator[None]:
    """A process may open no more than it has open."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(entry) for entry in os.listdir(f"/proc/{pid}/fd")}
    next_free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next_free, limits[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.chaos
def test_training_outlives_redis_and_the_api_a_full_disk_and_a_lack_of_descriptors(
    tmp_path: Path, corpus: Path, small_disk: Path | None
) -> None:
    (tmp_path / "gates").mkdir()
    log = tmp_path / "output.log"
    with local_job(tmp_path, held_job(tmp_path, corpus)) as job:
        wait_until_held(job)
        before = {member["pid"] for member in job.fetch("members")}
        for name, warning in (("mainstay_api", "the api ended"), ("redis-server", "Redis ended")):
            # The guard is the leader; what it guards is the last of the group.
            *_, pid = (line.split()[0] for line in processes_of(tmp_path) if name in line)
            os.kill(int(pid), signal.SIGKILL)
            job.wait_until(lambda warning=warning: warning in log.read_text())
        job.wait_for_members(HELD_AT, LAYOUT.num_cells)
        assert {member["pid"] for member in job.fetch("members")} == before
        with no_more_descriptors(job.process.pid):
            job.wait_until(lambda: "too few descriptors" in log.read_text())
        filler = fill(small_disk) if small_disk is not None else None
        (tmp_path / "gates" / str(HELD_AT)).touch()
        if filler is not None:
            job.wait_until(lambda: log.read_text().count("Redis ended") == 2)
            filler.unlink()
            assert f"no space left on the disk: {small_disk}" in log.read_text()
        report = job.report()
        assert report["recoveries"] == []
        assert len(report["digests"]["steps"]) == 5
        assert "Traceback" not in log.read_text()
