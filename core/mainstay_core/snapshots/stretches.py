"""Groups lost stages into the stretches that are replayed together.

Neighbouring lost stages form one stretch: nobody is left who has logged what crossed the border
between them, so they compute it again together. Stretches that do not touch are replayed apart and
at the same time. A loss during a replay enlarges the stretch that it touches and leaves the others
as they are (MoEvement, arXiv 2412.15411, appendix A): each settle finds them anew.

A stage with several inner ranks is lost as soon as nobody holds the state of one of them: its ranks
compute with each other, so all of them compute the steps again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mainstay_core.base.bounds import Index
from mainstay_core.wire.segments import SegmentKind

Border = tuple[int, SegmentKind]
"""(position of the sender, what it sends)"""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stretch:
    """Consecutive stages, all of them lost."""

    first: Index
    last: Index

    @property
    def stages(self) -> range:
        """Its stages, ascending."""
        return range(self.first, self.last + 1)

    def positions(self, ranks_per_stage: int) -> range:
        """Return the positions of its stages, ascending: by stage, then by inner rank."""
        return range(self.first * ranks_per_stage, (self.last + 1) * ranks_per_stage)

    def __str__(self) -> str:
        return (
            f"stage {self.first}"
            if self.first == self.last
            else (f"stages {self.first} to {self.last}")
        )


def find_stretches(lost_stages: Iterable[int]) -> tuple[Stretch, ...]:
    """Return lost stages as stretches that do not touch, ascending."""
    found: list[Stretch] = []
    for stage in sorted(set(lost_stages)):
        if found and found[-1].last == stage - 1:
            found[-1] = Stretch(first=found[-1].first, last=stage)
        else:
            found.append(Stretch(first=stage, last=stage))
    return tuple(found)


def find_stretch(lost_positions: Iterable[int], position: int, ranks_per_stage: int) -> Stretch:
    """Return the stretch of a lost position.

    Args:
        lost_positions: whose state nobody holds; the position counts as one of them.
        position: that is asked for.
        ranks_per_stage: inner ranks of each stage.
    """
    stages = {lost // ranks_per_stage for lost in (position, *lost_positions)}
    return next(s for s in find_stretches(stages) if position // ranks_per_stage in s.stages)


def borders_of(stretch: Stretch, num_stages: int, ranks_per_stage: int = 1) -> list[Border]:
    """Return who sends what crosses a stretch's borders: nothing at the pipeline's ends.

    Each inner rank of a stage sends to the same inner rank of the next one.

    Args:
        stretch: between the borders.
        num_stages: of the pipeline.
        ranks_per_stage: inner ranks of each stage.
    """
    beside = []
    if stretch.first > 0:
        beside.append((stretch.first - 1, SegmentKind.ACTIVATION))
    if stretch.last < num_stages - 1:
        beside.append((stretch.last + 1, SegmentKind.INPUT_GRADIENT))
    return [
        (stage * ranks_per_stage + inner, kind)
        for stage, kind in beside
        for inner in range(ranks_per_stage)
    ]
