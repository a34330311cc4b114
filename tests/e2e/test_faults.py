"""Kill -9 of trainers and pods in every phase: the bits are those of an undisturbed run.

Pairwise over what is killed, the phase, the stages, the slots of a pod and the types
of a lane; ``make chaos`` runs all pairs, and all 80 combinations. ``make test`` has two
layouts with every phase: one whose trainers communicate by gloo, and one as by NCCL.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job, run_undisturbed

pytestmark = pytest.mark.slow

CASES = matrix.pairwise_cases()
STRICT_CASES = matrix.strict_cases()
NUM_STEPS = matrix.num_steps(len(matrix.PHASES))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[int], Any]:
    """Reports of undisturbed runs, by types of a lane: the bits depend on nothing else.

    One has one stage, the other two, so that every disturbed run is also compared with one that
    has another number of stages, replicas or slots; ``make chaos`` compares like with like.
    """
    one = Layout(stages=1, shards_per_lane=1, replicas=1, spares=0)
    layouts = {1: one, 4: replace(one, stages=2, shards_per_lane=4)}

    @cache
    def find(types: int) -> Any:
        layout = layouts[types]
        return run_undisturbed(tmp_path_factory.mktemp(str(layout)), layout, NUM_STEPS, corpus)

    return find


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


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        *CASES[:1],
        *(pytest.param(*case, marks=pytest.mark.chaos) for case in CASES[1:]),
        pytest.param(*STRICT_CASES[0], marks=pytest.mark.chaos),
        *STRICT_CASES[1:],
    ],
    ids=[str(layout) for layout, _ in CASES + STRICT_CASES],
)
def test_a_disturbed_run_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path,
    corpus: Path,
    undisturbed: Callable[[int], Any],
    layout: Layout,
    kills: list[tuple[str, str]],
) -> None:
    matrix.check_disturbed_run(tmp_path, layout, kills, corpus, undisturbed(layout.shards_per_lane))


@pytest.mark.chaos
def test_a_killed_spare_is_made_anew_and_disturbs_nobody(tmp_path: Path, corpus: Path) -> None:
    layout, gates = Layout(lanes=2), tmp_path / "gates"
    gates.mkdir()
    fault = {"at": {"step": 2}, "target": {"spare": 0}, "action": "kill-pod"}
    with local_job(tmp_path, make_job(layout, 6, corpus, gates, [4]), [fault]) as job:
        job.wait_until(lambda: "is gone" in (tmp_path / "output.log").read_text())
        (gates / "4").touch()
        report = job.report()
    assert report["recoveries"] == []
    assert len(report["digests"]["steps"]) == 6
    assert "FaultInjected" in [event["reason"] for event in report["events"]]


@pytest.mark.chaos
def test_what_is_left_of_two_broken_replicas_becomes_one(tmp_path: Path, corpus: Path) -> None:
    layout = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
    faults = [
        {"at": {"step": step, "phase": phase}, "target": target, "action": "kill-trainer"}
        for step, phase in ((2, "forward"), (5, "vote"))
        for target in ({"replica": 0, "stage": 0}, {"replica": 1, "stage": 1})
    ]
    gates = tmp_path / "gates"
    for directory in (tmp_path / "undisturbed", tmp_path / "disturbed", gates):
        directory.mkdir()
    expected = run_undisturbed(tmp_path / "undisturbed", layout.least, 8, corpus)
    spec = make_job(layout, 8, corpus, gates, [3, 4])
    with local_job(tmp_path / "disturbed", spec, faults) as job:
        # The second pair holds the only states until the first is healed.
        job.wait_for_members(3, 4, or_joining=True)
        (gates / "3").touch()
        job.wait_for_members(4, 4)
        (gates / "4").touch()
        report = job.report()
    assert report["digests"] == expected["digests"]
    assert report["recoveries"]
    assert report["steps"]["lost"] == 0


def test_a_stopped_trainer_is_found_by_its_silence_and_replaced(
    tmp_path: Path, corpus: Path
) -> None:
    layout = Layout(stages=2, lanes=2, shards_per_lane=2)
    matrix.check_stopped_rank(tmp_path, corpus, layout, {"replica": 1, "stage": 0})
