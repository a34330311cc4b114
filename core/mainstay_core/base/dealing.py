"""Deals out items of different weights to parties, as evenly as whole items allow."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import TypeVar

from mainstay_core.base.errors import InvalidSpecError

_Party = TypeVar("_Party", bound=Hashable)


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
