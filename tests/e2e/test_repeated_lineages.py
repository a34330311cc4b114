"""A run that only gets the lineage record of another one comes to the same bits in every layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, LocalJob, local_job, make_job
from tests.e2e.planned import command, members, open_gate

from mainstay_cli.base.comparison import compare_reports

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

LOST_AT, SAVED_AT, RESTARTED_AT, SCALED_AT, NUM_STEPS = 6, 10, 14, 17, 20
GATES = (10, 11, 12, 15, 16, SCALED_AT, SCALED_AT + 1)
"""In threes: two of a stage may come back one after the other, each at the end of a step."""
ALLOWED = {"allowApproximate": True, "approximateAfterLostSteps": LOST_AT - 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.write_corpus(tmp_path_factory.mktemp("corpus"))


def kill(replica: int, stage: int, step: int, action: str = "kill-trainer") -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": "backward"},
        "target": {"replica": replica, "stage": stage},
        "action": action,
    }


def check_repeated(first: dict[str, Any], again: dict[str, Any]) -> None:
    """The repeating run lost nothing, and made the one fork of the first: all steps are equal."""
    assert (first["exact"], first["approximate_since"]) == (False, LOST_AT)
    assert len(first["lineage"]["forks"]) == 1
    assert {r["fault"] for r in again["recoveries"]} == {"nothing has failed"}
    assert [r["method"] for r in again["recoveries"]] == ["approximate"]
    assert len(again["digests"]["steps"]) == len(first["digests"]["steps"])
    assert compare_reports(first, again) == []
    states = [run["lineage"]["forks"][0]["outcome"]["states"] for run in (first, again)]
    assert states[0] == states[1]


def repeat(directory: Path, job: dict[str, Any], report: Path) -> dict[str, Any]:
    directory.mkdir()
    with local_job(directory, job, [], "--repeat-lineage", str(report)) as running:
        return running.report()


def test_a_fork_of_inner_ranks_with_several_types_is_repeated(tmp_path: Path, corpus: Path) -> None:
    """A pod goes with both ranks of a stage."""
    layout = Layout(
        stages=3, ranks_per_stage=2, ranks_per_pod=2, lanes=1, shards_per_lane=4, layers=6
    )
    gone = kill(0, 1, LOST_AT, "kill-pod")
    with local_job(tmp_path, make_job(layout, 10, corpus, recovery=ALLOWED), [gone]) as running:
        first = running.report()
    again = repeat(tmp_path / "again", make_job(layout, 10, corpus), tmp_path / "report.json")

    assert first["steps"]["lost"] == 0
    places = first["lineage"]["forks"][0]["made"]["positions"]
    assert [(place["stage"], place.get("inner", 0)) for place in places] == [(1, 0), (1, 1)]
    check_repeated(first, again)


def pass_gates(directory: Path, running: LocalJob, gates: Sequence[int], num_members: int) -> None:
    """Wait at each gate until who was lost has come back; the last one is left closed."""
    for gate in gates[:-1]:
        running.wait_for_members(gate, num_members, or_joining=True)
        open_gate(directory, gate)
    running.wait_for_members(gates[-1], num_members)


def test_a_fork_that_a_checkpoint_a_restart_and_a_scale_followed_is_repeated(
    tmp_path: Path, corpus: Path
) -> None:
    """By three replicas, and by one."""
    (tmp_path / "gates").mkdir()
    layout = Layout(stages=3, lanes=3, spares=0, layers=6)

    def job(replicas: int, **spec: Any) -> dict[str, Any]:
        """Gates that the first run has opened stay open."""
        spec |= {"checkpoint": {"everySteps": SAVED_AT}}
        one = replace(layout, replicas=replicas)
        return make_job(one, NUM_STEPS, corpus, tmp_path / "gates", GATES, **spec)

    middle = [kill(replica, 1, LOST_AT) for replica in range(3)]
    end = [kill(replica, 0, RESTARTED_AT) for replica in range(3)]
    with local_job(tmp_path, job(3, recovery=ALLOWED), [*middle, *end]) as running:
        pass_gates(tmp_path, running, GATES[:3], layout.num_ranks)
        open_gate(tmp_path, GATES[2])
        pass_gates(tmp_path, running, GATES[3:6], layout.num_ranks)
        scaled = command(running, "scale", "tiny", "--replicas", "2")
        assert scaled.returncode == 0, scaled.stderr
        open_gate(tmp_path, SCALED_AT)
        running.wait_for_members(SCALED_AT + 1, 2 * layout.stages)
        assert {m["replica"] for m in members(running)} == {0, 1}
        open_gate(tmp_path, SCALED_AT + 1)
        first = running.report()

    assert {fault["state"] for fault in first["faults"]} == {"fired"}
    assert "restart" in [r["method"] for r in first["recoveries"]]
    assert first["steps"]["lost"] == RESTARTED_AT - SAVED_AT, first["recoveries"]
    for replicas in (3, 1):
        again = repeat(tmp_path / f"by-{replicas}", job(replicas), tmp_path / "report.json")
        check_repeated(first, again)
