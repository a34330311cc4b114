"""``mainstay snapshots plan``: tables for people, JSON, and one message for what cannot be used."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mainstay_cli.base.entry import run_app
from mainstay_cli.commands.main import app
from mainstay_core.base import codec
from mainstay_core.theory import paper_jobs

pytestmark = pytest.mark.slow  # some start a process of the command line


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mainstay_cli.commands.main", "snapshots", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def plan_here(*arguments: str) -> int:
    """Run the same in this process, which has imported what it needs; return the exit code."""
    before = signal.getsignal(signal.SIGINT)
    try:
        run_app(app, ["snapshots", "plan", *arguments], "mainstay")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def test_all_policies_of_a_job_are_listed_for_each_mean_time() -> None:
    shown = run_plan("--model", "GPT-MoE", "--mtbf", "1h, 10m", "--runs", "2")

    assert shown.returncode == 0
    assert shown.stdout.startswith("GPT-MoE: 7.3 billion parameters on 96 accelerators")
    assert "a failure every 10m, 2 runs of 12 h" in shown.stdout
    for policy in ("CheckFreq", "Gemini, oracle", "MoC", "MoEvement", "ours, as built"):
        assert shown.stdout.count(f"\n  {policy} ") == 2


def test_a_profile_and_a_trace_of_ones_own_are_forecast(tmp_path: Path) -> None:
    profile, trace = tmp_path / "job.json", tmp_path / "failures.csv"
    profile.write_text(codec.dumps(paper_jobs.TABLE_3["DeepSeek-MoE"]))
    trace.write_text("time_s\n1000\n9000\n99999\n")

    shown = run_plan("--profile", str(profile), "--trace", str(trace), "--hours", "6", "--json")

    assert shown.returncode == 0
    found = json.loads(shown.stdout)
    assert found["job"]["name"] == "DeepSeek-MoE"
    assert found["needs"]["window"] == 6
    (forecast,) = found["forecasts"]
    assert forecast["mtbf_s"] == 10_800
    assert [policy["policy"] for policy in forecast["policies"]][-1] == "ours, as built"
    assert all(0.5 < policy["ettr"] < 1 for policy in forecast["policies"])


def test_the_papers_numbers_are_printed_beside_ours() -> None:
    shown = run_plan("--paper")

    assert shown.returncode == 0
    for title in ("Figure 6", "Table 6", "Table 3", "Table 7", "Figure 10", "Figure 16"):
        assert f"\n{title}" in f"\n{shown.stdout}"
    assert "TOO FAR OFF" not in shown.stdout
    assert "lie as near as they must" in shown.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("time_s\n5\nnever\n", "trace line 3: time_s is 'never', must be a number of seconds"),
        ("5\n", "trace line 1: is '5', must be a heading that names the column time_s"),
        ("time_s\n99999\n", "has no failure in the 12 h of --hours"),
    ],
)
def test_a_bad_trace_is_one_message_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, message: str
) -> None:
    trace = tmp_path / "failures.csv"
    trace.write_text(lines)

    assert plan_here("--trace", str(trace)) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"mainstay: {trace}: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "GPT-5"), "--model is 'GPT-5', must be one of MoE-LLaVa, GPT-MoE"),
        (("--mtbf", "10"), "--mtbf has '10', must be durations above 0 like 2h,30m,90s"),
        (("--mtbf", "0s"), "--mtbf has '0s', must be durations above 0"),
        (("--mtbf", "1s", "--hours", "9999"), "--mtbf has '1s'"),
        (("--paper", "--model", "GPT-MoE"), "--paper has the paper's own jobs; leave --model out"),
        (
            ("--paper", "--json", "--mtbf", "1h", "--hours", "6"),
            "--paper has the paper's own jobs; leave --mtbf, --hours out",
        ),
        (
            ("--trace", "failures.csv", "--seed", "3"),
            "--trace has the failures of one run; leave --seed out",
        ),
        (("--model", "GPT-MoE", "--profile", "x"), "--model and --profile name one job each"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert plan_here(*arguments) == 2
    assert f"mainstay: {message}" in capsys.readouterr().err
