"""The natural order of names, in which numbers count as such."""

from __future__ import annotations

import re


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which pod-2 comes before pod-10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    )
