import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mainstay_cli.base import comparison
from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands.main import app

REPORT: dict[str, Any] = {
    "digests": {
        "final": {"params": "p", "masters": "m", "optimizer": "o", "data": "d"},
        "steps": [
            {"step": 0, "gradient": "g0", "masters": "m0", "data": "d0"},
            {"step": 1, "gradient": "g1", "masters": "m1", "data": "d1"},
        ],
    },
    "recoveries": [],
}


def changed(step: int | None, key: str) -> dict[str, Any]:
    other = copy.deepcopy(REPORT)
    part = other["digests"]["final"] if step is None else other["digests"]["steps"][step]
    part[key] = "x"
    return other


def test_reports_with_equal_digests_do_not_differ_whatever_else_they_say() -> None:
    assert comparison.compare_reports(REPORT, REPORT | {"recoveries": [1]}) == []


def test_the_first_differing_step_comes_first() -> None:
    other = changed(1, "masters")
    other["digests"]["final"]["masters"] = "y"
    first, last = comparison.compare_reports(REPORT, other)
    assert str(first) == "step 1: masters: m1 != x"
    assert str(last) == "final state: masters: m != y"


def test_a_missing_step_and_a_missing_final_are_differences() -> None:
    other = copy.deepcopy(REPORT)
    del other["digests"]["steps"][1]
    other["digests"]["final"] = None
    assert [str(difference) for difference in comparison.compare_reports(REPORT, other)] == [
        "step 1: committed steps: 2 != 1",
        "final state: digests: present != absent",
    ]


def test_a_step_that_one_ledger_lacks_is_named_and_the_others_are_compared() -> None:
    whole = {"digests": {"final": {"masters": "m"}, "steps": ["a", "b", "c"]}}
    holed = {"digests": {"final": {"masters": "m"}, "steps": ["a", None, "c"]}}
    assert [str(difference) for difference in comparison.compare_reports(holed, whole)] == [
        "step 1: digest: not in the ledger != b"
    ]


def test_diff_exits_with_0_for_equal_and_1_for_different(tmp_path: Path) -> None:
    for name, content in (("a", REPORT), ("b", REPORT), ("c", changed(0, "gradient"))):
        (tmp_path / name).write_text(json.dumps(content))
    run = CliRunner().invoke
    same = run(app, ["report", "diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert (same.exit_code, same.stdout) == (0, "equal: 2 steps and the final state, bit for bit\n")
    other = run(app, ["report", "diff", str(tmp_path / "a"), str(tmp_path / "c")])
    assert other.exit_code == 1
    assert "first difference: step 0: gradient: g0 != x" in other.stdout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "nonsense",
        '{"digests": []}',
        '{"digests": {"steps": 1}}',
        '{"digests": {"final": "x"}}',
        '{"digests": {}, "steps": 1}',
        '{"digests": {}, "steps": {"first": "x"}}',
        '{"digests": {}, "approximate_since": "x"}',
        '{"digests": {}, "lineage": ["x"]}',
        '{"digests": {}, "lineage": "x"}',
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(UsageError):
        comparison.load_report(tmp_path / "r")


def forked(since: int, stage: int) -> dict[str, Any]:
    reason = f"stage {stage} is made anew"
    fork = {"version": since, "chain": "c", "made": {"positions": [], "reason": reason}}
    course = {"approximate_since": since, "lineage": {"num_forks": 1, "forks": [fork]}}
    return copy.deepcopy(REPORT) | course


def test_histories_come_first() -> None:
    other = forked(1, 2)
    other["digests"]["steps"][1]["masters"] = "x"
    first, second = comparison.compare_reports(REPORT, other)
    assert str(first) == (
        "history: exact != approximate since step 1 (step 1: stage 2 is made anew)"
    )
    assert str(second) == "step 1: masters: m1 != x"
    assert comparison.compare_reports(forked(1, 2), forked(1, 2)) == []
    assert len(comparison.compare_reports(forked(1, 2), forked(1, 3))) == 1


def course(*versions: int, num_forks: int, digest: str = "") -> dict[str, Any]:
    """A report of forks after the first steps, of which the store knows some of the newest."""
    report = forked(1, 2)
    (fork,) = report["lineage"]["forks"]
    forks = [fork | {"version": version} for version in versions]
    report["lineage"] = {"num_forks": num_forks, "forks": forks}
    if digest:
        report["digests"]["final"] |= {"history": digest, "approximate_since": 1}
    return report


@pytest.mark.parametrize("digest", ["", "h"])
def test_a_run_whose_store_has_lost_older_forks_is_no_other_run(digest: str) -> None:
    whole = course(1, 5, 9, num_forks=3, digest=digest)
    for versions in ((5, 9), (9,), ()):
        lost = course(*versions, num_forks=3, digest=digest)
        assert comparison.compare_reports(whole, lost) == []
        assert comparison.compare_reports(lost, whole) == []
    unknown = course(num_forks=0, digest=digest)
    assert comparison.compare_reports(whole, unknown) == []


def test_forks_that_both_reports_know_and_their_number_are_compared() -> None:
    one = course(5, 9, num_forks=3)
    (newest,) = comparison.compare_reports(one, course(8, num_forks=3))
    assert str(newest) == (
        "history: approximate since step 1 (1 earlier: not known in full here; step 5: stage 2 is "
        "made anew; step 9: stage 2 is made anew) != approximate since step 1 (2 earlier: not "
        "known in full here; step 8: stage 2 is made anew)"
    )
    (number,) = comparison.compare_reports(one, course(5, 9, num_forks=2))
    assert str(number).startswith("history: approximate since step 1 (1 earlier: not known")


def test_the_digest_of_the_history_decides_where_both_runs_have_ended() -> None:
    """The store of one has learnt late of the newest fork: it counts one less."""
    late = course(1, num_forks=1, digest="h")
    assert comparison.compare_reports(course(1, 5, num_forks=2, digest="h"), late) == []
    (other,) = comparison.compare_reports(late, course(1, num_forks=1, digest="x"))
    assert str(other) == "final state: digest of the history: h != x"


def test_diff_prints_the_history_before_the_first_step_that_differs(tmp_path: Path) -> None:
    other = forked(1, 2)
    other["digests"]["steps"][0]["masters"] = "x"
    for name, content in (("exact", REPORT), ("approximate", other)):
        (tmp_path / name).write_text(json.dumps(content))
    told = CliRunner().invoke(
        app, ["report", "diff", str(tmp_path / "exact"), str(tmp_path / "approximate")]
    )
    assert told.exit_code == 1
    first, second = told.stdout.splitlines()
    assert first == (
        "first difference: history: exact != approximate since step 1 (step 1: stage 2 is made "
        "anew)"
    )
    assert second.strip() == "step 0: masters: m0 != x"


def test_a_lineage_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT | {"lineage": {"forks": [{"version": -1}]}}))
    with pytest.raises(UsageError, match=r"not understood: report\.lineage\.forks\[0\]\.version"):
        comparison.load_report(path)


def test_reports_that_are_approximate_in_the_same_way_are_equal_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(forked(1, 2)))
    told = CliRunner().invoke(app, ["report", "diff", str(path), str(path)])
    assert told.exit_code == 0
    assert told.output.endswith("bit for bit; both approximate since step 1\n")


def test_nothing_is_called_equal_that_neither_report_has(tmp_path: Path) -> None:
    def said(**digests: Any) -> str:
        report = {"digests": {"final": None, "steps": []} | digests}
        return comparison.describe_equality(report, report)

    assert said(steps=["a"]) == "equal: 1 step, bit for bit; neither run has a final state"
    assert said(steps=["a", None], final={"masters": "m"}) == (
        "equal: 1 step (1 more are in neither ledger) and the final state, bit for bit"
    )
    with pytest.raises(UsageError, match="nothing to compare"):
        said()
    with pytest.raises(UsageError, match="nothing to compare"):
        said(steps=[None])
