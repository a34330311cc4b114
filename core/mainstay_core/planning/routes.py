"""Says in which order a micro-batch visits the stages of a pipeline: its route.

In order, a route is the stages from the first to the last. Swapped (CheckFree+, Blagoev et al.,
section 4.3) has two routes, and each is taken by half of the micro-batches: so a stage at an end
and the one beside it, its twin, learn to do each other's work. Embedding and head change places
with nobody. Where the layers of the first stage come second, the stage is visited twice: for the
embedding, and for its layers. Likewise the last stage, for its layers and for the head.

Which route a flow takes follows from its number alone, never from who computes it. So a type has
the same bits wherever it is computed.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import Order


class Extent(enum.StrEnum):
    """The parts of a stage through which a visit leads."""

    __hash__ = str.__hash__  # kernels are looked up by it, and Enum's own takes longer

    WHOLE = "whole"
    EMBEDDING = "embedding"
    """The model's first block alone."""
    LAYERS = "layers"
    """All blocks of the stage but the model's first and last one."""
    HEAD = "head"
    """The model's last block alone."""


class Visit(NamedTuple):
    """One stay of a flow in a stage, on its way forward and again on its way back."""

    stage: int
    extent: Extent


Route = tuple[Visit, ...]
"""The visits of a flow, in forward order."""
Way = tuple[Extent, ...]
"""The parts of a stage through which a flow passes, in forward order."""


def route_of(order: Order, number: int, num_stages: int) -> Route:
    """Return the route of a flow.

    Swapped, flows with odd numbers take the other route. Of three stages the middle one is the twin
    of both ends, so flows take turns: those with odd numbers swap the first pair, the others the
    last one.

    Args:
        order: of the job.
        number: the flow's: its type times the micro-batches of a type, plus its micro-batch.
        num_stages: stages of a chain.

    Raises:
        InvalidSpecError: a single stage has nothing to swap.
    """
    stages, last = list(range(num_stages)), num_stages - 1
    if order is Order.IN_ORDER:
        return tuple(Visit(stage, Extent.WHOLE) for stage in stages)
    if num_stages < 2:
        raise InvalidSpecError("order", "is Swapped, which takes two stages or more")
    is_odd = number % 2 == 1
    swaps_first, swaps_last = is_odd, is_odd != (num_stages == 3)
    if swaps_first:
        stages[:2] = stages[1], stages[0]
    if swaps_last and num_stages > 2:
        stages[-2:] = stages[-1], stages[-2]
    split = {0} if swaps_first else set()
    split |= {last} if swaps_last else set()
    visits = [Visit(s, Extent.LAYERS if s in split else Extent.WHOLE) for s in stages]
    if swaps_first:
        visits.insert(0, Visit(0, Extent.EMBEDDING))
    if swaps_last:
        visits.append(Visit(last, Extent.HEAD))
    return tuple(visits)


def blocks_of(extent: Extent, num_blocks: int, *, is_first: bool, is_last: bool) -> range:
    """Return the blocks of a stage through which a visit leads, by their place in the stage.

    Args:
        extent: of the visit.
        num_blocks: of the stage.
        is_first: whether the stage has the model's first block.
        is_last: whether it has the model's last one.
    """
    if extent is Extent.EMBEDDING:
        return range(1)
    if extent is Extent.HEAD:
        return range(num_blocks - 1, num_blocks)
    if extent is Extent.LAYERS:
        return range(int(is_first), num_blocks - is_last)
    return range(num_blocks)


def ways_of(order: Order, stage: int, num_stages: int) -> tuple[Way, ...]:
    """Return the ways that flows take through a stage; in a swapped pipeline two at an end.

    Args:
        order: of the job.
        stage: the stage.
        num_stages: stages of a chain.

    Returns:
        The way of those that pass the stage once comes first.

    Raises:
        InvalidSpecError: a single stage has nothing to swap.
    """
    routes = (route_of(order, number, num_stages) for number in (0, 1))
    ways = {tuple(visit.extent for visit in route if visit.stage == stage) for route in routes}
    return tuple(sorted(ways, key=len))


def name_of(way: Way) -> str:
    """Return the name of a way for people, files and plans, e.g. ``layers-head``."""
    return "-".join(way)
