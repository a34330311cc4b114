"""Phase 3 of the static planner: in which window each single operator is executed again.

Operators that nothing else checks wait in a queue for later windows (SpareTrain, section 5.3). At
each window the queue is first cut until it fits into memory: what leaves it is naive, executed
again at once. Then the window takes what fills it best. What is left at the end is naive.

The paper lets the shortest operators go first, and fills no window beyond its length. Ours also
lets those with the least time per byte go first, and fills windows as if they were longer
(:data:`STRETCHES`), as of an overrun only the excess is exposed. Then it offers every naive
operator to each later window with time left, and takes the plan that exposes least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mainstay_core.dmr.fits import best_fit
from mainstay_core.dmr.plan import Policy

STRETCHES = (1.0, 1.2, 1.5)
"""How long a window counts, in its own lengths, when ours fills it. Chosen by measurement, on small
instances: without the longer ones the worst was a third of all checker time off the optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """An operator that could wait."""

    place: int
    """Its place among the operators."""
    naive_s: float
    """Of an execution at once."""
    later_s: float
    """Of one in a window, which gathers its operands again."""
    size_bytes: int
    """Retained while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A window as the queue sees it."""

    after: int
    """Operators executed before it opens."""
    free_s: float
    """Left by what is replayed in it already."""
    limit_bytes: int
    """For the queue, when it opens."""
    gathers: bool = True
    """Whether checks that communicate may run in it: its length is known, and its link is free."""


Assignment = list[int | None]
"""By item: the index of its wait, None for naive."""


def can_take(wait: Wait, item: Item) -> bool:
    """Return whether an item may be executed again in a wait, its time and bytes aside."""
    return item.place < wait.after and (wait.gathers or item.later_s == item.naive_s)


def exposed_s(items: Sequence[Item], waits: Sequence[Wait], assignment: Assignment) -> float:
    """Return by how much an assignment makes a passage longer: naive items, and overruns."""
    loads = [0.0] * len(waits)
    exposed = []
    for item, number in zip(items, assignment, strict=True):
        if number is None:
            exposed.append(item.naive_s)
        else:
            loads[number] += item.later_s
    exposed += [max(0.0, load_s - wait.free_s) for load_s, wait in zip(loads, waits, strict=True)]
    return math.fsum(exposed)


def plan_queue(items: Sequence[Item], waits: Sequence[Wait], policy: Policy) -> Assignment:
    """Return in which wait each item is executed again.

    Bytes of the items in the queue are within a wait's limit whenever it opens. O(items x waits).

    Args:
        items: by place, ascending.
        waits: in the order in which they open.
        policy: the paper's rules, or ours.
    """
    if policy is Policy.PAPER:
        return _fill(items, waits, _shortest_first)
    plans = [_fill(items, waits, _shortest_first)]
    plans += [_fill(items, waits, _least_per_byte_first, stretch) for stretch in STRETCHES]
    offered = [_offer(items, waits, plan) for plan in plans]
    return min(offered, key=lambda plan: exposed_s(items, waits, plan))


def _shortest_first(item: Item) -> tuple[float, int]:
    return item.naive_s, item.place


def _least_per_byte_first(item: Item) -> tuple[float, int]:
    return item.naive_s / max(1, item.size_bytes), item.place


def _fill(
    items: Sequence[Item],
    waits: Sequence[Wait],
    demoted_first: Callable[[Item], tuple[float, int]],
    stretch: float = 1.0,
) -> Assignment:
    """Defer, demote, fill: the steps 1 to 3 of the paper at each window.

    Args:
        items: by place, ascending.
        waits: in the order in which they open.
        demoted_first: the key by which items leave the queue when it is too large.
        stretch: how long a window counts, in its own lengths.
    """
    assignment: Assignment = [None] * len(items)
    queue: list[int] = []
    size = 0
    following = 0
    for number, wait in enumerate(waits):
        while following < len(items) and items[following].place < wait.after:
            queue.append(following)
            size += items[following].size_bytes
            following += 1
        if size > wait.limit_bytes:
            gone = set()
            for index in sorted(queue, key=lambda index: demoted_first(items[index])):
                if size <= wait.limit_bytes:
                    break
                gone.add(index)
                size -= items[index].size_bytes
            queue = [index for index in queue if index not in gone]
        able = [index for index in queue if can_take(wait, items[index])]
        fit = best_fit([items[index].later_s for index in able], stretch * wait.free_s)
        taken = {able[at] for at in fit}
        for index in taken:
            assignment[index] = number
            size -= items[index].size_bytes
        queue = [index for index in queue if index not in taken]
    return assignment


def _offer(items: Sequence[Item], waits: Sequence[Wait], plan: Assignment) -> Assignment:
    """Offer every naive item, the longest first, to the later wait where it is exposed least.

    It must be exposed for less than it is at once, and fit into memory until then.
    """
    assignment = list(plan)
    waiting, left = _loads(items, waits, assignment)
    open_waits = [number for number, free_s in enumerate(left) if free_s > 0]
    starts = _first_waits(items, waits)
    naive = [index for index, number in enumerate(assignment) if number is None]
    for index in sorted(naive, key=lambda index: (-items[index].naive_s, index)):
        item = items[index]
        best: tuple[float, int] | None = None
        checked = starts[index]
        for number in open_waits:
            if number < checked or left[number] <= 0 or not can_take(waits[number], item):
                continue
            while checked <= number:
                if waiting[checked] + item.size_bytes > waits[checked].limit_bytes:
                    break
                checked += 1
            if checked <= number:
                break
            excess_s = max(0.0, item.later_s - left[number])
            if excess_s < item.naive_s and (best is None or excess_s < best[0]):
                best = (excess_s, number)
            if best is not None and best[0] == 0.0:
                break
        if best is not None:
            assignment[index] = best[1]
            left[best[1]] -= item.later_s
            for number in range(starts[index], best[1] + 1):
                waiting[number] += item.size_bytes
    return assignment


def _loads(
    items: Sequence[Item], waits: Sequence[Wait], assignment: Assignment
) -> tuple[list[int], list[float]]:
    """Return, of each wait, the bytes in the queue when it opens, and the time left in it."""
    waiting = [0] * (len(waits) + 1)
    left = [wait.free_s for wait in waits]
    starts = _first_waits(items, waits)
    for index, number in enumerate(assignment):
        if number is not None:
            waiting[starts[index]] += items[index].size_bytes
            waiting[number + 1] -= items[index].size_bytes
            left[number] -= items[index].later_s
    for number in range(1, len(waits)):
        waiting[number] += waiting[number - 1]
    return waiting[: len(waits)], left


def _first_waits(items: Sequence[Item], waits: Sequence[Wait]) -> list[int]:
    """Return, of each item, the first wait that opens after it."""
    found, number = [], 0
    for item in items:
        while number < len(waits) and waits[number].after <= item.place:
            number += 1
        found.append(number)
    return found
