"""Pauses before what has failed is tried again: twice as long each time, up to a bound."""

from __future__ import annotations

MAX_DOUBLINGS = 30
"""Bound on the doublings, so that a large number of failures does not overflow."""


def doubled_s(first_s: float, doublings: int, max_s: float) -> float:
    """Return ``first_s`` doubled so many times, and no more than ``max_s``; all in seconds."""
    return min(max_s, first_s * 2.0 ** min(doublings, MAX_DOUBLINGS))
