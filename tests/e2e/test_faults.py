"""Kill -9 of trainers and pods in every phase: the bits are those of an undisturbed run.

Pairwise over what is killed, the phase, the stages, the slots of a pod and the types
of a lane; ``make chaos`` runs all 80 combinations.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, run_undisturbed

pytestmark = pytest.mark.slow

CASES = matrix.pairwise_cases()
NUM_STEPS = matrix.num_steps(len(matrix.PHASES))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    """Reports of undisturbed runs, by layout."""
    return {
        str(layout): run_undisturbed(
            tmp_path_factory.mktemp(str(layout)), layout, NUM_STEPS, corpus
        )
        for layout, _ in CASES
    }


def test_the_cases_cover_every_pair_of_values() -> None:
    rows = [
        (action, phase, layout.stages, layout.ranks_per_pod, layout.shards_per_lane)
        for layout, kills in CASES
        for action, phase in kills
    ]
    values = [matrix.ACTIONS, matrix.PHASES, (1, 2), (1, 2), (1, 4)]
    for i in range(5):
        for j in range(i):
            assert {(row[i], row[j]) for row in rows} == {
                (a, b) for a in values[i] for b in values[j]
            }


@pytest.mark.parametrize(("layout", "kills"), CASES, ids=[str(layout) for layout, _ in CASES])
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
    corpus: Path,
    undisturbed: dict[str, Any],
    layout: Layout,
    kills: list[tuple[str, str]],
) -> None:
    matrix.check_disturbed_run(tmp_path, layout, kills, corpus, undisturbed[str(layout)])


def test_stages_and_slots_do_not_change_the_bits(undisturbed: dict[str, Any]) -> None:
    for shards_per_lane in (1, 4):
        reports = [
            undisturbed[str(layout)]["digests"]
            for layout, _ in CASES
            if layout.shards_per_lane == shards_per_lane
        ]
        assert len(reports) == 2
        assert reports[0] == reports[1]
