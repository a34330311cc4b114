"""``mainstay dmr``: tables for people, plans as files, and one message for what cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mainstay_cli.base.exits import ExitCode, UsageError
from mainstay_cli.commands import dmr
from mainstay_cli.local import torch_process
from mainstay_core.base import codec
from mainstay_core.dmr.plan import Policy, read_plan
from mainstay_core.wire.profiling import ProfileAnswer, ProfileQuestion
from mainstay_train.dmr import answer

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "dmr-profile.json"


def test_degrees_of_recompute_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(EXAMPLE.read_text())
    none, other = tmp_path / "none.json", tmp_path / "other.json"
    none.write_text(json.dumps(data | {"ac_segments": []}))
    other.write_text(json.dumps(data | {"stage": data["stage"] + 1}))

    dmr.plan(EXAMPLE, sweep=[none])

    heading, first, second, best = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "profile", "recomputed", "operators", "again", "exposed", "passage", "retained",
    ]  # fmt: skip
    assert [line.split()[0] for line in (first, second)] == [str(EXAMPLE), str(none)]
    assert [line.split()[1] for line in (first, second)] == ["9", "0"]
    assert first.split()[4:6] == ["9", "s"], "nine operators of a second each run again"
    assert best.startswith("shortest with its checks: ")
    with pytest.raises(UsageError, match=r"other\.json has stage 1, must have 0 as"):
        dmr.plan(EXAMPLE, sweep=[other])
    with pytest.raises(UsageError, match="leave --json and --out away"):
        dmr.plan(EXAMPLE, sweep=[none], as_json=True)


def test_a_plan_is_shown_written_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"

    dmr.plan(EXAMPLE, out=out)
    shown = capsys.readouterr().out
    dmr.explain(out, EXAMPLE)
    explained = capsys.readouterr().out
    dmr.explain(out, EXAMPLE, operator="0/forward/0")
    alone = capsys.readouterr().out

    assert "P               9   9 s  25.0%  the recompute is the second execution" in shown
    assert "exposed: 12 s a passage (33.3% of its operators)" in shown
    assert "(F4), 1 s: no later window has time and memory left for it" in shown
    assert explained == shown
    assert alone.startswith("0/forward/0 (F1), 1 s: P, the recompute is the second execution\n")
    assert "compared: A1 (by digest)" in alone


def test_a_plan_as_json_is_the_one_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"

    dmr.plan(EXAMPLE, policy=Policy.PAPER, budget="6", out=out, as_json=True)

    assert capsys.readouterr().out == out.read_text()
    plan = read_plan(out.read_text())
    assert (plan.policy, plan.budget_bytes) == (Policy.PAPER, 6)


def refusal(path: Path, *, plan: Path | None = None, budget: str | None = None) -> str:
    def run() -> None:
        if plan is None:
            dmr.plan(path, budget=budget)
        else:
            dmr.explain(plan, path)

    with pytest.raises(UsageError) as error:
        run()
    assert error.value.code is ExitCode.USAGE
    return str(error.value)


def test_what_cannot_be_used_is_refused_by_the_field(tmp_path: Path) -> None:
    torn, foreign, plan = tmp_path / "torn.json", tmp_path / "foreign.json", tmp_path / "plan.json"
    torn.write_text(EXAMPLE.read_text()[:500])
    profile = json.loads(EXAMPLE.read_text())
    foreign.write_text(json.dumps(profile | {"fingerprint": "other"}))
    dmr.plan(EXAMPLE, out=plan)

    missing = tmp_path / "missing.json"
    assert refusal(missing) == f"PROFILE: {missing} cannot be read: No such file or directory"
    assert refusal(EXAMPLE, plan=missing).startswith(f"PLAN: {missing} cannot be read")
    assert refusal(torn).startswith(f"{torn}: profile: not JSON")
    assert "plan.kind: is 'mainstay-dmr-profile'" in refusal(EXAMPLE, plan=EXAMPLE)
    assert "profile.kind: is 'mainstay-dmr-plan'" in refusal(plan)
    assert "of the fingerprint figure-9, the profile of other" in refusal(foreign, plan=plan)
    assert refusal(EXAMPLE, budget="6x").startswith("--budget: is '6x', must be an amount")
    assert "must be at most" in refusal(EXAMPLE, budget="99E")

    written = json.loads(plan.read_text())
    written["pieces"][0]["comparisons"].pop()
    plan.write_text(json.dumps(written))
    assert "leaves its piece" in refusal(EXAMPLE, plan=plan)
    dmr.plan(EXAMPLE, out=plan)
    with pytest.raises(UsageError, match="'9/forward/9', must be one of the profile's, like 0/f"):
        dmr.explain(plan, EXAMPLE, operator="9/forward/9")


@pytest.mark.slow  # it starts a process of the command line
def test_the_command_line_ends_with_one_message_and_its_exit_code() -> None:
    command = [sys.executable, "-m", "mainstay_cli.commands.main", "dmr", "plan"]
    command += [str(EXAMPLE), "--budget", "much"]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("mainstay: --budget: is 'much', must be an amount")
    assert len(ended.stderr.splitlines()) == 1


def test_the_checks_of_a_job_are_shown_by_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"stage": 1, "plan": "Auto", "shares": "P 60 %, inter 40 %", "reason": "planned"}
    report: dict[str, Any] = {"dmr_coverage": "stage 1: P 60 %, inter 40 %", "checks": [told]}

    class Ended:
        name, job = "demo", "uid"

        def is_running(self) -> bool:
            return False

        def load_report(self) -> dict[str, Any]:
            return report

        def describe_place(self) -> dict[str, str]:
            return {"state_dir": "/d"}

    monkeypatch.setattr(dmr.runs, "find", lambda _: Ended())
    dmr.show("demo")
    assert capsys.readouterr().out == "stage 1: plan Auto, P 60 %, inter 40 %\n  planned\n"
    dmr.show("demo", as_json=True)
    assert json.loads(capsys.readouterr().out)["stages"] == [told]
    report = {"dmr_coverage": "naive 100 %"}
    dmr.show("demo")
    assert capsys.readouterr().out == "checks: naive 100 %\n"
    report = {"state": "complete"}
    dmr.show("demo")
    assert capsys.readouterr().out.startswith("nothing is checked: ")
    report = {}
    with pytest.raises(UsageError, match="without a report"):
        dmr.show("demo")


def record(job: Path, out: Path, *, stage: int = 0, way: str = "whole") -> None:
    dmr.profile(job, out=out, stage=stage, way=way, steps=1, window_s=0.001, budget="1Mi")


@pytest.mark.slow  # it starts a process with torch
def test_a_stage_of_a_job_is_profiled_planned_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plan = tmp_path / "profile.json", tmp_path / "plan.json"

    record(EXAMPLE.parent / "llama-tiny.yaml", out)
    recorded = capsys.readouterr().out
    dmr.plan(out, out=plan)
    planned = capsys.readouterr().out
    dmr.explain(plan, out)

    assert capsys.readouterr().out == planned
    assert recorded.startswith(f"wrote {out}\nstage 0: ")
    assert "waits, as they were told: RECV_B 1 ms" in recorded
    assert "again in a wait for another stage or replica" in planned


@pytest.mark.parametrize(
    ("example", "spec", "message"),
    [
        ("quickstart.yaml", ("parallelism", "stages", 2), "--stage: is 2, must be between 0 and 1"),
        ("quickstart.yaml", ("pipeline", "microBatches", 1), "--way: is 'x', must be whole: so"),
        (
            "quickstart.yaml",
            ("pipeline", "order", "Swapped"),
            "--way: is 'x', must be whole or embedding-layers: so micro-batches pass stage 0 with",
        ),
        ("own-loop.yaml", None, "is a training loop of its own"),
        ("quickstart.yaml", ("runtime", "compile", "Blocks"), "spec.runtime.compile: is Blocks"),
    ],
)
def test_what_cannot_be_profiled_is_refused_by_the_field(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    example: str,
    spec: tuple[str, str, object] | None,
    message: str,
) -> None:
    def ask(
        module: str,
        question: ProfileQuestion,
        search_path: tuple[Path, ...],
        kind: type[ProfileAnswer],
        **_words: str,
    ) -> ProfileAnswer:
        """What the process answers, in this one."""
        assert module == answer.__name__
        monkeypatch.syspath_prepend(str(search_path[0]))
        read = codec.loads(ProfileQuestion, codec.dumps(question))
        return codec.loads(kind, codec.dumps(answer.answer(read, time.perf_counter)))

    monkeypatch.setattr(torch_process, "ask", ask)
    manifest = yaml.safe_load((EXAMPLE.parent / example).read_text())
    if spec is not None:
        section, field, value = spec
        manifest["spec"].setdefault(section, {})[field] = value
    job = EXAMPLE.parent / example if spec is None else tmp_path / "job.yaml"
    if spec is not None:
        job.write_text(yaml.safe_dump(manifest))

    stage, way = 2 * ("--stage" in message), "x" if "--way" in message else "whole"
    with pytest.raises(UsageError) as error:
        record(job, tmp_path / "out.json", stage=stage, way=way)

    assert error.value.code is ExitCode.USAGE
    assert message in str(error.value)
    assert not (tmp_path / "out.json").exists()
