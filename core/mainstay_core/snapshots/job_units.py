"""Describes the units of all positions of a job: what every rank plans windows of.

Units follow from the model and its cut into stages, so every rank has the same ones, whatever its
own position is, and they never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import MAX_MEMBERS, Count, Index, Longest, Name
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.orderings import Ordering, order_units
from mainstay_core.snapshots.prices import StateTypes, UnitPrice, price_units
from mainstay_core.snapshots.units import MAX_UNITS, Unit, UnitKind
from mainstay_core.wire.windows import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """An expert whose popularity is counted."""

    unit: Name
    """Model-wide name of its unit."""
    layer: Index
    """Number of its block in the model."""
    tokens: Index
    """Place of its tokens among the integers of a commit."""
    probabilities: Index | None = None
    """Place of the sum of its gate's probabilities; None if the model does not count it."""
    capacity: Count = 0
    """Tokens that it can take in a step; 0 if the model does not say."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobUnits:
    """The units of a job. There is one for each trainer: it is compared and hashed by identity."""

    positions: Annotated[
        tuple[Annotated[tuple[Unit, ...], Longest(MAX_UNITS)], ...], Longest(MAX_MEMBERS)
    ]
    """Of each position, by its number, in canonical order."""
    types: StateTypes
    """Of their state."""
    experts: Annotated[tuple[Expert, ...], Longest(MAX_UNITS)] = ()
    """In the order of the integers of a commit."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer of each expert."""
        return tuple(expert.layer for expert in self.experts)

    def counts(self, statistics: Sequence[int], ordering: Ordering) -> tuple[int, ...]:
        """Return what a step adds to the popularity of each expert.

        Args:
            statistics: of the step's commit.
            ordering: the measure of popularity.
        """
        if ordering is Ordering.SOFT_COUNT:
            return tuple(statistics[expert.probabilities or 0] for expert in self.experts)
        return tuple(statistics[expert.tokens] for expert in self.experts)

    def order(self, position: int, ordering: Ordering, ordered_by: Scores) -> tuple[UnitPrice, ...]:
        """Return the units of a position in the order in which a window copies them.

        Args:
            position: its number.
            ordering: the measure of popularity.
            ordered_by: score of each expert; empty while nothing was counted.
        """
        scores = dict(zip((expert.unit for expert in self.experts), ordered_by, strict=False))
        capacities = {expert.unit: expert.capacity for expert in self.experts}
        units = order_units(self.positions[position], ordering, scores, capacities)
        return price_units(units, self.types, with_compute=False)


def check_ordering(units: JobUnits, ordering: Ordering) -> None:
    """Refuse an ordering for which a model does not tell enough.

    Raises:
        InvalidSpecError: an expert has no sum of probabilities, or no capacity, where these count.
    """
    field = "spec.snapshots.ordering"
    counted = {expert.unit for expert in units.experts}
    uncounted = [
        unit.name
        for position in units.positions
        for unit in position
        if unit.kind is UnitKind.EXPERT and unit.name not in counted
    ]
    if uncounted and ordering is not Ordering.BACK_TO_FRONT:
        raise InvalidSpecError(
            field,
            f"is {ordering}, but nobody counts the tokens of {uncounted[0]}; name them in "
            f"`BlockSpec.statistics`, or use {Ordering.BACK_TO_FRONT}",
        )
    for expert in units.experts:
        if ordering is Ordering.SOFT_COUNT and expert.probabilities is None:
            raise InvalidSpecError(
                field,
                f"is {ordering}, but the model does not count the probabilities of {expert.unit}; "
                f"have it count them (the built-in mixture: `counts: probabilities`), or use "
                f"{Ordering.POPULARITY}",
            )
        if ordering is Ordering.CAPACITY_AWARE and not expert.capacity:
            raise InvalidSpecError(
                field,
                f"is {ordering}, but {expert.unit} has no capacity; say it in `Unit.capacity` (the "
                f"built-in mixture drops no token, so it has none), or use {Ordering.POPULARITY}",
            )
