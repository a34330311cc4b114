"""Numerics fingerprints: equal bits need equal arithmetic (design section 1, rule 6)."""

from __future__ import annotations

from collections.abc import Mapping


def fingerprint_difference(ours: dict[str, str] | None, theirs: Mapping[str, str]) -> str:
    """Return what differs in a numerics fingerprint, in words; empty if nothing does."""
    if ours is None:
        return ""
    return ", ".join(
        f"{key} is {theirs.get(key, 'missing')}, the job has {ours.get(key, 'none')}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    )
