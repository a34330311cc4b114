"""Tells whose arithmetic, or whose rules, differ from the job's: equal bits need the same."""

from __future__ import annotations

from collections.abc import Mapping

from mainstay_core.coordinator.events import Announce
from mainstay_core.wire import rules


def difference_of(ours: dict[str, str] | None, theirs: Mapping[str, str]) -> str:
    """Return in words how two trainers differ in arithmetic or rules; empty if they agree."""
    if ours is None:
        return ""
    return ", ".join(
        _difference(key, ours.get(key, "none"), theirs.get(key, "missing"))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    )


def _difference(key: str, ours: str, theirs: str) -> str:
    told = f"{key} is {theirs}, the job has {ours}"
    if key == rules.KEY:
        return f"{told}: trainers of this release decide otherwise than the job's"
    return told


def refusal(name: str, difference: str) -> Announce:
    """Return the announcement that a trainer is refused because its arithmetic is not the job's."""
    message = f"trainer {name} is refused, equal bits need equal arithmetic: {difference}"
    return Announce(code="FingerprintRefused", message=message, warning=True)
