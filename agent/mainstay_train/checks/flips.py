"""Keeps the flips that faults have ordered, until the kernel comes that they name.

A flip is ordered when its step begins. It is put in once, right after an execution of its kernel.
A sticky one stays, and is put in after each execution, in whichever step.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from mainstay_core.dmr.flips import Execution, Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_train.checks.places import Phase, Place

logger = logging.getLogger(__name__)

MAX_NEAREST = 3
"""Names of kernels in the warning about a flip that named none."""


class Missed(NamedTuple):
    """A flip that was not put in, as nothing that it names came."""

    fault: str
    """Its id."""
    why: str
    """What came in its place: one sentence, for people."""
    may_come: bool = False
    """Whether it stays, and is put in once its kernel comes: it is not missed yet."""


@dataclass(slots=True)
class _Order:
    """A flip that waits for its kernel."""

    fault: str
    step: int
    phase: Phase
    flip: Flip
    passes: set[Pass] = field(default_factory=set)
    """That came in its phase."""
    places: set[tuple[int | None, int | None, int | None]] = field(default_factory=set)
    """Type, micro-batch and block of what came in its pass."""
    passed: dict[str, int] = field(default_factory=dict)
    """Kernels that came where the flip may be meant, and how often: an ordered set."""
    is_put: bool = False
    is_told: bool = False
    """Whether it was said that its kernel has not come."""

    def fits(self, place: Place, where: Where) -> bool:
        """Return whether it may mean what comes at a place, and note what did come."""
        flip = self.flip
        if flip.where is not where or self.phase is not place.phase:
            return False
        if not (flip.sticky or self.step == place.step):
            return False
        self.passes.add(place.in_pass)
        if flip.in_pass is place.in_pass:
            self.places.add((place.shard_type, place.micro_batch, place.block))
        return place.fits(flip)


class FlipOrders:
    """The flips that wait. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: list[_Order] = []

    @property
    def is_empty(self) -> bool:
        """Whether no flip waits."""
        return not self._orders

    def awaits(self, where: Where) -> bool:
        """Return whether a flip waits that makes such a thing wrong."""
        return any(order.flip.where is where for order in self._orders)

    def add(self, fault: str, step: int, phase: Phase, flip: Flip) -> None:
        """Take an order.

        Args:
            fault: its id, for people.
            step: the step in which it is put in.
            phase: the phase of the step.
            flip: which kernel and which bit.
        """
        with self._lock:
            self._orders.append(_Order(fault, step, phase, flip))

    def take(
        self, place: Place, ordinal: int | None, kernel: str, where: Where = Where.COMPUTE
    ) -> list[Flip]:
        """Return the flips of a kernel that is about to be executed; only sticky ones stay.

        Args:
            place: of the kernel.
            ordinal: its number in its block and pass; None: it is no kernel.
            kernel: its name, e.g. ``aten.mm``; of the state, the part of it.
            where: what the flips make wrong.
        """
        if not self._orders:
            return []
        found = []
        with self._lock:
            for order in [*self._orders]:
                if not order.fits(place, where):
                    continue
                if not _is_meant(order.flip, ordinal, kernel):
                    order.passed[kernel] = order.passed.get(kernel, 0) + 1
                    continue
                if not order.is_put:
                    # The log is a file: whoever is killed next has said it.
                    told = _describe_put(order.flip, place, kernel)
                    logger.info("flip %s is put in: %s", order.fault, told)
                order.is_put = True
                if not order.flip.sticky:
                    self._orders.remove(order)
                found.append(order.flip)
        return found

    def drop_before(self, step: int) -> list[Missed]:
        """Return flips of earlier steps, whose kernel has not come, each once.

        Only sticky ones stay: a later step may have what they name, e.g. another shard type.
        """
        with self._lock:
            late = [
                order
                for order in self._orders
                if order.step < step and not order.is_put and not order.is_told
            ]
            for order in late:
                order.is_told = True
            self._orders = [o for o in self._orders if o.flip.sticky or o.step >= step]
        return [Missed(order.fault, _describe(order), order.flip.sticky) for order in late]


def _is_meant(flip: Flip, ordinal: int | None, kernel: str) -> bool:
    """Return whether a flip that fits a place means a kernel there."""
    if flip.where is Where.STATE:
        return (flip.part or StatePart.COMPUTE).value == kernel
    if flip.where is not Where.COMPUTE or flip.operator == kernel:
        return True
    if flip.operator is None and ordinal is not None:
        return not flip.sticky or ordinal == 0  # the first that comes; or always the same one
    return ordinal is not None and flip.operator == ordinal


def _describe_put(flip: Flip, place: Place, kernel: str) -> str:
    """Return what a flip is put into, and where in the program that is."""
    parts = {"type": place.shard_type, "micro-batch": place.micro_batch, "block": place.block}
    said = "".join(f", {name} {value}" for name, value in parts.items() if value is not None)
    at = f"step {place.step}, phase {place.phase.value}, {place.in_pass.value} pass{said}"
    if flip.sticky:
        return f"{kernel}, {at}, from now on in every execution"
    if flip.execution is Execution.CHECKER:
        return f"{kernel}, {at}, in the second execution, if there is one"
    return f"{kernel}, {at}"


def _describe(order: _Order) -> str:
    """Return what came in place of what a flip means."""
    flip, step = order.flip, f"step {order.step}"
    if flip.where is Where.WIRE:
        return f"in {step} nothing came to this rank from other cells"
    if flip.where is Where.STATE:
        return _describe_state(order)
    if flip.where is Where.BATCH:
        return _lacking(order, f"this rank fetched no batch in {step}", f"fetched in {step}")
    phase = f"phase {order.phase.value} of {step}"
    at = f"the {flip.in_pass.value} pass in {phase}"
    if order.passes and flip.in_pass not in order.passes:
        came = ", ".join(sorted(in_pass.value for in_pass in order.passes))
        return f"{phase} has no {flip.in_pass.value} pass on this rank; it has {came}"
    if not order.passed:
        return _lacking(order, f"this rank executed nothing in {at}", f"executed in {at}")
    parts = {"type": flip.shard_type, "microBatch": flip.micro_batch, "block": flip.block}
    said = "".join(f" of {name} {value}" for name, value in parts.items() if value is not None)
    if flip.operator is None:
        return f"{at}{said} has no numbered operator; there are {', '.join(order.passed)}"
    text = f"{at}{said} has no operator {flip.operator}"
    if isinstance(flip.operator, int):
        most = sum(order.passed.values())
        return f"{text}; {most} operators were executed there, numbered from 0 in each block"
    near = difflib.get_close_matches(str(flip.operator), order.passed, MAX_NEAREST, cutoff=0)
    return f"{text}; the nearest names there are {', '.join(near)}"


def _lacking(order: _Order, nothing: str, where: str) -> str:
    """Return which type, micro-batch or block that a flip names this rank does not have.

    Args:
        order: the flip's.
        nothing: said if nothing at all came.
        where: where something came.
    """
    if not order.places:
        return nothing
    flip, places = order.flip, order.places
    for at, (name, wanted) in enumerate(
        (("type", flip.shard_type), ("microBatch", flip.micro_batch), ("block", flip.block))
    ):
        there = {place[at] for place in places}
        if wanted is not None and wanted not in there:
            listed = _listed({number for number in there if number is not None})
            return f"no {name} {wanted} was {where}, only {name} {listed}"
        if wanted is not None:
            places = {place for place in places if place[at] == wanted}
    return nothing


def _describe_state(order: _Order) -> str:
    """Return which blocks and parts of the state there are."""
    flip = order.flip
    part, number = (flip.part or StatePart.COMPUTE).value, flip.block or 0
    if order.passed:
        return f"block {number} has no {part}; it has {', '.join(order.passed)}"
    blocks = {block for _, _, block in order.places if block is not None}
    return f"the stage has no block {number}; it has block {_listed(blocks)}"


def _listed(numbers: Collection[int]) -> str:
    """Return numbers in few characters: a run as its ends, e.g. ``0 to 3``; else all of them."""
    found = sorted(numbers)
    if len(found) > 1 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found)) or "none"
