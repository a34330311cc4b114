"""Chooses the checks that fill a window best: the subset with the greatest time that still fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_EXACT = 10
"""Checks of which all subsets are looked at."""
CELLS = 2048
"""Cells into which a window's length is divided for more checks than that."""


def best_fit(seconds: Sequence[float], most_s: float) -> tuple[int, ...]:
    """Return the indices, ascending, of times whose sum is the greatest within a bound.

    Of equal sums the one with the first indices is taken. Exact for :data:`MAX_EXACT` times or
    fewer; for more each counts rounded up to a cell, and what then still fits is added. O(times).

    Args:
        seconds: of each check.
        most_s: the window's length.
    """
    fitting = [index for index, time_s in enumerate(seconds) if time_s <= most_s]
    if math.fsum(seconds[index] for index in fitting) <= most_s:
        return tuple(fitting)
    if len(fitting) <= MAX_EXACT:
        return _exact_fit(seconds, fitting, most_s)
    return _rounded_fit(seconds, fitting, most_s)


def _exact_fit(seconds: Sequence[float], fitting: list[int], most_s: float) -> tuple[int, ...]:
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    sums: list[tuple[float, tuple[int, ...]]] = [best]
    for index in fitting:
        grown = [
            (total_s + seconds[index], (*chosen, index))
            for total_s, chosen in sums
            if total_s + seconds[index] <= most_s
        ]
        best = max([best, *grown], key=lambda found: found[0])
        sums += grown
    return best[1]


def _rounded_fit(seconds: Sequence[float], fitting: list[int], most_s: float) -> tuple[int, ...]:
    # Bit n of a number says that a sum of n cells can be reached. Division by a tiny window is
    # safe: what fits is no longer than it.
    cells = [max(1, -int(-seconds[index] / most_s * CELLS // 1)) for index in fitting]
    mask = (1 << (CELLS + 1)) - 1
    reached = [1]
    for number in cells:
        reached.append((reached[-1] | reached[-1] << number) & mask)
        if reached[-1] >> CELLS:
            break
    total = reached[-1].bit_length() - 1
    chosen = []
    for step in range(len(reached) - 1, 0, -1):
        if not reached[step - 1] >> total & 1:
            chosen.append(fitting[step - 1])
            total -= cells[step - 1]
    left_s = most_s - math.fsum(seconds[index] for index in chosen)
    inside = set(chosen)
    for index in fitting:
        if index not in inside and seconds[index] <= left_s:
            inside.add(index)
            left_s -= seconds[index]
    return tuple(sorted(inside))
