"""Describes units: the parts into which the state of a position is cut to be copied one by one.

A unit is the smallest thing that is copied by itself: an expert, a gate, the rest of a layer, or a
whole block that does not say its units (MoEvement, arXiv 2412.15411, section 3.2, where it is an
"operator"; for dense models appendix E). It has whole parameters of one block, and its state is
what lies at their places in the block's flat buffer: masters, optimizer moments and compute weights
all have that layout, so one list of spans serves them all.

Whoever knows the model cuts it (``mainstay_train.model.units``), and refuses units that do not have
each parameter of their block once. What two of them hold would be applied twice in a replay, and
what none holds would be lost. Padding belongs to the unit that has the parameter before it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import MAX_TYPES, Count, Index, Longest, Name

MAX_UNITS = MAX_TYPES
"""Units of a position."""


class UnitKind(enum.StrEnum):
    """The part that a unit plays in its block; orderings tell experts from the rest by it."""

    EXPERT = "expert"
    GATE = "gate"
    REST = "rest"
    """What a block has beside its experts and its gate."""
    LAYER = "layer"
    """A whole block."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """A place whose ranks have interchangeable states, whatever their replica."""

    stage: Index
    inner: Index = 0

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", inner rank {self.inner}" if self.inner else "")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """Consecutive elements of a block's flat buffer."""

    start: Count
    stop: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit with its place in the model's state.

    Invariant: spans ascend, are not empty, do not touch, and begin and end at multiples of the
    layout's padding.
    """

    name: Name
    """Model-wide: the block's name, then that in the block, e.g. ``layers.3.expert.5``. A block
    that is one unit gives it its own name."""
    kind: UnitKind
    position: Position
    block: Name
    block_index: Index
    """Of the block in its position, in model order."""
    spans: Annotated[tuple[Span, ...], Longest(MAX_TYPES)]

    @property
    def num_elements(self) -> int:
        """Elements of the state, padding included."""
        return sum(span.stop - span.start for span in self.spans)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same elements as ascending spans that do not touch."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            last = merged.pop()
            span = Span(start=last.start, stop=max(last.stop, span.stop))
        merged.append(span)
    return tuple(merged)


def agreed_number(told: Iterable[tuple[int, int]]) -> int:
    """Return how many units a position has, where copies of them tell different numbers.

    The number counts that most copies tell. Of numbers that equally many tell, one counts of which
    all units are there, and then the larger.

    Args:
        told: of each copy the number of its unit, and how many units it says there are; at least
            one copy.
    """
    copies = Counter(told)
    votes: Counter[int] = Counter()
    for (_, number), how_many in copies.items():
        votes[number] += how_many

    def is_whole(number: int) -> bool:
        return all((unit, number) in copies for unit in range(number))

    return max(votes, key=lambda number: (votes[number], is_whole(number), number))
