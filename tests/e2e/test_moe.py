"""A mixture of experts whose ranks are killed: gradients and router biases have the same bits.

The bias of a step comes from what the trainers count in it. So a count that is lost, or told twice,
in a patch or a heal shows in the choice of experts of all later steps.
"""

from pathlib import Path

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, run_undisturbed

pytestmark = pytest.mark.slow

KILLS = [("kill-trainer", "backward"), ("kill-pod", "vote")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.chaos
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_ranks_leave_no_trace_in_experts_and_biases(
    tmp_path: Path, corpus: Path, dtype: str
) -> None:
    for name in ("undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    whole = Layout(lanes=2, shards_per_lane=2, experts=True, dtype=dtype)
    staged = Layout(stages=2, lanes=2, shards_per_lane=2, experts=True, dtype=dtype)
    steps = matrix.num_steps(len(KILLS))
    expected = run_undisturbed(tmp_path / "undisturbed", whole.least, steps, corpus)
    matrix.check_disturbed_run(tmp_path / "disturbed", staged, KILLS, corpus, expected)
