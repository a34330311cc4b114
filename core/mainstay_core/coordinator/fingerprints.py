"""Tells whose arithmetic differs from the job's: equal bits need equal arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

from mainstay_core.coordinator.events import Announce


def difference_of(ours: dict[str, str] | None, theirs: Mapping[str, str]) -> str:
    """Return in words how two numerics fingerprints differ; empty if they agree."""
    if ours is None:
        return ""
    return ", ".join(
        f"{key} is {theirs.get(key, 'missing')}, the job has {ours.get(key, 'none')}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    )


def refusal(name: str, difference: str) -> Announce:
    """Return the announcement that a trainer is refused because its arithmetic is not the job's."""
    message = f"trainer {name} is refused, equal bits need equal arithmetic: {difference}"
    return Announce(code="FingerprintRefused", message=message, warning=True)
