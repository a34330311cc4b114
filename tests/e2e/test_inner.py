"""Ranks of a cell: one that is lost is masked and heals, and leaves no trace in the bits."""

from pathlib import Path

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, run_undisturbed

pytestmark = pytest.mark.slow

CELL = Layout(ranks_per_stage=2, ranks_per_pod=2, lanes=2, shards_per_lane=2, spares=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_lost_inner_rank_and_a_lost_cell_leave_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path
) -> None:
    kills = [("kill-trainer", "forward"), ("kill-pod", "vote"), ("kill-trainer", "backward")]
    (tmp_path / "undisturbed").mkdir()
    expected = run_undisturbed(
        tmp_path / "undisturbed", CELL.least, matrix.num_steps(len(kills)), corpus
    )
    (tmp_path / "disturbed").mkdir()
    matrix.check_disturbed_run(tmp_path / "disturbed", CELL, kills, corpus, expected)
