"""Sums of floating-point numbers that every member computes for itself, to the very same bits."""

from __future__ import annotations

from collections.abc import Iterable


def add_in_order(numbers: Iterable[float]) -> float:
    """Return the sum of numbers, added left to right with a rounding at each.

    The built-in ``sum`` compensates rounding from Python 3.12 on: members of different Python
    versions would have different bits.

    Args:
        numbers: in an order that is the same everywhere.
    """
    total = 0.0
    for number in numbers:
        total += number
    return total
