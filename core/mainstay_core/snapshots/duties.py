"""Divides the copying of a position over its living cells.

All cells of a position hold the same state, so each unit needs one author: the cell that copies it
to the stores. With n cells each copies an n-th of the bytes, and the window is so much shorter.
MoEvement (arXiv 2412.15411) has one author for each state, since its experts have one holder.

Duties last for a window. When a cell is lost, joins or is chained anew, the next window has other
duties; nothing has to move for that, as every window copies everything anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from mainstay_core.base.bounds import Longest
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, Slot
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.units import MAX_UNITS

_Party = TypeVar("_Party", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Author:
    """A cell's rank that copies units: one life of a trainer on a slot."""

    slot: Slot
    incarnation: Incarnation

    def __str__(self) -> str:
        return str(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """The units that one author copies in a window, in the window's order."""

    author: Author
    units: Annotated[tuple[UnitPrice, ...], Longest(MAX_UNITS)]

    @property
    def full_bytes(self) -> int:
        """Bytes of their full states."""
        return sum(price.full_bytes for price in self.units)


def divide(order: Sequence[UnitPrice], authors: Iterable[Author]) -> tuple[Duty, ...]:
    """Return what each author of a position copies in a window.

    The bytes of full states of two authors differ by those of one unit at most. The dearest unit
    goes first, to the author with the least; ties by the window's order and by the author's name.
    Units of one price go round, so each author has popular and unpopular ones. O(units log
    authors) after sorting.

    Args:
        order: prices of the position's units, in the window's order.
        authors: living cells' ranks of the position, in any order.

    Returns:
        One duty for each author, ascending; some may be empty.

    Raises:
        InvalidSpecError: there is no author, or one is named twice.
    """
    authors = sorted(authors)
    if not authors:
        raise InvalidSpecError("authors", "has none, must have at least one living cell")
    weights = [price.full_bytes for price in order]
    shares = divide_by_weight(weights, authors)
    return tuple(
        Duty(author=author, units=tuple(order[number] for number in share))
        for author, share in zip(authors, shares, strict=True)
    )


def divide_by_weight(weights: Sequence[int], parties: Sequence[_Party]) -> list[list[int]]:
    """Return for each party the numbers of its items, ascending; sums differ by one item at most.

    Args:
        weights: of the items; ties go by their number.
        parties: at least one; ties go by their place.

    Raises:
        InvalidSpecError: a party is named twice.
    """
    if len(set(parties)) < len(parties):
        raise InvalidSpecError("parties", "names one of them twice")
    loads = [(0, place) for place in range(len(parties))]
    shares: list[list[int]] = [[] for _ in parties]
    for number in sorted(range(len(weights)), key=lambda number: (-weights[number], number)):
        load, place = loads[0]
        shares[place].append(number)
        heapq.heapreplace(loads, (load + weights[number], place))
    return [sorted(share) for share in shares]
