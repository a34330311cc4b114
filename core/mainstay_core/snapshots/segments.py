"""Groups lost stages into the segments that are replayed together.

Neighbouring lost stages form one segment: nobody is left who has logged what crossed the border
between them, so they compute it again together. Segments that do not touch are replayed apart and
at the same time. A loss during a replay enlarges the segment that it touches, which starts again,
and leaves the others alone (MoEvement, arXiv 2412.15411, appendix A).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import MAX_MEMBERS, Index, Longest


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Segment:
    """Consecutive stages, all of them lost."""

    first: Index
    last: Index

    @property
    def stages(self) -> range:
        """Its stages, ascending."""
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return (
            f"stage {self.first}"
            if self.first == self.last
            else (f"stages {self.first} to {self.last}")
        )


Segments = Annotated[tuple[Segment, ...], Longest(MAX_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """The segments after a loss in the middle of replays."""

    going_on: Segments
    """Segments whose replays the loss does not touch."""
    begun: Segments
    """Segments whose replays start now: new ones, and enlarged or hit ones from their beginning."""


def find_segments(lost_stages: Iterable[int]) -> tuple[Segment, ...]:
    """Return lost stages as segments that do not touch, ascending."""
    found: list[Segment] = []
    for stage in sorted(set(lost_stages)):
        if found and found[-1].last == stage - 1:
            found[-1] = Segment(first=found[-1].first, last=stage)
        else:
            found.append(Segment(first=stage, last=stage))
    return tuple(found)


def note_loss(running: Iterable[Segment], lost_stages: Iterable[int]) -> Cascade:
    """Return which replays go on and which begin, after more stages were lost.

    Args:
        running: segments whose replays run.
        lost_stages: that were lost since; a stage of a running segment may be lost again.
    """
    running, lost = set(running), set(lost_stages)
    segments = find_segments([*lost, *(stage for segment in running for stage in segment.stages)])
    going_on = [s for s in segments if s in running and lost.isdisjoint(s.stages)]
    return Cascade(going_on=tuple(going_on), begun=tuple(s for s in segments if s not in going_on))
