"""Says which checks wait as a plan says, and who records the passages that a plan is made from.

Plans know operators by names of their own (:mod:`mainstay_core.dmr.operators`). Here they are known
by the place at which a trainer executes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch

from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.schedule import NEXT_RECV, NEXT_RECV_B, Later, Part
from mainstay_core.planning.program import Op
from mainstay_core.planning.routes import Extent, Way
from mainstay_train.checks.places import Phase, Place

Standing = tuple[int, ...]
"""How far a rank has come with its plan, in numbers; ranks with equal ones do the same next."""
NO_STANDING: Standing = (-1, -1, -1, -1, 0)
"""Of a rank that makes no plan."""
Tell = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""Tells numbers to the ranks of a cell, and returns those of each."""

Flow = tuple[int, int]
"""Shard type and micro-batch."""
WHOLE: Way = (Extent.WHOLE,)
"""The way of micro-batches that pass a stage once. In a swapped pipeline half of them pass a stage
at an end twice."""


class Spot(NamedTuple):
    """A kernel of any passage of a stage. A trainer asks for one at each kernel."""

    phase: Phase
    in_pass: Pass
    block: int | None
    """In its stage."""
    ordinal: int
    kernel: str
    extent: Extent = Extent.WHOLE
    """Of the visit: passages of two visits have a plan of their own."""

    @classmethod
    def of(cls, place: Place, ordinal: int, kernel: str) -> Self:
        """Return the spot of a kernel of one passage."""
        return cls(place.phase, place.in_pass, place.block, ordinal, kernel, place.extent)


@dataclass(frozen=True, slots=True)
class Orders:
    """The part of a plan that a trainer does not execute at once."""

    later: Mapping[Spot, Later] = field(default_factory=dict)
    parts: Mapping[Spot, Part] = field(default_factory=dict)
    """Of segments that are replayed."""
    piggyback: frozenset[int] = frozenset()
    """Blocks of the stage whose recompute is compared with their forward."""
    cheap: frozenset[Spot] = frozenset()
    """Kernels of them that are executed twice at once all the same, in forward and recompute."""

    def beside(self, other: Orders) -> Orders:
        """Return the orders of passages of either way: these, and others."""
        return Orders(
            {**self.later, **other.later},
            {**self.parts, **other.parts},
            self.piggyback & other.piggyback,  # a forward is noted or not whatever its way
            self.cheap | other.cheap,
        )


@dataclass(frozen=True, slots=True)
class Window:
    """A wait for another stage."""

    op: Op
    flow: Flow
    """Of the micro-batch that is waited for."""
    extent: Extent = Extent.WHOLE
    """Of its visit."""

    @property
    def name(self) -> str:
        """The name that plans have for it in the passage of that micro-batch."""
        return self.op.value if self.extent is Extent.WHOLE else f"{self.op.value}.{self.extent}"

    @property
    def content(self) -> str:
        """The name that profiles have for what comes."""
        kind = "activation" if self.op is Op.RECV_F else "gradient"
        part = "" if self.extent is Extent.WHOLE else f" of the {self.extent}"
        return f"received {kind}{part}"

    @property
    def behind(self) -> tuple[str, str]:
        """The names that plans have for it in passages that are over, in order and swapped."""
        return NEXT_RECV_B if self.op is Op.RECV_B else "RECV_F", NEXT_RECV


class Seen(Protocol):
    """Sees the kernels of one passage; a context manager of the thread that executes them."""

    def __enter__(self) -> object:
        """Begin, or go on."""

    def __exit__(self, *error: Any) -> None:
        """Pause."""

    def enter(self, place: Place) -> None:
        """Say which pass comes next."""

    def begin(self) -> None:
        """A call begins."""

    def end(self) -> None:
        """It was given to the device."""

    def exchange(self, given: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """See what inner ranks have computed together, and what this one has given for it."""

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, spot: Spot | None) -> None:
        """See a call that has been made.

        Args:
            func: what was called.
            args: of the call.
            kwargs: of the call.
            result: of the call, as it counts.
            spot: of the kernel; None: it is none that is executed twice.
        """


class Planner(Protocol):
    """Has the first steps of a trainer's stage recorded, and makes a plan of them."""

    @property
    def standing(self) -> Standing:
        """How far it has come."""

    def align(self, standings: Sequence[Standing]) -> None:
        """Begin anew if the ranks of the cell have not come equally far.

        Args:
            standings: of each of them.
        """

    def begin_program(self, firsts: Mapping[Way, Flow]) -> Orders | None:
        """A program begins; return what the plan says, once there is one.

        Args:
            firsts: the first micro-batch of each way through the stage; empty: it is not recorded.

        Raises:
            InvalidSpecError: the plan that the job names cannot be used.
        """

    def end_program(self, *, completed: bool) -> None:
        """A program has ended."""

    def seen(self, flow: Flow) -> Seen | None:
        """Return who sees a micro-batch's passage; None: nobody does."""

    def received(self, window: Window, tensor: torch.Tensor, wait_s: float) -> None:
        """Note what came from another stage, and how long it was waited for."""

    def reduced(self, waited_s: float) -> None:
        """Note for how long the cell has waited for others in a reduction."""

    def sent(self, flow: Flow, tensor: torch.Tensor) -> None:
        """Note what goes to another stage."""

    def passed(self, flow: Flow, results: Sequence[object]) -> None:
        """A passage is over.

        Args:
            flow: whose.
            results: what it has left beside gradients, if those are tensors.
        """

    def now_s(self) -> float:
        """Return seconds that only grow."""
