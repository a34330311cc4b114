"""The experiment about stages made anew: it runs, and goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path) -> str:
    tiny = ["--quick", "--seeds=1", "--steps=12", "--dim=16", "--sequence=16", "--data=docs"]
    done = subprocess.run(
        [sys.executable, "benchmarks/approximate.py", str(folder), *tiny],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "report.md").read_text()


@pytest.mark.slow
def test_the_experiment_says_whether_it_can_tell_and_takes_up_its_curves(tmp_path: Path) -> None:
    report = run(tmp_path)
    curves = {path.name: path.read_text() for path in (tmp_path / "curves").glob("*.json")}

    assert "CANNOT tell" in report, "twelve steps of a tiny model tell nothing"
    assert "| random |" in report
    assert "| average by gradient norms |" in report
    assert "- stale copy of 100 steps: no loss is late enough" in report
    assert (tmp_path / "losses.svg").read_text().startswith("<svg")

    first, *others = sorted(curves)
    (tmp_path / "curves" / first).unlink()
    changed = {name: (tmp_path / "curves" / name).stat().st_mtime_ns for name in others}
    assert run(tmp_path) == report

    assert json.loads((tmp_path / "curves" / first).read_text()) == json.loads(curves[first])
    assert changed == {name: (tmp_path / "curves" / name).stat().st_mtime_ns for name in others}
