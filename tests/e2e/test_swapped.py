"""A swapped pipeline: whoever computes it, and whatever is killed, the bits are the same."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, run_disturbed, run_undisturbed

pytestmark = pytest.mark.slow

PHASES = ("SEND_F", "backward", "RECV_F", "reduce", "vote", "apply")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


SWAPPED = {"pipeline": {"order": "Swapped", "microBatches": 2}}


def check(directory: Path, corpus: Path, layout: Layout, kills: list[tuple[str, str]]) -> None:
    """Run with kills and compare with an undisturbed run of one replica."""
    num_steps = matrix.num_steps(len(kills))
    alone = replace(layout, replicas=1, spares=0, strict=False)
    for name in ("alone", "killed"):
        (directory / name).mkdir()
    undisturbed = run_undisturbed(directory / "alone", alone, num_steps, corpus, **SWAPPED)
    faults = matrix.faults_of(layout, kills)
    report = run_disturbed(directory / "killed", layout, num_steps, corpus, faults, **SWAPPED)
    assert report["digests"] == undisturbed["digests"]
    assert report["steps"]["lost"] == 0
    recoveries = [r for r in report["recoveries"] if r["method"] not in ("start", "join")]
    assert len(recoveries) >= len(kills), report["recoveries"]
    assert all(recovery["exact"] for recovery in report["recoveries"])


@pytest.mark.chaos
def test_kills_change_no_bit_and_neither_do_replicas(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(stages=2, lanes=2, shards_per_lane=4)
    check(tmp_path, corpus, layout, [("kill-trainer", "SEND_F"), ("kill-pod", "backward")])


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("stages", "shards_per_lane", "strict"),
    [*itertools.product((2, 3, 4), (1, 4), (False,)), (3, 1, True)],
)
def test_kills_in_every_phase_change_no_bit(
    tmp_path: Path, corpus: Path, stages: int, shards_per_lane: int, strict: bool
) -> None:
    layout = Layout(
        stages=stages, lanes=2, shards_per_lane=shards_per_lane, strict=strict, layers=stages
    )
    kills = [(matrix.ACTIONS[i % 2], phase) for i, phase in enumerate(PHASES)]
    check(tmp_path, corpus, layout, kills)


@pytest.mark.chaos
@pytest.mark.parametrize("shards_per_lane", [1, 4])
def test_one_two_and_four_replicas_have_the_same_bits(
    tmp_path: Path, corpus: Path, shards_per_lane: int
) -> None:
    digests = []
    for replicas in (1, 2, 4):
        layout = Layout(
            stages=2,
            lanes=4,
            shards_per_lane=shards_per_lane,
            replicas=replicas,
            ranks_per_pod=2,
            spares=0,
        )
        directory = tmp_path / str(replicas)
        directory.mkdir()
        digests.append(run_undisturbed(directory, layout, 8, corpus, **SWAPPED)["digests"])
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.chaos
def test_inner_ranks_swap_together(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(stages=2, ranks_per_stage=2, lanes=2)
    check(tmp_path, corpus, layout, [("kill-trainer", "SEND_F"), ("kill-trainer", "backward")])
