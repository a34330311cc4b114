"""Describes a flip: one wrong bit that a fault puts into what an operator has computed.

A flip plays a device that computes a wrong number without a word. The fault that carries it says in
which step and at which action of the program (:mod:`mainstay_core.faults.points`); the flip says
which operator, and which bit of what it makes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import MAX_BLOCKS, Count, Index, Name, Range, TypeIndex
from mainstay_core.base.codec import OMITTED
from mainstay_core.dmr.operators import MAX_OPERANDS, MAX_OPERATORS, Pass

MAX_BITS = 128
"""Bits of the widest element, a complex number of two doubles."""

Ordinal = Annotated[int, Range(0, MAX_OPERATORS)]
OutputIndex = Annotated[int, Range(0, MAX_OPERANDS)]
BlockIndex = Annotated[int, Range(0, MAX_BLOCKS)]


class Execution(enum.StrEnum):
    """The executions of an operator that get the wrong bit."""

    PRIMARY = "primary"
    """The first one, whose value goes on."""
    CHECKER = "checker"
    """The second one. Without checks there is none, and nothing happens."""
    BOTH = "both"
    """Both get the same wrong bit, as from a device whose fault repeats itself. They agree, so no
    check sees it."""


class Where(enum.StrEnum):
    """The thing that a flip makes wrong."""

    COMPUTE = "compute"
    """What an operator has computed."""
    WIRE = "wire"
    """What comes from other cells in a reduction."""
    STATE = "state"
    """The state in memory, before a step begins to compute."""
    BATCH = "batch"
    """A fetched batch."""


class StatePart(enum.StrEnum):
    """A part of a stage's state in memory."""

    MASTERS = "masters"
    MOMENTS = "moments"
    """What the optimizer keeps beside the masters."""
    COMPUTE = "compute"
    """The copy that is computed with; in fp32 there is none, and the masters are meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One wrong bit in one output of one operator, or in what no operator has made.

    A field that is None leaves the choice to the program: the flip hits the first operator that
    the other fields fit.
    """

    in_pass: Pass
    """The pass in which the operator is called."""
    shard_type: TypeIndex | None = None
    micro_batch: Index | None = None
    block: BlockIndex | None = None
    """The block's place in its stage, counted from 0."""
    operator: Ordinal | Name | None = None
    """Ordinal of the operator in its block and pass, or the name of a kernel, e.g. ``aten.mm``,
    which is its first call there. Of the pass ``step``: counted from the first operator of the
    fault's phase."""
    output: OutputIndex = 0
    """The output of the operator that is wrong."""
    element: Count
    """The element that is wrong, modulo the number of elements, in the order of the indices."""
    bit: Annotated[int, Range(0, MAX_BITS - 1)]
    """The bit of it, the lowest is 0; modulo the bits of an element."""
    execution: Execution = Execution.PRIMARY
    sticky: bool = field(default=False, metadata=OMITTED)
    """Whether it is a fault of the device: from then on each execution of the operator is wrong by
    this bit, a third one and replays included. Fields that are None mean all that they may mean."""
    where: Where = field(default=Where.COMPUTE, metadata=OMITTED)
    part: StatePart | None = field(default=None, metadata=OMITTED)
    """The part of the state that is wrong; None where it is not the state."""
