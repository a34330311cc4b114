"""Verdicts: every case of three executions, with the remedy that follows."""

from __future__ import annotations

import itertools

import pytest

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.dmr.verdicts import Remedy, Verdict, judge, judge_late, judge_raised


@pytest.mark.parametrize(
    ("third", "used", "verdict", "remedy"),
    [
        ("primary", True, Verdict.CHECKER_HIT, Remedy.NOTHING),
        ("primary", False, Verdict.CHECKER_HIT, Remedy.NOTHING),
        ("checker", False, Verdict.PRIMARY_HIT, Remedy.REPAIR),
        ("checker", True, Verdict.PRIMARY_HIT, Remedy.VOID_TYPE),
        ("neither", False, Verdict.UNRELIABLE, Remedy.HAND_OVER),
        ("neither", True, Verdict.UNRELIABLE, Remedy.HAND_OVER),
    ],
)
def test_the_majority_of_three_executions_is_right(
    third: str, used: bool, verdict: Verdict, remedy: Remedy
) -> None:
    judged = judge("primary", "checker", third, used=used)

    assert (judged.verdict, judged.remedy) == (verdict, remedy)
    assert judged.reason


@pytest.mark.parametrize(
    ("third", "verdict", "remedy"),
    [
        ("primary", Verdict.CHECKER_HIT, Remedy.REPAIR),
        ("checker", Verdict.PRIMARY_HIT, Remedy.VOID_TYPE),
        ("neither", Verdict.UNRELIABLE, Remedy.HAND_OVER),
    ],
)
def test_a_checker_whose_value_goes_on_is_repaired(
    third: str, verdict: Verdict, remedy: Remedy
) -> None:
    judged = judge("primary", "checker", third, used=True, goes_on=True)

    assert (judged.verdict, judged.remedy) == (verdict, remedy)


def test_an_execution_that_raised_alone_was_wrong() -> None:
    judged = judge_raised("IndexError: index out of range")

    assert (judged.verdict, judged.remedy) == (Verdict.PRIMARY_HIT, Remedy.REPAIR)
    assert "IndexError" in judged.reason


def test_of_two_executions_alone_nobody_knows_which_was_wrong() -> None:
    judged = judge_late()

    assert (judged.verdict, judged.remedy) == (Verdict.UNDECIDED, Remedy.VOID_TYPE)
    assert "not known" in judged.reason


def test_equal_executions_are_not_judged() -> None:
    with pytest.raises(LocalProtocolError):
        judge("same", "same", "other", used=False)


def test_no_single_flip_has_a_used_value_kept() -> None:
    right, wrong = "right", "wrong"
    for at in range(3):
        digests = [wrong if number == at else right for number in range(3)]
        for used in (False, True):
            if digests[0] == digests[1]:
                continue
            remedy = judge(*digests, used=used).remedy
            assert (remedy is Remedy.NOTHING) == (digests[0] == right)
    differing = [p for p in itertools.product("abc", repeat=3) if p[0] != p[1]]
    judged = {judge(*digests, used=True).verdict for digests in differing}
    assert judged == {Verdict.CHECKER_HIT, Verdict.PRIMARY_HIT, Verdict.UNRELIABLE}
