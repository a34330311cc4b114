"""Chooses the length of a window, and which units each of its steps copies in full.

MoEvement (arXiv 2412.15411, section 3.5, algorithm 1) copies as many units in a step as fit into
the step's time. The rest is *frozen*: of what is still to come in the window only the compute
weights are copied, with which a boundary replay computes until the full state is there. The window
is the least number of steps in which each unit is copied in full once.

Two forms are here. :func:`find_window_size` and :func:`generate_schedule` are the algorithm as it
is printed, for equal units. :func:`plan_length` and :func:`plan_instalments` are exact for units of
any size, and differ from it in four points:

- a step is priced with the units that it has, so the dearest step decides and not an average one;
- a step may copy one unit alone (the printed loop stops at two, whether they fit or not);
- the window's length is the least of all cuts of the order, and its dearest step is as cheap as
  that length allows;
- each author copies its own share, and all authors have windows of one length, the longest that
  one of them needs. So an author's last instalments may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, TypeVar

from mainstay_core.base.bounds import Count, Longest, Name, Range, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import count, show_bytes
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.units import MAX_UNITS

MAX_LENGTH = 4096
"""Steps of a window. A replay computes up to two windows again, so longer ones protect nothing."""

WindowLength = Annotated[int, Range(1, MAX_LENGTH)]
InstalmentNumber = Annotated[int, Range(0, MAX_LENGTH - 1)]
UnitNames = Annotated[tuple[Name, ...], Longest(MAX_UNITS)]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Window:
    """The versions ``first`` to ``first + length - 1``; equal for all positions of a job.

    Length and order change only where a window begins. Both stand in the header of each copy.
    """

    first: Count
    length: WindowLength

    @property
    def last(self) -> int:
        """The version of the last instalment."""
        return self.first + self.length - 1

    def number_of(self, version: int) -> int | None:
        """Return the instalment that is made at a version; None if none of this window is."""
        return version - self.first if self.first <= version <= self.last else None

    def version_of(self, number: int) -> int:
        """Return the version at which an instalment is made."""
        return self.first + number


@dataclass(frozen=True, slots=True, kw_only=True)
class Instalment:
    """The copies that one author makes at one version of a window."""

    number: InstalmentNumber
    """Counted from 0; it is made at the window's first version plus this."""
    full: UnitNames
    """Units whose full state is copied, in the order of the window: the active ones."""
    compute: UnitNames
    """Units whose compute weights are copied, as their turn is still to come: the frozen ones."""
    size_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """The length of the next window."""

    length: WindowLength
    fits: bool
    """Whether every instalment fits into its step. If not, steps wait for copies."""
    largest_bytes: Count
    """Of the dearest instalment of any author."""
    reason: Sentence
    """One sentence for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedWindow:
    """The answer of algorithm 1 as printed: the window's size W and the active units of a step."""

    length: int
    num_active: int


def find_window_size(
    num_units: int,
    *,
    step_s: float,
    compute_bytes: float,
    master_bytes: float,
    optimizer_bytes: float,
    bandwidth_bytes_per_s: float,
) -> PrintedWindow:
    """Return the window of equal units, as MoEvement prints it (algorithm 1, lines 7 to 18).

    The number of active units falls from all of them until a step's copies fit into the step, and
    no further than to two, whether these fit or not. O(num_units).

    Args:
        num_units: of the state, at least 1.
        step_s: time of a step.
        compute_bytes: compute weights of one unit.
        master_bytes: masters of one unit.
        optimizer_bytes: moments of one unit.
        bandwidth_bytes_per_s: at which copies are made.

    Raises:
        InvalidSpecError: there is no unit, or no bandwidth.
    """
    if num_units < 1:
        raise InvalidSpecError("num_units", f"is {num_units}, must be at least 1")
    if not bandwidth_bytes_per_s > 0:
        raise InvalidSpecError(
            "bandwidth_bytes_per_s", f"is {bandwidth_bytes_per_s}, must be more than 0"
        )
    num_active = num_units
    while num_active > 2:
        num_frozen = num_units - num_active
        size = (master_bytes + optimizer_bytes) * num_active + compute_bytes * num_frozen
        if size / bandwidth_bytes_per_s <= step_s:
            break
        num_active -= 1
    return PrintedWindow(length=math.ceil(num_units / num_active), num_active=num_active)


def generate_schedule(
    order: Sequence[_Item], window: PrintedWindow
) -> tuple[tuple[tuple[_Item, ...], tuple[_Item, ...]], ...]:
    """Return the (active, frozen) units of each step, as printed (algorithm 1, lines 19 to 29)."""
    schedule = []
    for number in range(window.length):
        start = number * window.num_active
        end = min(start + window.num_active, len(order))
        schedule.append((tuple(order[start:end]), tuple(order[end:])))
    return tuple(schedule)


def plan_length(shares: Sequence[Sequence[UnitPrice]], budget_bytes: int) -> LengthPlan:
    """Return the least length for which every instalment of every author fits into a step.

    A cut divides an author's order into consecutive runs. The instalment of a run is its units in
    full and the compute weights of all later units. If some instalment fits in no cut, the length
    is, for that author, the least for which its dearest instalment is as cheap as it can be, and
    ``fits`` is false.

    O(units) for each of log2(bytes) trials at most.

    Args:
        shares: for each author of the job, the prices of its units in the window's order.
        budget_bytes: what can be copied in a step.

    Returns:
        The length; 1 if there is nothing to copy.
    """
    length, fits = least_length(shares, budget_bytes)
    largest = max((_least_largest(share, length) for share in shares), default=0)
    reason = (
        f"a window of {count(length, 'step')}: its dearest instalment has {show_bytes(largest)}, "
        f"a step copies {show_bytes(budget_bytes)}"
    )
    if not fits:
        reason += "; no cut fits, so steps wait for copies"
    return LengthPlan(length=length, fits=fits, largest_bytes=largest, reason=reason)


def least_length(shares: Sequence[Sequence[UnitPrice]], budget_bytes: int) -> tuple[int, bool]:
    """Return the length of :func:`plan_length`, and whether every instalment fits into a step.

    O(units) where all of them fit.
    """
    lengths = [_least_length(share, budget_bytes) for share in shares]
    fits = all(length is not None and length <= MAX_LENGTH for length in lengths)
    length = max(
        (
            fitting if fitting is not None and fitting <= MAX_LENGTH else _cheapest_length(share)
            for share, fitting in zip(shares, lengths, strict=True)
        ),
        default=1,
    )
    return length, fits


def plan_instalments(order: Sequence[UnitPrice], length: int) -> tuple[Instalment, ...]:
    """Return an author's instalments of a window, the dearest as cheap as it can be.

    Every unit is in full in exactly one of them. Runs are filled from the first on up to the size
    of the dearest, so the last ones may be empty. Equal arguments give equal instalments.

    Args:
        order: prices of the author's units, in the window's order.
        length: of the window.

    Raises:
        InvalidSpecError: the length is out of its range, or a unit is listed twice.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise InvalidSpecError("spec.snapshots.window", f"is {length}, must be 1..{MAX_LENGTH}")
    names = tuple(price.name for price in order)
    if len(set(names)) < len(names):
        twice = min(name for name in names if names.count(name) > 1)
        raise InvalidSpecError("order", f"lists the unit {twice} twice")
    stops = _fill(order, _least_largest(order, length))
    assert stops is not None, "the least size of the dearest instalment is one that fits"
    stops += [len(order)] * (length - len(stops))
    sizes = _Sizes(order)
    starts = [0, *stops[:-1]]
    return tuple(
        Instalment(
            number=number,
            full=names[start:stop],
            # A replay of gradients needs no compute weights: their price is 0 then.
            compute=tuple(price.name for price in order[stop:] if price.compute_bytes),
            size_bytes=sizes.of(start, stop),
        )
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )


class _Sizes:
    """Sizes of the instalments of an order, from prefix sums."""

    def __init__(self, order: Sequence[UnitPrice]) -> None:
        self._full = list(accumulate((price.full_bytes for price in order), initial=0))
        self._compute = list(accumulate((price.compute_bytes for price in order), initial=0))

    def of(self, start: int, stop: int) -> int:
        """Return the size of a run in full with the compute weights of all units behind it."""
        return self._full[stop] - self._full[start] + self._compute[-1] - self._compute[stop]


def _fill(order: Sequence[UnitPrice], budget_bytes: int) -> list[int] | None:
    """Return where each run ends if each is as long as it can be; None if a unit fits nowhere.

    It is a cut with the fewest runs. A run that begins later is cheaper up to the same end, so the
    longest run from the earliest start ends at least as late as any other's, run after run.
    """
    sizes = _Sizes(order)
    stops: list[int] = []
    start = 0
    while start < len(order):
        stop = start
        # Full states take no less than compute weights, so a longer run takes no less.
        while stop < len(order) and sizes.of(start, stop + 1) <= budget_bytes:
            stop += 1
        if stop == start:
            return None
        stops.append(stop)
        start = stop
    # An order without units has one run without units.
    return stops or [0]


def _least_length(order: Sequence[UnitPrice], budget_bytes: int) -> int | None:
    stops = _fill(order, budget_bytes)
    return None if stops is None else len(stops)


def _cheapest_length(order: Sequence[UnitPrice]) -> int:
    """Return the least length at which the dearest instalment is as cheap as with any length."""
    length = _least_length(order, _least_largest(order, MAX_LENGTH))
    assert length is not None, "the least size of the dearest instalment is one that fits"
    return length


def _least_largest(order: Sequence[UnitPrice], length: int) -> int:
    """Return the least size of the dearest instalment, over all cuts in ``length`` runs or fewer.

    A cut with fewer runs is one with empty runs at its end, which cost nothing.
    """
    sizes = _Sizes(order)
    low = max((sizes.of(unit, unit + 1) for unit in range(len(order))), default=0)
    high = max(low, sizes.of(0, len(order)))
    while low < high:
        middle = (low + high) // 2
        stops = _fill(order, middle)
        if stops is not None and len(stops) <= length:
            high = middle
        else:
            low = middle + 1
    return low
