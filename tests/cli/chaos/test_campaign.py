"""What a campaign makes of runs, and the targets of the command line."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_cli.base.exits import UsageError
from mainstay_cli.chaos.runs import Outcome
from mainstay_cli.chaos.verdicts import Judgement, Verdict, judge_run
from mainstay_cli.commands import faults
from mainstay_cli.views.faults import at_text

ENTRY = {
    "id": "a",
    "at": {"step": 2, "phase": "VOTE"},
    "target": {"replica": 1, "stage": 0},
    "action": "kill-pod",
}
FIRED = {"pod": "job-3", "slot": 0, "rank": "r1.s0.i0", "at_s": 100.0}
FAULT: dict[str, Any] = {
    "id": "a",
    "action": "kill-pod",
    "replica": 1,
    "stage": 0,
    "inner": 0,
    "step": 2,
    "phase": "VOTE",
    "state": "fired",
    "fired": FIRED,
}
RECOVERY: dict[str, Any] = {
    "method": "mask",
    "started_at_s": 99.99,
    "slots": [{"pod": "uid-3", "index": 0}],
    "lost_steps": 0,
    "first_commit_after_s": 0.1,
}


def report(*steps: str, **others: Any) -> dict[str, Any]:
    return {
        "digests": {"steps": list(steps), "final": {"params": "p"}},
        "pods": {"uid-3": "job-3"},
        "recoveries": [],
        **others,
    }


def judged(made: dict[str, Any], listed: dict[str, Any], code: int | None = 0) -> Verdict:
    outcome = Outcome(seconds=9.0, code=code, report=made, faults=[listed])
    (verdict,) = judge_run(0, [ENTRY], outcome, report("x", "y"))
    return verdict


def test_a_fault_that_fired_in_a_run_of_equal_bits_is_equal() -> None:
    verdict = judged(report("x", "y", recoveries=[RECOVERY]), FAULT)
    assert (verdict.judgement, verdict.method, verdict.fired_on) == (
        Judgement.EQUAL,
        "mask",
        "job-3/0",
    )
    assert verdict.first_commit_after_s == 0.1


def test_recoveries_of_others_and_before_it_are_not_its_own() -> None:
    other = RECOVERY | {"slots": [{"pod": "uid-9", "index": 0}]}
    before = RECOVERY | {"started_at_s": 90.0}
    join = RECOVERY | {"method": "join"}
    assert judged(report("x", "y", recoveries=[other, before, join]), FAULT).method == ""


def test_one_other_digest_makes_it_differ() -> None:
    verdict = judged(report("x", "z"), FAULT)
    assert verdict.judgement is Judgement.DIFFERS
    assert "step 1" in verdict.why


def test_a_missing_step_makes_it_differ() -> None:
    assert judged(report("x"), FAULT).judgement is Judgement.DIFFERS


def test_a_run_beyond_its_bound_hangs() -> None:
    verdict = judged({}, FAULT, code=None)
    assert verdict.judgement is Judgement.FAILED
    assert "hangs" in verdict.why


def test_a_fault_that_never_fired_says_why() -> None:
    verdict = judged(report("x", "y"), FAULT | {"fired": None, "state": "over"})
    assert verdict.judgement is Judgement.NOT_REACHED
    assert "the job ended before" in verdict.why


def test_targets_are_written_as_pairs() -> None:
    assert faults.parse_target("replica=1, stage=0") == {"replica": 1, "stage": 0}
    assert faults.parse_target("process=api") == {"process": "api"}


def test_the_bit_of_a_flip_is_written_as_pairs_and_shown_in_few_words() -> None:
    found = faults.parse_pairs("operator=aten.mm,element=5,bit=30", "--flip", faults.FLIP_NUMBERS)
    assert found == {"operator": "aten.mm", "element": 5, "bit": 30}
    by_place = faults.parse_pairs("operator=3,pass=weight", "--flip", faults.FLIP_NUMBERS)
    assert by_place == {"operator": 3, "pass": "weight"}
    fault = {"step": 4, "phase": "forward", "flip": found | {"execution": "both"}}
    assert at_text(fault) == "step 4 forward aten.mm, element 5, bit 30, both"
    with pytest.raises(UsageError, match="--flip: 'bit' is not key=value"):
        faults.parse_pairs("bit", "--flip", faults.FLIP_NUMBERS)


@pytest.mark.parametrize("text", ["", "replica", "replica=", "stage=1,stage=2"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--target"):
        faults.parse_target(text)
