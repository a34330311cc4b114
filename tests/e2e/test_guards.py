"""Ends of a swapped pipeline are made anew: layers of the twin, embedding and head of guards."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import TINY_MODEL, Layout, local_job, make_job

from mainstay_cli.base.comparison import compare_reports

pytestmark = pytest.mark.slow

NUM_STEPS, LOST_AT = 10, 6
ALLOWED = {"allowApproximate": True, "approximateAfterLostSteps": 1}
"""Steps that are lost count as far as they have been told by then: the newest may not be."""
SWAPPED = {"order": "Swapped", "microBatches": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def kill(stage: int, replica: int = 0, step: int = LOST_AT, phase: str = "vote") -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": phase},
        "target": {"replica": replica, "stage": stage},
        "action": "kill-trainer",
    }


def run(
    directory: Path,
    corpus: Path,
    faults: list[dict[str, Any]],
    *,
    stages: int = 3,
    lanes: int = 1,
    spares: int = 1,
    options: Sequence[str] = (),
    checkpoint: dict[str, Any] | None = None,
    snapshots: dict[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
    **approximate: int,
) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    layout = Layout(stages=stages, lanes=lanes, shards_per_lane=2, spares=spares)
    recovery = {**ALLOWED, "approximate": approximate}
    parts = {"checkpoint": checkpoint or {}, "snapshots": snapshots or {}}
    job = make_job(layout, num_steps, corpus, recovery=recovery, pipeline=SWAPPED, **parts)
    job["spec"]["workload"]["config"] = TINY_MODEL | {
        "layers": stages,
        "data": {"path": str(corpus)},
    }
    with local_job(directory, job, faults, *options) as running:
        return running.report()


def check_made(report: dict[str, Any], stage: int, twin: int, block: str) -> None:
    """The one fork made the stage of its twin, with what it alone has of a guard; no step is lost.

    Each vote since then has compared what guards have, which were not lost, with what was made.
    """
    assert report["steps"]["lost"] == 0, report["recoveries"]
    assert (report["exact"], report["approximate_since"]) == (False, LOST_AT)
    (fork,) = report["lineage"]["forks"]
    reason = fork["made"]["reason"]
    assert f"stage {stage} is made anew from" in reason
    assert f"a guard of {block} in stage {twin}" in reason
    assert f"its twin stage {twin}" in reason
    assert report["findings"]["findings"] == []


def test_a_first_stage_that_is_lost_is_made_of_its_twin_and_a_guard(
    tmp_path: Path, corpus: Path
) -> None:
    check_made(run(tmp_path, corpus, [kill(0)]), 0, 1, "embedding")


@pytest.mark.chaos
def test_the_same_loss_has_the_same_bits(tmp_path: Path, corpus: Path) -> None:
    phases = ("vote", "backward")
    reports = [run(tmp_path / phase, corpus, [kill(0, phase=phase)]) for phase in phases]
    for report in reports:
        check_made(report, 0, 1, "embedding")
    assert compare_reports(*reports) == []


@pytest.mark.chaos
def test_a_last_stage_whose_cells_are_lost_together_is_made_anew(
    tmp_path: Path, corpus: Path
) -> None:
    """Each of two successors makes its own copy, each beginning with another guard."""
    both = [kill(3, replica) for replica in (0, 1)]
    report = run(tmp_path, corpus, both, stages=4, lanes=2, spares=2)
    check_made(report, 3, 2, "head")


@pytest.mark.chaos
def test_what_pods_keep_comes_before_what_guards_have_and_counts_again_after_a_fork(
    tmp_path: Path, corpus: Path
) -> None:
    """A pod goes with the only copies of the first stage. Later its trainer goes, and they stay.

    The guard's own stage is replayed, too: it has no copy then, and gets one in the next step.
    """
    gone = kill(0) | {"action": "kill-pod"}
    snapshots = {"enabled": True, "peers": 0, "window": 2, "memory": "64Mi"}
    faults = [gone, kill(0, step=11), kill(1, step=12)]
    how: dict[str, Any] = {"spares": 2, "snapshots": snapshots, "num_steps": 14, "guards": 1}
    report = run(tmp_path, corpus, faults, **how)

    check_made(report, 0, 1, "embedding")
    methods = [r["method"] for r in report["recoveries"]]
    assert methods[-3:] == ["approximate", "replay", "replay"], report["recoveries"]


@pytest.mark.chaos
def test_without_a_guard_an_end_has_the_ladders_next_answer(tmp_path: Path, corpus: Path) -> None:
    report = run(tmp_path, corpus, [kill(0)], guards=0)
    (recovery,) = report["recoveries"]
    assert (recovery["method"], recovery["exact"]) == ("restart", True)
    assert "for want of anything newer" in recovery["reason"]


@pytest.mark.chaos
@pytest.mark.parametrize("stage", [0, 1])
def test_who_is_lost_in_the_middle_of_it_changes_no_bit(
    tmp_path: Path, corpus: Path, stage: int
) -> None:
    """The maker dies as it copies; or one of two guards, who is its twin, does as it is copied."""
    more = kill(0, phase="heal") if stage == 0 else kill(1, phase="heal-source")
    layout = {"lanes": 2, "spares": 3}
    both = [kill(0, replica) for replica in (0, 1)]
    once = run(tmp_path / "once", corpus, both, **layout)
    again = run(tmp_path / "again", corpus, [*both, more], **layout)
    for report in (once, again):
        check_made(report, 0, 1, "embedding")
    assert compare_reports(once, again) == []


@pytest.mark.chaos
@pytest.mark.parametrize("end", [0, 2])
def test_a_run_that_loses_nothing_repeats_what_was_made_with_guards(
    tmp_path: Path, corpus: Path, end: int
) -> None:
    """Two forks: an end, and the inner stage that guards it."""
    first = run(tmp_path, corpus, [kill(end), kill(1, step=8)], spares=2)
    options = ("--repeat-lineage", str(tmp_path / "report.json"))
    again = run(tmp_path / "again", corpus, [], options=options)

    assert [fork["version"] for fork in first["lineage"]["forks"]] == [LOST_AT, 8]
    assert first["steps"]["lost"] == again["steps"]["lost"] == 0
    assert compare_reports(first, again) == []
