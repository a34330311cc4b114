"""Decides what of a full store goes, so that the window in flight finds room.

A store keeps a complete window with the logs since, and the one in flight. Where memory cannot hold
both, the older one is given up, as it would be of no use soon: its logs grow with every step, and
the first log that finds no room ends what it can make anew. If it goes at once, the window in
flight loses nothing, and the store covers its units again when that one is complete. If it stayed,
the window in flight would have a gap and never be complete.

Logs go before copies: with some of them gone the others make no newer version anew. Copies
alone are still states, from which a job that has lost everything can go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mainstay_core.wire.segments import SegmentKey, SegmentKind

COPIES = frozenset({SegmentKind.STATE, SegmentKind.COMPUTE})


class Kept(NamedTuple):
    """A segment that a store keeps, and that nobody reads."""

    key: SegmentKey
    window: int
    """First version of the window in which it was written."""


def needed_in(key: SegmentKey, window: int) -> int:
    """Return for which window older segments may go to give room to one; 0: for none.

    Args:
        key: of the segment.
        window: first version of the window in flight; 0: there is none.
    """
    return window if key.version >= window else 0


def plan_evictions(
    kept: Iterable[Kept], *, window: int, complete: int, is_broken: bool = False
) -> list[tuple[SegmentKey, ...]]:
    """Return what may go for the window in flight, in the order in which it goes.

    First copies of windows that were given up between the two, then logs of steps before the
    window in flight, then copies of the complete one. What the window in flight needs is
    never among it: its copies, and the logs since it began.

    Args:
        kept: all segments that can go, in any order.
        window: first version of the window in flight.
        complete: first version of the newest complete window.
        is_broken: whether logs since that one have gone already. Its copies make nothing anew then,
            and go first; those of windows that were given up since may be all that does.

    Returns:
        Segments that go together: of one position, the copies of a version or the logs of a
        step. With one of them gone the others are worth little. None if the window in flight is
        not newer than the complete one.
    """
    if window <= complete:
        return []
    given_up, whole = (2, 0) if is_broken else (0, 2)
    found: dict[tuple[int, int, int], list[SegmentKey]] = {}
    for key, written_in in kept:
        if key.kind not in COPIES:
            if key.version < window:
                found.setdefault((1, key.position, key.version), []).append(key)
        elif written_in < window:
            rank = given_up if written_in > complete else whole
            found.setdefault((rank, key.position, key.version), []).append(key)
    return [tuple(sorted(found[at])) for at in sorted(found)]
