"""Keeps generated files as their sources describe them: what differs is written, or only named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def keep(texts: Mapping[Path, str], problem: str, *, check: bool) -> int:
    """Write the files that differ, or with ``check`` say which do; return the exit code.

    Args:
        texts: what each file has to hold.
        problem: what is wrong with one that differs, and what to run.
        check: write nothing.
    """
    differing = [p for p, text in texts.items() if not p.is_file() or p.read_text() != text]
    for path in differing:
        shown = path.relative_to(ROOT)
        if check:
            print(f"{shown}: {problem}")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
        print(f"{shown}: written")
    return 1 if check and differing else 0
