"""The experiments about stages made anew: they run, and go on where they were stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *more: str, steps: int = 12) -> str:
    tiny = ["--quick", "--seeds=2", f"--steps={steps}", "--dim=16", "--sequence=16", "--data=docs"]
    done = subprocess.run(
        [sys.executable, "benchmarks/approximate.py", str(folder), *tiny, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "report.md").read_text()


@pytest.mark.chaos
@pytest.mark.slow
def test_the_experiment_says_whether_it_can_tell_and_takes_up_its_curves(tmp_path: Path) -> None:
    parts = "--parts=check,figure2"
    report = run(tmp_path, parts, "--seeds=1", "--rates=0.02,0.05,0.1")
    curves = {path.name: path.read_text() for path in (tmp_path / "curves").glob("*.json")}

    assert "CANNOT tell" in report, "twelve steps of a tiny model tell nothing"
    assert "| random |" in report
    assert "| average by squared gradient norms |" in report
    assert "Not run: stale copy of 100 steps" in report
    assert (tmp_path / "figure-2.svg").read_text().startswith("<svg")

    first, *others = sorted(curves)
    (tmp_path / "curves" / first).unlink()
    changed = {name: (tmp_path / "curves" / name).stat().st_mtime_ns for name in others}
    assert run(tmp_path, parts, "--seeds=1", "--rates=0.02,0.05,0.1") == report

    found = json.loads((tmp_path / "curves" / first).read_text())["found"]
    assert found == json.loads(curves[first])["found"]
    assert changed == {name: (tmp_path / "curves" / name).stat().st_mtime_ns for name in others}


@pytest.mark.chaos
def test_all_parts_run_and_what_is_missing_is_named(tmp_path: Path) -> None:
    rates = "--rates=0.01,0.03,0.06"
    report = run(tmp_path, rates, steps=24)

    assert "## Not run" not in report
    for figure in ("2", "3", "4a", "4b", "5b"):
        assert (tmp_path / f"figure-{figure}.svg").read_text().startswith("<svg")
    for method in ("checkpoint restart", "redundant computation", "CheckFree", "CheckFree+"):
        assert f"| {method}" in report
    assert report.count("English") == 2, "a row of table 3, and a claim"

    kept = run(tmp_path, rates, "--seeds=3", "--kept", steps=24)
    assert "## Not run" in kept
    assert "- CheckFree+, Swapped, model seed 0, rate 0.06, losses' seed 2" in kept
