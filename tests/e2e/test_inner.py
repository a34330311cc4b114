"""Ranks of a cell: one that is lost is masked and heals, and leaves no trace in the bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, run_undisturbed

pytestmark = pytest.mark.slow

CELL = Layout(ranks_per_stage=2, ranks_per_pod=2, lanes=2, shards_per_lane=2, spares=0)


KILLS = [("kill-trainer", "forward"), ("kill-pod", "vote"), ("kill-trainer", "backward")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    steps = matrix.num_steps(len(KILLS))
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), CELL.least, steps, corpus)


def test_a_lost_inner_rank_and_a_lost_cell_leave_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    matrix.check_disturbed_run(tmp_path, CELL, KILLS, corpus, undisturbed)


@pytest.mark.chaos
def test_a_lost_inner_rank_leaves_no_trace_where_aborted_sums_end_without_an_error(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any]
) -> None:
    matrix.check_disturbed_run(
        tmp_path, replace(CELL, strict=True), KILLS[-1:], corpus, undisturbed
    )
