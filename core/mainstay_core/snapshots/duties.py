"""Divides the copying of a position over its living cells.

All cells of a position hold the same state, so each unit needs one author: the cell that copies it
to the stores. With n cells each copies an n-th of the bytes, and the window is so much shorter.
MoEvement (arXiv 2412.15411) has one author for each state, since its experts have one holder.

Duties last for a window. When a cell is lost, joins or is chained anew, the next window has other
duties; nothing has to move for that, as every window copies everything anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Longest
from mainstay_core.base.dealing import divide_by_weight
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, Slot
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.units import MAX_UNITS


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
