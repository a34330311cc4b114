"""Each row of the page's table "What is noticed without checks" is shown by tests, by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "silent-corruption.md").read_text()
SCENARIOS = "tests/scenarios"

PLAYED = "tests/train/dmr/test_without_checks.py"
ALONE = f"{PLAYED}::test_all_cells_agree_on_what_one_has_computed_received_or_read_wrongly"
VOTES, RECORDS = "tests/core/rank/test_votes.py", "tests/core/coordinator/test_records.py"
CELLS = "tests/train/dmr/test_cell_trials.py"

SHOWN: dict[str, tuple[str, ...]] = {
    "forward, recompute, input gradient, weight gradient, the sum of a type or of a partial": (
        ALONE,
    ),
    "a partial on its way to a chunk's owner; the owner's sum": (
        ALONE,
        f"{PLAYED}::test_all_cells_get_what_an_owner_has_summed_wrongly",
        f"{CELLS}::test_a_wrong_bit_on_the_wire_is_found_by_its_digest_and_by_nothing_else",
    ),
    "the reduced gradient in one cell; its norm": (
        f"{PLAYED}::test_a_norm_that_one_cell_computes_wrongly_is_refused_and_nobody_is_named",
        f"{VOTES}::test_cells_of_a_stage_that_disagree_stop_the_step",
        f"{SCENARIOS}/rank-refused-gradient.txt",
    ),
    "any of these, so that the norm becomes infinite or no number": (
        "tests/core/rank/test_machine.py::test_a_norm_that_is_no_number_has_all_computed_again_once",
        f"{SCENARIOS}/rank-diverged.txt",
    ),
    "masters in apply": (
        f"{PLAYED}::test_masters_that_one_of_three_cells_applies_wrongly_are_named_in_the_next_vote",
        f"{PLAYED}::test_masters_that_the_only_cell_applies_wrongly_are_never_found",
        f"{VOTES}::test_the_minority_of_a_stage_is_bad",
        f"{VOTES}::test_of_two_that_differ_nobody_can_be_believed",
        f"{SCENARIOS}/rank-no-majority.txt",
        f"{RECORDS}::test_cells_of_a_stage_that_end_differently_are_announced",
    ),
    "Adam's moments; the bf16 copy that is computed with": (
        f"{PLAYED}::test_no_vote_compares_moments",
        f"{PLAYED}::test_all_cells_agree_on_what_one_has_computed_with_a_wrong_copy",
        "tests/train/checks/test_rest.py::test_a_job_that_checks_nothing_compares_masters_alone",
        "tests/train/state/test_heal_compared.py::test_wrong_moments_of_a_source_are_not_handed_on",
    ),
    "a micro-batch; the count of tokens that scales the gradient": (
        ALONE,
        f"{VOTES}::test_a_count_of_tokens_is_believed_as_one_rank_tells_it",
    ),
}
"""By the row's first cell: tests of jobs without checks, or scenarios."""


def rows() -> list[str]:
    section = PAGE.partition("## What is noticed without checks\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in lines if "| --- |" not in line][1:]


def test_every_row_of_the_table_has_its_tests() -> None:
    assert rows() == [*SHOWN]


@pytest.mark.parametrize("name", sorted({name for names in SHOWN.values() for name in names}))
def test_what_shows_a_row_is_there_and_runs_with_all_other_tests(name: str) -> None:
    path, _, function = name.partition("::")
    file = ROOT / path
    if path.startswith(SCENARIOS):
        assert file.is_file()
        return
    tree = ast.parse(file.read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    marks = [ast.unparse(mark) for mark in found.decorator_list]
    marked = [
        ast.unparse(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"
    ]
    assert "chaos" not in " ".join(marks + marked), "make test would leave it out"
