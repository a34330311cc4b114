"""An approximate job hands over, and is suspended and goes on, like an exact one: bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job
from tests.e2e.planned import command, open_gate, ranks
from tests.e2e.test_approximate import twin
from tests.e2e.test_suspend import wait_until_it_stands

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

LAYOUT = Layout(stages=3, lanes=1, shards_per_lane=2, spares=1, layers=6)
NUM_STEPS, LOST_AT, LOST_AGAIN_AT = 16, 4, 13
ALLOWED: dict[str, Any] = {
    "allowApproximate": True,
    "approximateAfterLostSteps": 1,
    # The stage is made of others, though a suspension leaves a checkpoint of its own.
    "approximate": {"staleSteps": 0},
}
SWAPPED = {"order": "Swapped", "microBatches": 2}
LOST = [pytest.param(1, {}, id="inner"), pytest.param(0, SWAPPED, id="end")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def kill(stage: int, step: int) -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": "backward"},
        "target": {"replica": 0, "stage": stage},
        "action": "kill-trainer",
    }


def gated(directory: Path, corpus: Path, gates: Sequence[int], **spec: Any) -> dict[str, Any]:
    (directory / "gates").mkdir()
    job = (LAYOUT, NUM_STEPS, corpus, directory / "gates", gates)
    return make_job(*job, recovery=ALLOWED, **spec)


def check(directory: Path, report: dict[str, Any], *losses: tuple[int, int]) -> None:
    """No step is lost, and the bits are those of one process with the same (steps, stage) lost."""
    assert report["steps"]["lost"] == 0, report["recoveries"]
    assert (report["exact"], report["approximate_since"]) == (False, losses[0][0])
    made = [fork["version"] for fork in report["lineage"]["forks"]]
    assert made == [step for step, _ in losses]
    assert report["digests"]["final"]["history"]
    assert report["digests"]["steps"] == twin(directory, *losses)


@pytest.mark.parametrize(("stage", "pipeline"), LOST)
def test_a_stage_that_was_made_anew_is_handed_over(
    tmp_path: Path, corpus: Path, stage: int, pipeline: dict[str, Any]
) -> None:
    spec = gated(tmp_path, corpus, (7, 8, 9, 12), pipeline=pipeline)
    with local_job(tmp_path, spec, [kill(stage, LOST_AT)]) as job:
        job.wait_for_members(7, LAYOUT.num_ranks)
        job.wait_until_all_up(LAYOUT.num_ranks + LAYOUT.spares)
        assert job.fetch("lineage")["approximate_since"] == LOST_AT
        leaver = ranks(job)[f"r0.s{stage}.i0"]
        drained = command(job, "drain", "tiny", leaver)
        assert drained.returncode == 0, drained.stderr
        # The successor joins at the end of this step, and swaps places at the end of the next.
        job.wait_until(lambda: len(ranks(job)) == LAYOUT.num_ranks + 1)
        open_gate(tmp_path, 7)
        job.wait_until(lambda: leaver not in ranks(job).values())
        open_gate(tmp_path, 8)
        open_gate(tmp_path, 9)
        job.wait_for_members(12, LAYOUT.num_ranks)
        open_gate(tmp_path, 12)
        report = job.report()

    assert [r["method"] for r in report["recoveries"]] == ["approximate", "hand-over"]
    check(tmp_path, report, (LOST_AT, stage))


@pytest.mark.parametrize(("stage", "pipeline"), LOST)
def test_a_job_that_was_suspended_goes_on_as_approximate_and_a_second_fork_follows_the_first(
    tmp_path: Path, corpus: Path, stage: int, pipeline: dict[str, Any]
) -> None:
    # Only the suspension, and the end, ever write one.
    spec = gated(tmp_path, corpus, (7, 10), pipeline=pipeline, checkpoint={"everySteps": 100})
    faults = [kill(stage, LOST_AT), kill(stage, LOST_AGAIN_AT)]
    with local_job(tmp_path, spec, faults) as job:
        job.wait_for_members(7, LAYOUT.num_ranks)
        asked = command(job, "suspend", "tiny")
        assert asked.returncode == 0, asked.stderr
        job.wait_until(lambda: job.fetch("plan")["plan"]["pause"])
        open_gate(tmp_path, 7)
        wait_until_it_stands(job)
        listed = command(job, "checkpoints", "ls", "tiny")
        assert f"approximate since step {LOST_AT}" in listed.stdout, listed
        resumed = command(job, "resume", "tiny")
        assert resumed.returncode == 0, resumed.stderr
        job.wait_for_members(10, LAYOUT.num_ranks)
        assert job.fetch("lineage")["approximate_since"] == LOST_AT
        open_gate(tmp_path, 10)
        report = job.report()

    assert [r["method"] for r in report["recoveries"]].count("approximate") == 2
    check(tmp_path, report, (LOST_AT, stage), (LOST_AGAIN_AT, stage))
