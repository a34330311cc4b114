"""``mainstay chaos`` as `make chaos` runs it, and the draws that failed once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.harness import MAINSTAY

from mainstay_cli.base import comparison
from mainstay_cli.chaos import runs

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "examples" / "chaos.yaml"
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.yaml"))
BOUND_S = 300.0


def campaign(directory: Path, *options: str) -> dict[str, Any]:
    """Return the verdicts of a campaign; what failed is in its output."""
    made = directory / "chaos.json"
    command = [*MAINSTAY, "chaos", str(JOB), *options, "--ui", "plain"]
    command += ["--out", str(directory / "runs"), "--report", str(made)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    )
    sys.stdout.write(done.stdout)
    result: dict[str, Any] = json.loads(made.read_text())
    assert done.returncode == 0, done.stdout
    return result


@pytest.mark.slow
def test_a_quick_share_of_what_chaos_draws_leaves_no_trace_in_the_bits(tmp_path: Path) -> None:
    result = campaign(tmp_path, "--faults", "2", "--seed", "9", "--steps", "40")
    assert len(result["verdicts"]) == 2


@pytest.mark.chaos
@pytest.mark.timeout(3000)
def test_forty_drawn_faults_leave_no_trace_in_the_bits(tmp_path: Path) -> None:
    result = campaign(tmp_path, "--faults", "40", "--seed", "1", "--runs-of", "10")
    assert len(result["verdicts"]) == 40


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_a_draw_that_failed_once_does_not_fail_again(tmp_path: Path, path: Path) -> None:
    kept = yaml.safe_load(path.read_text())
    plain = runs.run_once(kept["job"], (), tmp_path / "undisturbed", BOUND_S, ())
    broken = runs.run_once(kept["job"], kept["faults"], tmp_path / "broken", BOUND_S, ())
    assert not plain.problem, plain.problem
    assert not broken.problem, broken.problem
    assert comparison.compare_reports(plain.report, broken.report) == []
    assert all(fault["fired"] for fault in broken.faults), broken.faults
