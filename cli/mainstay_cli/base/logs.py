"""Reads what an ended process said last."""

from __future__ import annotations

import contextlib
from pathlib import Path

MAX_CHARACTERS = 300
"""A line that is longer, a traceback in one line for example, is cut here."""


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()[:MAX_CHARACTERS]
    return "no output"
