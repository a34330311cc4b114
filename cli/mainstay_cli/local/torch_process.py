"""Asks a process with torch one question; this command has none itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The output of a process that was asked."""

    answer: str
    """The last line: a library may have printed others. Empty if there is none."""
    last_words: str
    """The last line of what it said of errors, for people."""


def ask(module: str, question: str, search_path: Iterable[Path]) -> Reply:
    """Return what a module of the trainers' package answers.

    Args:
        module: is run as a program; it reads the question from its standard input.
        question: JSON.
        search_path: where the user's code is looked for first.
    """
    paths = [*map(str, search_path), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-m", module],
        input=question,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    return Reply(
        answer=(result.stdout.splitlines() or [""])[-1],
        last_words=(result.stderr.strip().splitlines() or ["it was killed"])[-1],
    )
