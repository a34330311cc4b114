"""Cells of two ranks: kills of trainers and pods in every phase, and in two cells at once."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job, run_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

KILLS = list(itertools.product(matrix.ACTIONS, matrix.PHASES))
LAYOUTS = [
    Layout(stages=stages, ranks_per_stage=2, ranks_per_pod=slots, lanes=2, shards_per_lane=2)
    for stages, slots in ((1, 1), (1, 2), (2, 2), (2, 4))
]
STRICT = [replace(layout, strict=True) for layout in LAYOUTS[1:3]]
"""Cells whose sums are of the backend that is as NCCL is; the bits are those over gloo."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("layout", [*LAYOUTS, *STRICT], ids=str)
def test_ten_kills_of_inner_ranks_and_cells_leave_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path, layout: Layout
) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    steps = matrix.num_steps(len(KILLS))
    calm = replace(layout, strict=False)
    expected = run_undisturbed(tmp_path / "undisturbed", calm, steps, corpus)
    matrix.check_disturbed_run(tmp_path / "disturbed", layout, KILLS, corpus, expected)


def test_the_bits_of_cells_do_not_depend_on_where_stages_are_cut(
    tmp_path: Path, corpus: Path
) -> None:
    reports = []
    for layout in LAYOUTS[1:3]:
        (tmp_path / str(layout)).mkdir()
        reports.append(run_undisturbed(tmp_path / str(layout), layout, 6, corpus)["digests"])
    assert reports[0] == reports[1]


@pytest.mark.parametrize("phase", ["forward", "backward", "vote"])
def test_what_is_left_of_two_broken_cells_becomes_one(
    tmp_path: Path, corpus: Path, phase: str
) -> None:
    layout = Layout(ranks_per_stage=2, lanes=2, shards_per_lane=2, spares=0)
    faults = [
        {"at": {"step": 3, "phase": phase}, "target": target, "action": "kill-trainer"}
        for target in (
            {"replica": 0, "stage": 0, "inner": 0},
            {"replica": 1, "stage": 0, "inner": 1},
        )
    ]
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout, 8, corpus)
    with local_job(tmp_path / "disturbed", make_job(layout, 8, corpus), faults) as job:
        report = job.report()
    assert report["digests"] == expected["digests"]
    assert report["recoveries"]
    assert report["steps"]["lost"] == 0


def test_a_stopped_inner_rank_is_found_by_its_silence_alone(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(ranks_per_stage=2, ranks_per_pod=2, lanes=2, shards_per_lane=2, spares=0)
    report = matrix.check_stopped_rank(
        tmp_path, corpus, layout, {"replica": 1, "stage": 0, "inner": 1}
    )
    assert len([r for r in report["recoveries"] if r["method"] == "mask"]) == 1
