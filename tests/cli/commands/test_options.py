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


def test_the_faults_of_an_ended_run_are_listed_from_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSTAY_HOME", str(tmp_path))
    record = RunRecord(
        name="demo", job="u", url="", state_dir=str(tmp_path / "demo"), pid=1, started_at_s=0.0
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "demo").mkdir()
    fields = {name: getattr(record, name) for name in record.__slots__}
    (tmp_path / "runs/demo.json").write_text(json.dumps(fields))
    ended = CliRunner().invoke(app, ["faults", "ls", "demo"])
    assert "job demo has ended without a report (see " in str(ended.exception)
    fault = {
        "id": "f", "action": "kill-pod", "replica": 1, "stage": 0, "step": 3, "state": "fired",
        "fired": {"pod": "demo-2", "slot": 0},
    }  # fmt: skip
    (tmp_path / "demo/report.json").write_text(json.dumps({"faults": [fault]}))
    listed = CliRunner().invoke(app, ["faults", "ls", "demo"])
    assert listed.output.splitlines()[1].split() == [
        "f", "kill-pod", "r1.s0.i0", "step", "3", "fired", "on", "demo-2/0",
    ]  # fmt: skip
