"""The whole fault matrix: 2 kinds of kill x 5 phases x 2 stages x 2 slots x 2 types of a lane.

All of it once by gloo, and once by the backend without buffers (:mod:`tests.strict`). The bits of
an undisturbed run by gloo are those of both.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, run_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

KILLS = list(itertools.product(matrix.ACTIONS, matrix.PHASES))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Any]:
    return {
        str(layout): run_undisturbed(
            tmp_path_factory.mktemp(str(layout)), layout, matrix.num_steps(len(KILLS)), corpus
        )
        for layout in matrix.LAYOUTS
    }


def test_all_combinations_are_there() -> None:
    assert len(matrix.LAYOUTS) * len(KILLS) == 80


@pytest.mark.parametrize("strict", [False, True], ids=["gloo", "strict"])
@pytest.mark.parametrize("layout", matrix.LAYOUTS, ids=str)
def test_ten_kills_with_heals_between_leave_no_trace_in_the_bits(
    tmp_path: Path, corpus: Path, undisturbed: dict[str, Any], layout: Layout, strict: bool
) -> None:
    tried = replace(layout, strict=strict)
    matrix.check_disturbed_run(tmp_path, tried, KILLS, corpus, undisturbed[str(layout)])


def test_the_bits_depend_on_the_types_alone(undisturbed: dict[str, Any]) -> None:
    for shards_per_lane in (1, 4):
        digests = [
            undisturbed[str(layout)]["digests"]
            for layout in matrix.LAYOUTS
            if layout.shards_per_lane == shards_per_lane
        ]
        assert len(digests) == 4
        assert all(other == digests[0] for other in digests)
