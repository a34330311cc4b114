"""Keeps the flips that faults have ordered, until the kernel comes that they name.

A flip is ordered when its step begins. It is put in once, right after an execution of its kernel.
A sticky one stays, and is put in after each execution, in whichever step.
"""

from __future__ import annotations

import difflib
import logging
import threading
from dataclasses import dataclass, field

from mainstay_core.dmr.flips import Flip, Where
from mainstay_train.checks.places import Phase, Place

logger = logging.getLogger(__name__)

MAX_NEAREST = 3
"""Names of kernels in the warning about a flip that named none."""


@dataclass(slots=True)
class _Order:
    """A flip that waits for its kernel."""

    fault: str
    step: int
    phase: Phase
    flip: Flip
    passed: dict[str, int] = field(default_factory=dict)
    """Kernels that came where the flip may be meant, and how often: an ordered set."""
    is_put: bool = False
    is_told: bool = False
    """Whether it was said that its kernel has not come."""


class FlipOrders:
    """The flips that wait. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: list[_Order] = []

    @property
    def is_empty(self) -> bool:
        """Whether no flip waits."""
        return not self._orders

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
            kernel: its name, e.g. ``aten.mm``.
            where: what the flips make wrong.
        """
        if not self._orders:
            return []
        found = []
        with self._lock:
            for order in [*self._orders]:
                flip = order.flip
                if flip.where is not where or order.phase is not place.phase:
                    continue
                if not (flip.sticky or order.step == place.step) or not place.fits(flip):
                    continue
                if not _is_meant(flip, ordinal, kernel):
                    order.passed[kernel] = order.passed.get(kernel, 0) + 1
                    continue
                order.is_put = True
                if not flip.sticky:
                    self._orders.remove(order)
                found.append(flip)
        return found

    def drop_before(self, step: int) -> None:
        """Warn of flips of earlier steps, whose kernel has not come; only sticky ones stay."""
        with self._lock:
            late = [
                order
                for order in self._orders
                if order.step < step and not order.is_put and not order.is_told
            ]
            for order in late:
                order.is_told = True
            self._orders = [o for o in self._orders if o.flip.sticky or o.step >= step]
        for order in late:
            logger.warning("%s", _describe(order))


def _is_meant(flip: Flip, ordinal: int | None, kernel: str) -> bool:
    """Return whether a flip that fits a place means a kernel there."""
    if flip.where is not Where.COMPUTE or flip.operator == kernel:
        return True
    if flip.operator is None and ordinal is not None:
        return not flip.sticky or ordinal == 0  # the first that comes; or always the same one
    return ordinal is not None and flip.operator == ordinal


def _describe(order: _Order) -> str:
    """Return a sentence about a flip whose kernel has not come."""
    flip = order.flip
    parts = {
        "type": flip.shard_type,
        "microBatch": flip.micro_batch,
        "block": flip.block,
        "operator": flip.operator,
    }
    said = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    where = f"the {flip.in_pass.value} pass in phase {order.phase.value} of step {order.step}"
    text = f"flip {order.fault} was not put in: {where} has no operator with {said or 'a kernel'}"
    if not order.passed:
        return f"{text}; this rank executed nothing there"
    if isinstance(flip.operator, int):
        most = sum(order.passed.values())
        return f"{text}; {most} operators were executed there, numbered from 0 in each block"
    near = difflib.get_close_matches(str(flip.operator), order.passed, MAX_NEAREST, cutoff=0)
    return f"{text}; the nearest names there are {', '.join(near)}"
