"""Reads what a process said last."""

from __future__ import annotations

import contextlib
from pathlib import Path

MAX_CHARACTERS = 300
"""A line that is longer, a traceback in one line for example, is cut here."""
MAX_TAIL_BYTES = 65536
"""Read from the end of a log, however long it is."""


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    return last_lines(read_since(log, 0), 1) or "no output"


def last_lines(text: str, number: int) -> str:
    """Return the last lines of a text that say something, no more than ``number``."""
    lines = [line.strip()[:MAX_CHARACTERS] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-number:])


def read_since(log: Path, start: int) -> str:
    """Return what a log says from a byte on, the end of it if that is long; nothing without one."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(max(start, size_of(log) - MAX_TAIL_BYTES))
        return file.read(MAX_TAIL_BYTES).decode(errors="replace")
    return ""


def size_of(log: Path) -> int:
    """Return the number of bytes of a log; 0 without one."""
    with contextlib.suppress(FileNotFoundError):
        return log.stat().st_size
    return 0
