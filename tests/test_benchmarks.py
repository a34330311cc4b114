"""Every benchmark can be started by the command that its first lines give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
IMPORT_EACH = """
import importlib, sys
path = sys.path
for name in sys.argv[2:]:
    # What one of them has added helps no other.
    for known in [m for m in sys.modules if m.partition(".")[0] in ("support", "benchmarks")]:
        del sys.modules[known]
    sys.path = [sys.argv[1], *path]
    importlib.import_module(name)
"""


def test_every_benchmark_finds_what_it_imports() -> None:
    """By itself, as `python benchmarks/NAME.py` does: without the path that tests have."""
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert names
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_EACH, str(BENCHMARKS), *names],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
