"""When every copy of a stage is gone the job goes back to its newest good checkpoint, exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, make_job, run_undisturbed

pytestmark = pytest.mark.slow

# One replica: the loss of a rank is the loss of all copies of its stage.
LAYOUT = Layout(stages=2, lanes=1, shards_per_lane=2, spares=1)
NUM_STEPS = 12
EVERY_STEPS = 3
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
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), LAYOUT, NUM_STEPS, corpus)


def run_held(
    tmp_path: Path, corpus: Path, spec: dict[str, Any], meddle: Callable[[Path], None]
) -> tuple[dict[str, Any], LocalJob]:
    """Run with the fault; do something to the checkpoints just before it."""
    gates = tmp_path / "gates"
    gates.mkdir()
    job = make_job(LAYOUT, NUM_STEPS, corpus, gates, [HELD_AT], **spec)
    with local_job(tmp_path, job, [FAULT]) as running:
        running.wait_for_members(HELD_AT, LAYOUT.num_cells)
        meddle(running.state_dir / "checkpoints")
        (gates / str(HELD_AT)).touch()
        return running.report(), running


def check(report: dict[str, Any], undisturbed: dict[str, Any], from_version: int) -> None:
    assert report["digests"] == undisturbed["digests"]
    (restart,) = (r for r in report["recoveries"] if r["method"] == "restart")
    assert restart["exact"]
    assert restart["lost_steps"] == HELD_AT - from_version, restart
    assert report["steps"]["lost"] == HELD_AT - from_version


def checkpointed() -> dict[str, Any]:
    return {"checkpoint": {"everySteps": EVERY_STEPS}}


def test_the_newest_checkpoint_is_taken_up(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    def look(checkpoints: Path) -> None:
        assert (checkpoints / "step-00000006" / "manifest.json").exists()

    report, _ = run_held(tmp_path, corpus, checkpointed(), look)
    check(report, undisturbed, from_version=6)


def test_a_torn_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    def tear(checkpoints: Path) -> None:
        for tensors in (checkpoints / "step-00000006").rglob("*.distcp"):
            tensors.write_bytes(tensors.read_bytes()[: tensors.stat().st_size // 2])

    report, job = run_held(tmp_path, corpus, checkpointed(), tear)
    check(report, undisturbed, from_version=3)
    logs = [path.read_text() for path in job.state_dir.glob("pods/*/trainer-*.log")]
    assert any("step-00000006 is skipped" in log for log in logs)


def test_without_a_checkpoint_the_job_begins_again(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    report, _ = run_held(tmp_path, corpus, {}, lambda _: None)
    check(report, undisturbed, from_version=0)
