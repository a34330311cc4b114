"""Wrong bits that come together, or beside a loss: every run ends with the undisturbed digests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job
from tests.e2e.test_flips import DYNAMIC, FULL, NUM_STEPS, PIGGYBACK

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEP = 2
TWO_STAGES = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
CELLS = Layout(stages=2, lanes=2, ranks_per_stage=2, ranks_per_pod=2, spares=0)
FOUR = Layout(lanes=4, dtype="bfloat16", spares=0)


def flip(replica: int, stage: int, phase: str = "forward", **fields: Any) -> dict[str, Any]:
    """Return a wrong bit in a product of a rank."""
    given = {"operator": "aten.mm", "element": 7, "bit": 30}
    return {
        "at": {"step": STEP, "phase": phase},
        "target": {"replica": replica, "stage": stage},
        "action": "flip",
        "flip": given | fields,
    }


def kill(replica: int, stage: int, phase: str, **at: Any) -> dict[str, Any]:
    """Return the end of a rank's trainer."""
    return {
        "at": {"step": STEP, "phase": phase, **at},
        "target": {"replica": replica, "stage": stage},
        "action": "kill-trainer",
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> matrix.Expected:
    return matrix.find_undisturbed(tmp_path_factory, NUM_STEPS)


def run(
    tmp_path: Path,
    expected: matrix.Expected,
    layout: Layout,
    spec: dict[str, Any],
    faults: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Run with faults, and compare; return findings, the report, and the logs."""
    corpus, undisturbed = expected(layout)
    job = make_job(layout, NUM_STEPS, corpus, **spec)
    with local_job(tmp_path, job, faults) as running:
        report, logs = running.report(), running.tails(num_lines=1000)
    assert report["digests"] == undisturbed["digests"], logs
    findings = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    return findings, report, logs


PAIRS = {
    "one chain": (PIGGYBACK, [flip(0, 0), flip(0, 1, block=0, type=1)]),
    "two chains": (DYNAMIC, [flip(0, 0), flip(1, 1)]),
    "forward and weight": (DYNAMIC, [flip(0, 1), flip(1, 0, "backward", **{"pass": "weight"})]),
    "reduction and apply": (
        FULL,
        [
            flip(0, 0, "reduce", operator="aten.add"),
            flip(1, 1, "apply", operator="aten._fused_adamw_"),
        ],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_wrong_bits_in_one_step_are_both_found(
    tmp_path: Path, expected: matrix.Expected, name: str
) -> None:
    spec, faults = PAIRS[name]

    findings, report, logs = run(tmp_path, expected, TWO_STAGES, spec, faults)

    assert {finding["step"] for finding in findings} == {STEP}, logs
    ranks = {(f["rank"]["replica"], f["rank"]["stage"]) for f in findings}
    assert ranks == {(f["target"]["replica"], f["target"]["stage"]) for f in faults}, logs
    assert report["recoveries"] == []
    assert "was not put in" not in logs


LOSSES = {
    "before its check": (PIGGYBACK, [flip(0, 0), kill(0, 0, "RECV_B")], False),
    "before its check, at once": (DYNAMIC, [flip(0, 0), kill(0, 0, "RECV_B")], False),
    "before its last check": (PIGGYBACK, [flip(0, 0), kill(0, 0, "BACKWARD_WEIGHT")], True),
    "between check and vote": (PIGGYBACK, [flip(0, 0), kill(0, 0, "reduce")], True),
    "about to vote": (DYNAMIC, [flip(0, 0), kill(0, 0, "vote")], True),
    "after its vote": (PIGGYBACK, [flip(0, 0), kill(0, 0, "vote", delayMs=10)], True),
    "after its vote, applying": (DYNAMIC, [flip(0, 1), kill(0, 1, "apply")], True),
    "the next stage dies": (PIGGYBACK, [flip(0, 0), kill(0, 1, "BACKWARD_INPUT")], None),
    "another replica dies": (DYNAMIC, [flip(0, 1), kill(1, 0, "backward")], None),
    "in the masked step": (PIGGYBACK, [kill(1, 0, "forward"), flip(0, 0, type=2)], True),
    "in the masked step, late": (DYNAMIC, [kill(1, 1, "backward"), flip(0, 1, type=3)], True),
}
"""Checks, faults, and whether the wrong bit is found: True where its check comes before the loss
or in the step without what was lost, False where it cannot, None where both may be."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_wrong_bit_beside_a_loss_changes_no_digest(
    tmp_path: Path, expected: matrix.Expected, name: str
) -> None:
    spec, faults, is_found = LOSSES[name]

    _, report, logs = run(tmp_path, expected, TWO_STAGES, spec, faults)

    assert report["recoveries"], logs
    # A killed trainer has told nobody, but its log outlives it.
    (number,) = (n for n, fault in enumerate(faults) if fault["action"] == "flip")
    assert f"flip fault-{number} is put in: aten.mm, step {STEP}, phase forward" in logs, logs
    target = faults[number]["target"]
    finding = f"step {STEP} of r{target['replica']}.s{target['stage']}.i0"
    if is_found is not None:
        assert (f"{finding} on " in logs) == is_found, logs


@pytest.mark.parametrize("part", ["masters", "moments"])
def test_a_wrong_bit_in_the_state_of_whom_a_joiner_copies_is_handed_on_to_nobody(
    tmp_path: Path, expected: matrix.Expected, part: str
) -> None:
    wrong = {
        "at": {"step": STEP + 1},
        # The first one writes the ledger: its entry of this step would be of wrong masters.
        "target": {"replica": 2, "stage": 0},
        "action": "flip",
        "flip": {"where": "state", "part": part, "block": 1, "element": 5, "bit": 29},
    }

    _, report, logs = run(tmp_path, expected, FOUR, FULL, [kill(1, 0, "backward"), wrong])

    assert "join" in [recovery["method"] for recovery in report["recoveries"]], logs


@pytest.mark.parametrize("operator", ["aten.mm", "_c10d_functional.all_reduce"])
def test_piggyback_finds_a_wrong_forward_of_a_cell_of_two_ranks(
    tmp_path: Path, expected: matrix.Expected, operator: str
) -> None:
    """Sums over the cell carry it to the other rank, whose kernels are not blamed."""
    fault = flip(0, 0, operator=operator, block=1)
    fault["target"]["inner"] = 1

    findings, report, logs = run(tmp_path, expected, CELLS, PIGGYBACK, [fault])

    assert report["recoveries"] == []
    assert "was not put in" not in logs
    assert findings, logs
    assert {finding["step"] for finding in findings} == {STEP}
    assert {finding["remedy"] for finding in findings} == {"void-type"}
    blamed = [f["rank"] for f in findings if f["verdict"] != "wire"]
    own = {"replica": 0, "stage": 0, "inner": 1}
    assert blamed == ([own] if operator == "aten.mm" else []), logs


def test_a_rank_that_dies_as_it_waits_for_its_cell_changes_no_bit(
    tmp_path: Path, expected: matrix.Expected
) -> None:
    fault = kill(0, 0, "inner-wait")
    fault["target"]["inner"] = 1

    _, report, logs = run(tmp_path, expected, replace(CELLS, stages=1), DYNAMIC, [fault])

    assert [told["state"] for told in report["faults"]] == ["fired"], logs
    assert report["recoveries"], logs
