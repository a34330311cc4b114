"""When every copy of a stage is gone the job goes back to its newest good checkpoint, exactly."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import MAINSTAY, Layout, LocalJob, local_job, make_job, run_undisturbed

from mainstay_cli.base.comparison import compare_reports

pytestmark = pytest.mark.slow

# One replica: the loss of a rank is the loss of all copies of its stage.
LAYOUT = Layout(stages=2, lanes=1, shards_per_lane=2, spares=1)
NUM_STEPS = 12
EVERY_STEPS = 2
HELD_AT = 8
FAULT = {
    "at": {"step": HELD_AT, "phase": "backward"},
    "target": {"replica": 0, "stage": 1},
    "action": "kill-trainer",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), LAYOUT.least, NUM_STEPS, corpus)


def complete_versions(checkpoints: Path) -> list[int]:
    """Versions on the disk, oldest first: written in the background, so which ones may vary."""
    found = checkpoints.glob("step-????????/manifest")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def run_held(
    tmp_path: Path, corpus: Path, spec: dict[str, Any], meddle: Callable[[Path], int]
) -> tuple[dict[str, Any], LocalJob, int]:
    """Run with the fault; do something to the checkpoints just before it.

    ``meddle`` returns the version that the job has to go on from.
    """
    gates = tmp_path / "gates"
    gates.mkdir()
    job = make_job(LAYOUT, NUM_STEPS, corpus, gates, [HELD_AT], **spec)
    with local_job(tmp_path, job, [FAULT]) as running:
        running.wait_for_members(HELD_AT, LAYOUT.num_cells)
        checkpoints = running.state_dir / "checkpoints"

        def at_rest() -> bool:
            """Nobody votes at a gate, so what is not being renamed by now will not be."""
            known = running.fetch()["checkpoint"]["step"]
            renaming = list(checkpoints.glob("*.tmp-*/manifest"))
            return not renaming and known == max(complete_versions(checkpoints), default=0)

        running.wait_until(at_rest)
        version = meddle(checkpoints)
        (gates / str(HELD_AT)).touch()
        return running.report(), running, version


def check(report: dict[str, Any], undisturbed: dict[str, Any], version: int) -> None:
    assert report["digests"] == undisturbed["digests"]
    (restart,) = (r for r in report["recoveries"] if r["method"] == "restart")
    assert restart["exact"]
    assert restart["lost_steps"] == HELD_AT - version, restart
    assert report["steps"]["lost"] == HELD_AT - version


def checkpointed() -> dict[str, Any]:
    return {"checkpoint": {"everySteps": EVERY_STEPS}}


def test_the_newest_checkpoint_is_taken_up_and_named_in_the_reason(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    def look(checkpoints: Path) -> int:
        return complete_versions(checkpoints)[-1]

    report, job, version = run_held(tmp_path, corpus, checkpointed(), look)
    check(report, undisturbed, version)
    (restart,) = (r for r in report["recoveries"] if r["method"] == "restart")
    assert f"all go on from step {version}" in restart["reason"]
    checkpoints = job.state_dir / "checkpoints"
    assert complete_versions(checkpoints)[-1] == NUM_STEPS, "the last step's, before the job ends"
    assert len(list(checkpoints.glob("step-*"))) == 2, "two are kept, and nothing unfinished"


@pytest.mark.chaos
def test_a_torn_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    torn = []

    def tear(checkpoints: Path) -> int:
        older, newest = [0, *complete_versions(checkpoints)][-2:]
        torn.append(newest)
        for tensors in (checkpoints / f"step-{newest:08d}").rglob("tensors"):
            tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])
        return older

    report, job, version = run_held(tmp_path, corpus, checkpointed(), tear)
    check(report, undisturbed, version)
    logs = [path.read_text() for path in job.state_dir.glob("pods/*/trainer-*.log")]
    assert any(f"step-{torn[0]:08d} is skipped" in log for log in logs)


@pytest.mark.chaos
def test_without_a_checkpoint_the_job_begins_again(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    report, _, _ = run_held(tmp_path, corpus, {}, lambda _: 0)
    check(report, undisturbed, 0)


@pytest.mark.chaos
def test_another_run_goes_on_with_other_replicas_stages_and_slots(
    tmp_path: Path, corpus: Path
) -> None:
    layout, steps, enough = Layout(lanes=2, spares=0), 8, 4
    directories = {name: tmp_path / name for name in ("whole", "first", "second")}
    for directory in directories.values():
        directory.mkdir()
    whole = run_undisturbed(directories["whole"], layout.least, steps, corpus)
    shape = {"parallelism": {"stages": 2, "ranksPerPod": 2}, "checkpoint": {"everySteps": 2}}
    first = make_job(layout, enough, corpus, **shape)
    with local_job(directories["first"], first) as running:
        running.report()
        earlier = running.state_dir
    second = make_job(layout, steps, corpus, parallelism={"replicas": 1})
    with local_job(directories["second"], second, [], "--resume", str(earlier)) as running:
        resumed = running.report()

    assert resumed["steps"]["first"] == enough
    assert resumed["digests"]["steps"] == whole["digests"]["steps"][enough:]
    assert resumed["digests"]["final"] == whole["digests"]["final"]
    assert compare_reports(whole, resumed) == []
    verified = subprocess.run(
        [*MAINSTAY, "checkpoints", "verify", str(earlier)], capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert f"step {enough}: good" in verified.stdout
