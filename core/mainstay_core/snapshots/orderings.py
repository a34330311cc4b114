"""Orders the units of a window, and says when their popularity asks for another order.

A unit that is copied late in a window stays frozen longer in a boundary replay, which spares its
weight gradients. So the experts that most tokens reach come last among the experts (MoEvement,
arXiv 2412.15411, section 3.5; other measures of popularity in its appendix B). Gates and the rest
of the layers serve every token and come after all experts. A dense model has no popularity: its
layers are copied from the last to the first (appendix E).

Popularity is counted in integers, from the statistics of each commit, so every rank has the same
order. The running scores belong to the commit: a rank that joins knows them from there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from mainstay_core.base.bounds import Count, Longest, Name, Range
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.units import MAX_UNITS, Unit, UnitKind

ONE = 1 << 16
"""The number 1 in fixed point. Soft counts and decayed scores have 16 binary places."""
CHANGED_PERCENT = 10
"""A share of a layer's tokens has changed if it differs by more than this part of itself."""
REORDER_PERCENT = 25
"""A new order is made when the shares of so many of the experts have changed, or more."""

Percent = Annotated[int, Range(0, 100)]
Decay = Annotated[int, Range(0, ONE)]


class Ordering(enum.StrEnum):
    """The measure by which experts are ordered, as ``snapshots.ordering`` names it."""

    POPULARITY = "Popularity"
    """Tokens that reached the expert in the window; the default."""
    SOFT_COUNT = "SoftCount"
    """Sum of the gate's probabilities in the window, in fixed point."""
    TIME_DECAYED = "TimeDecayed"
    """Exponential moving average of the tokens of each step."""
    CAPACITY_AWARE = "CapacityAware"
    """Tokens in the window, divided by the expert's capacity."""
    BACK_TO_FRONT = "BackToFront"
    """No popularity: from the model's end to its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The popularity of one expert."""

    unit: Name
    """Model-wide name of the expert's unit."""
    block: Name
    """Its layer. Shares are taken among the experts of one layer, which see the same tokens."""
    value: Count
    """Tokens; in fixed point where the ordering says so."""


Scores = Annotated[tuple[Score, ...], Longest(MAX_UNITS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """The scores of a job's experts, as they stand after a commit."""

    running: Scores = ()
    """Of the window that runs; a decayed average goes on over all windows."""
    ordered_by: Scores = ()
    """Those by which the order in force was made; empty before the first one."""


def note_step(
    popularity: Popularity,
    counts: Sequence[Score],
    ordering: Ordering,
    decay: int = ONE // 2,
) -> Popularity:
    """Return the popularity after a commit.

    Args:
        popularity: after the commit before.
        counts: of the step, one for each expert: tokens, or with ``SOFT_COUNT`` probabilities in
            fixed point. They were summed over shard types, in integers.
        ordering: which measure is kept.
        decay: alpha of a decayed average in fixed point: how much of the average stays.

    Raises:
        InvalidSpecError: an expert is named twice, or alpha is not within 0 and 1.
    """
    if not 0 <= decay <= ONE:
        raise InvalidSpecError("decay", f"is {decay}, must be 0..{ONE} (0 to 1 in fixed point)")
    before = {score.unit: score.value for score in popularity.running}
    if len({score.unit for score in counts}) < len(counts):
        raise InvalidSpecError("counts", "names an expert twice")
    decays = ordering is Ordering.TIME_DECAYED
    running = tuple(
        Score(
            unit=score.unit,
            block=score.block,
            value=(decay * before.get(score.unit, 0) + (ONE - decay) * score.value * ONE) // ONE
            if decays
            else before.get(score.unit, 0) + score.value,
        )
        for score in sorted(counts, key=lambda score: score.unit)
    )
    return Popularity(running=running, ordered_by=popularity.ordered_by)


def close_window(popularity: Popularity, ordering: Ordering) -> tuple[Popularity, bool]:
    """Return the popularity with which the next window begins, and whether it has a new order.

    Where it has one, it is made from ``ordered_by``: nothing else has to be remembered.
    """
    new = not popularity.ordered_by or must_reorder(popularity.ordered_by, popularity.running)
    kept = popularity.running if ordering is Ordering.TIME_DECAYED else ()
    ordered_by = popularity.running if new else popularity.ordered_by
    return Popularity(running=kept, ordered_by=ordered_by), new


def must_reorder(
    before: Sequence[Score],
    after: Sequence[Score],
    changed_percent: int = CHANGED_PERCENT,
    reorder_percent: int = REORDER_PERCENT,
) -> bool:
    """Return whether enough experts have another share of their layer's tokens than before.

    An expert counts as changed if its share differs by more than ``changed_percent`` of what it
    was (MoEvement, section 3.5: 10 % for at least 25 % of the experts). Exact: no share is rounded.

    Args:
        before: scores by which the order in force was made.
        after: scores of the window that ends.
        changed_percent: of the share.
        reorder_percent: of the experts.
    """
    old, new = _shares(before), _shares(after)
    experts = old.keys() | new.keys()
    changed = sum(
        abs(new.get(unit, Fraction(0)) - old.get(unit, Fraction(0))) * 100
        > changed_percent * old.get(unit, Fraction(0))
        for unit in experts
    )
    return bool(experts) and changed * 100 >= reorder_percent * len(experts) and changed > 0


def _shares(scores: Iterable[Score]) -> dict[str, Fraction]:
    """Return each expert's share of its layer's tokens; 0 in a layer that no token reached."""
    scores = tuple(scores)
    totals: dict[str, int] = {}
    for score in scores:
        totals[score.block] = totals.get(score.block, 0) + score.value
    return {score.unit: Fraction(score.value, totals[score.block] or 1) for score in scores}


def order_units(
    units: Sequence[Unit],
    ordering: Ordering,
    scores: Sequence[Score] = (),
    capacities: Mapping[str, int] | None = None,
) -> tuple[Unit, ...]:
    """Return units in the order in which a window copies them.

    Experts come first, by ascending score; ties by the later block, then by name. What is no expert
    comes after them, from the last block to the first, gates before the rest of their block. With
    ``BACK_TO_FRONT`` everything is in that second order.

    Args:
        units: of a position, in any order.
        ordering: the measure.
        scores: of its experts; one without a score has 0.
        capacities: tokens that each expert can take, by its unit's name, for ``CAPACITY_AWARE``.

    Raises:
        InvalidSpecError: an expert has no capacity where capacities count.
    """
    values = {score.unit: score.value for score in scores}
    if ordering is Ordering.BACK_TO_FRONT:
        return tuple(sorted(units, key=_from_the_end))
    capacities = {} if capacities is None else capacities

    def score_of(unit: Unit) -> Fraction:
        if ordering is not Ordering.CAPACITY_AWARE:
            return Fraction(values.get(unit.name, 0))
        capacity = capacities.get(unit.name, 0)
        if capacity < 1:
            raise InvalidSpecError(
                f"capacities.{unit.name}", f"is {capacity}, must be at least 1 token"
            )
        return Fraction(values.get(unit.name, 0), capacity)

    experts = [unit for unit in units if unit.kind is UnitKind.EXPERT]
    others = [unit for unit in units if unit.kind is not UnitKind.EXPERT]
    experts.sort(key=lambda unit: (score_of(unit), _from_the_end(unit)))
    return (*experts, *sorted(others, key=_from_the_end))


def _from_the_end(unit: Unit) -> tuple[int, int, str]:
    return -unit.block_index, unit.kind is not UnitKind.GATE, unit.name
