"""Options that would have no effect beside others are refused by name, never ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mainstay_cli.base.exits import UsageError
from mainstay_cli.base.state_dir import RunRecord
from mainstay_cli.commands.main import app

ROOT = Path(__file__).parents[3]
CHAOS = ["chaos", str(ROOT / "examples/chaos.yaml")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sim", "--trace"], "--trace: prints the events of one seed; name it with --seed"),
        (["sim", "--seed", "1", "--seeds", "0:2"], "give one of them"),
        (["sim", "--seeds", "5:3"], "'5:3', which are no seeds; FIRST must be below END"),
        (["sim", "--faults", "kil"], "--faults has kil, must be all, none or of "),
        (
            ["faults", "inject", "x", "-f", "f.yaml", "--at-step", "4", "--flip", "bit=1"],
            "--file says all of its faults; leave --at-step, --flip out",
        ),
        (
            [*CHAOS, "--flips", "3", "--only", "g1", "--out", "x"],
            "--only, --out would have no effect with --flips",
        ),
        ([*CHAOS, "--faults-file", "f.yaml", "--run", "2"], "--run would have no effect with"),
        ([*CHAOS, "--report", str(ROOT)], f"--report: {ROOT} is a directory; name a file"),
    ],
)
def test_an_option_without_effect_is_refused(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for the report of a run that has ended."""
    monkeypatch.setenv("MAINSTAY_HOME", str(tmp_path))
    record = RunRecord(
        name="demo", job="u", url="", state_dir=str(tmp_path / "demo"), pid=1, started_at_s=0.0
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "demo").mkdir()
    fields = {name: getattr(record, name) for name in record.__slots__}
    (tmp_path / "runs/demo.json").write_text(json.dumps(fields))
    return tmp_path / "demo/report.json"


def test_the_faults_of_an_ended_run_are_listed_from_its_report(report: Path) -> None:
    ended = CliRunner().invoke(app, ["faults", "ls", "demo"])
    assert "job demo has ended without a report (see " in str(ended.exception)
    fault = {
        "id": "f", "action": "kill-pod", "replica": 1, "stage": 0, "step": 3, "state": "fired",
        "fired": {"pod": "demo-2", "slot": 0},
    }  # fmt: skip
    report.write_text(json.dumps({"faults": [fault]}))
    listed = CliRunner().invoke(app, ["faults", "ls", "demo"])
    assert listed.output.splitlines()[1].split() == [
        "f", "kill-pod", "r1.s0.i0", "step", "3", "fired", "on", "demo-2/0",
    ]  # fmt: skip


SHOWING = (["status"], ["timeline"], ["lineage"], ["findings"], ["faults", "ls"], ["dmr", "show"])


@pytest.mark.parametrize("command", SHOWING)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a report of mainstay: expected a JSON object, got list"),
        ("4", "not a report of mainstay: expected a JSON object, got int"),
        ("{", "not JSON: "),
        ('{"state": 1}', "not understood: report.state: expected str, got int"),
        ('{"steps": []}', "not understood: report.steps: expected an object, got list"),
        ('{"steps": {"committed": "x"}}', "report.steps.committed: expected int, got str"),
        ('{"approximate_since": "x"}', "report.approximate_since: expected int, got str"),
        ('{"lineage": ["x"]}', "report.lineage: expected an object, got list"),
        ('{"lineage": {"forks": [{}]}}', "report.lineage.forks[0].version: missing"),
        ('{"crash": "x"}', "report.crash: expected an object, got str"),
        ('{"protections": [{}]}', "report.protections[0].name: missing"),
        ('{"tainted": ["x"]}', "report.tainted[0]: expected an object, got str"),
        ('{"findings": [1]}', "report.findings: expected an object, got list"),
        ('{"recoveries": {"a": 1}}', "report.recoveries: expected a list, got dict"),
        ('{"recoveries": [{}]}', "report.recoveries[0].fault: missing"),
        ('{"events": [{"at_s": 1e12}]}', "report.events[0].at_s: 1000000000000.0 is not between"),
        ('{"faults": ["x"]}', "report.faults[0]: expected an object, got str"),
        (
            '{"faults": [{"id": "f", "action": "kill-pod", "step": 1, "state": "over"}]}',
            "report.faults[0]: has no target: replica and stage, spare, or process",
        ),
        ('{"checks": [{"stage": "x"}]}', "report.checks[0].stage: expected int, got str"),
    ],
)
def test_a_report_that_is_none_is_refused_by_its_file_and_field(
    report: Path, command: list[str], text: str, said: str
) -> None:
    report.write_text(text)
    shown = CliRunner().invoke(app, [*command, "demo"])
    assert isinstance(shown.exception, UsageError)
    assert str(shown.exception).startswith(f"{report}: ")
    assert said in str(shown.exception)
