"""Holds the segments that one store keeps, by key, and finds those that no key finds any more.

A bit that flips in a key leaves its segment where it was in the table, but a search for the key as
it was written does not come to it, nor does one for the key as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mainstay_core.segments.spans import Span
from mainstay_core.wire.segments import (
    MAX_HELD_STATES,
    MAX_RUNS,
    Holder,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    UnitHeld,
    runs_of,
)

UnitKey = tuple[int, int]
"""(position, unit)"""


@dataclass(slots=True, eq=False)
class Segment:
    """A segment whose bytes are all there."""

    header: SegmentHeader
    span: Span
    holders: tuple[Holder, ...] = ()
    """Stores that were to keep it, the writer's first; empty if that is not known."""
    num_readers: int = 0
    """How many read or send its bytes now."""
    is_kept: bool = True
    """Whether the index has it; else its place goes with its last reader."""
    is_doubted: bool = False
    """Whether a reader or a check has found it damaged, or void. It covers nothing."""


@dataclass(slots=True)
class UnitSegments:
    """The segments of one unit."""

    unit_name: str
    num_units: int
    segments: dict[SegmentKey, Segment] = field(default_factory=dict)

    def told(self, place: UnitKey) -> UnitHeld:
        """Return what a report says of the unit: the newest versions and steps."""
        versions: dict[SegmentKind, list[int]] = {kind: [] for kind in SegmentKind}
        for key in sorted(self.segments):
            versions[key.kind].append(key.version)
        return UnitHeld(
            position=place[0],
            unit=place[1],
            unit_name=self.unit_name,
            num_units=self.num_units,
            states=tuple(versions[SegmentKind.STATE][-MAX_HELD_STATES:]),
            gradients=tuple(runs_of(versions[SegmentKind.GRADIENT])[-MAX_RUNS:]),
            computes=tuple(runs_of(versions[SegmentKind.COMPUTE])[-MAX_RUNS:]),
        )


def take_lost(
    table: dict[SegmentKey, Segment], find: Callable[[SegmentKey], Segment | None]
) -> list[tuple[SegmentKey, Segment]]:
    """Take the segments out of a table that the keys in their headers do not find.

    Args:
        table: some of what a store keeps.
        find: returns what the store finds by a key.

    Returns:
        Each with the key that the table had it under.
    """
    # A dict may find the very object that is its key also by a hash that is not the key's any more.
    # Whoever reads has an object of its own.
    lost = [(key, s) for key, s in table.items() if find(replace(s.header.key)) is not s]
    if lost:
        gone = {id(segment) for _, segment in lost}
        left = {key: segment for key, segment in table.items() if id(segment) not in gone}
        table.clear()
        table.update(left)
    return lost
