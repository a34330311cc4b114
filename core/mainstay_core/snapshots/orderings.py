"""Orders the units of a window, and says when their popularity asks for another order.

A unit that is copied late in a window stays frozen longer in a boundary replay, which spares its
weight gradients. So the experts that most tokens reach come last among the experts (MoEvement,
arXiv 2412.15411, section 3.5; other measures of popularity in its appendix B). Gates and the rest
of the layers serve every token and come after all experts. A dense model has no popularity: its
layers are copied from the last to the first (appendix E).

Popularity is counted in integers, from the statistics of each commit, so every rank has the same
order. The running scores are kept with the state and told where ranks settle, so a rank that joins
knows them (:class:`~mainstay_core.wire.windows.WindowBasis`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.config import DECAY_ONE
from mainstay_core.snapshots.units import Unit, UnitKind
from mainstay_core.wire.windows import Popularity

ONE = DECAY_ONE
"""The number 1 in fixed point. Soft counts and decayed scores have 16 binary places."""
CHANGED_PERCENT = 10
"""A share of a layer's tokens has changed if it differs by more than this part of itself."""
REORDER_PERCENT = 25
"""A new order is made when the shares of so many of the experts have changed, or more."""


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


def note_step(
    popularity: Popularity,
    counts: Sequence[int],
    ordering: Ordering,
    decay: int = ONE // 2,
) -> Popularity:
    """Return the popularity after a commit.

    Args:
        popularity: after the commit before.
        counts: of the step, for each expert: tokens, or with ``SOFT_COUNT`` probabilities in fixed
            point. They were summed over shard types, in integers.
        ordering: which measure is kept.
        decay: alpha of a decayed average in fixed point: how much of the average stays.

    Raises:
        InvalidSpecError: there are more or fewer experts than before, or alpha is not within 0 and
            1.
    """
    if not 0 <= decay <= ONE:
        raise InvalidSpecError("decay", f"is {decay}, must be 0..{ONE} (0 to 1 in fixed point)")
    before = popularity.running or (0,) * len(counts)
    if len(before) != len(counts):
        raise InvalidSpecError("counts", f"are of {len(counts)} experts, must be of {len(before)}")
    if ordering is Ordering.TIME_DECAYED:
        running = tuple(
            (decay * old + (ONE - decay) * new * ONE) // ONE
            for old, new in zip(before, counts, strict=True)
        )
    else:
        running = tuple(old + new for old, new in zip(before, counts, strict=True))
    return replace(popularity, running=running)


def close_window(
    popularity: Popularity, ordering: Ordering, layers: Sequence[int]
) -> tuple[Popularity, bool]:
    """Return the popularity with which the next window begins, and whether it has a new order.

    Where it has one, it is made from ``ordered_by``: nothing else has to be remembered. A window
    in which no step was committed changes nothing.

    Args:
        popularity: after the last commit.
        ordering: which measure is kept.
        layers: of each expert the number of its layer.
    """
    running, ordered_by = popularity.running, popularity.ordered_by
    if not running:
        return popularity, False
    new = not ordered_by or must_reorder(ordered_by, running, layers)
    kept = running if ordering is Ordering.TIME_DECAYED else ()
    return Popularity(running=kept, ordered_by=running if new else ordered_by), new


def must_reorder(
    before: Sequence[int],
    after: Sequence[int],
    layers: Sequence[int],
    changed_percent: int = CHANGED_PERCENT,
    reorder_percent: int = REORDER_PERCENT,
) -> bool:
    """Return whether enough experts have another share of their layer's tokens than before.

    An expert counts as changed if its share differs by more than ``changed_percent`` of what it
    was (MoEvement, section 3.5: 10 % for at least 25 % of the experts). Exact: no share is rounded.

    Args:
        before: scores of all experts by which the order in force was made.
        after: scores of the window that ends.
        layers: of each expert the number of its layer. Shares are taken among the experts of one
            layer, which see the same tokens.
        changed_percent: of the share.
        reorder_percent: of the experts.
    """
    old, new = _totals(before, layers), _totals(after, layers)
    changed = 0
    for was, value, layer in zip(before, after, layers, strict=True):
        # |value / new - was / old| * 100 > percent * was / old, times both totals.
        difference = abs(value * old[layer] - was * new[layer])
        changed += difference * 100 > changed_percent * was * new[layer]
    return changed > 0 and changed * 100 >= reorder_percent * len(layers)


def _totals(scores: Sequence[int], layers: Sequence[int]) -> dict[int, int]:
    """Return the sum of each layer's scores; 1 in a layer that no token reached."""
    totals: dict[int, int] = {}
    for score, layer in zip(scores, layers, strict=True):
        totals[layer] = totals.get(layer, 0) + score
    return {layer: total or 1 for layer, total in totals.items()}


def order_units(
    units: Sequence[Unit],
    ordering: Ordering,
    scores: Mapping[str, int] | None = None,
    capacities: Mapping[str, int] | None = None,
) -> tuple[Unit, ...]:
    """Return units in the order in which a window copies them.

    Experts come first, by ascending score; ties by the later block, then by name. What is no expert
    comes after them, from the last block to the first, gates before the rest of their block. With
    ``BACK_TO_FRONT`` everything is in that second order.

    Args:
        units: of a position, in any order.
        ordering: the measure.
        scores: of its experts, by their units' names; one without a score has 0.
        capacities: tokens that each expert can take, by its unit's name, for ``CAPACITY_AWARE``.

    Raises:
        InvalidSpecError: an expert has no capacity where capacities count.
    """
    values = {} if scores is None else scores
    if ordering is Ordering.BACK_TO_FRONT:
        return tuple(sorted(units, key=_from_the_end))
    capacities = {} if capacities is None else capacities

    def score_of(unit: Unit) -> Fraction | int:
        if ordering is not Ordering.CAPACITY_AWARE:
            return values.get(unit.name, 0)
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
