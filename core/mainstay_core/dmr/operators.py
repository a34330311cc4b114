"""Describes the operators of a stage and the graph that their tensors make.

An operator is one call inside a pass of a block, e.g. a matrix product of a block's forward. What
is done once a step (the sum of a type, norms, apply, the cast, the batch) are operators, too, of
the pass ``step``. A forward operator that activation checkpointing recomputes stands here once: its
recompute is a second execution of it (:mod:`mainstay_core.dmr.profiles` says which ones have one).

Checks execute operators again (SpareTrain, section 3), so the graph must say all that an operator
reads and writes. What it overwrites in place is named, too: a later check needs a copy of it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from mainstay_core.base.bounds import Count, Index, Longest, Name, Seconds
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote

MAX_OPERATORS = 1 << 18
"""Operators of a stage's profile: a thousand blocks of 250."""
MAX_BLOCK_OPERATORS = 2048
"""Operators of a block, those of the step left out: planners keep the square of it in bits."""
MAX_TENSORS = 1 << 19
"""Tensors of a stage's profile."""
MAX_OPERANDS = 4096
"""Tensors that one operator reads, or makes."""

OperatorNames = Annotated[tuple[Name, ...], Longest(MAX_OPERATORS)]
TensorNames = Annotated[tuple[Name, ...], Longest(MAX_TENSORS)]
Operands = Annotated[tuple[Name, ...], Longest(MAX_OPERANDS)]


class Pass(enum.StrEnum):
    """The pass of a block, or of the step, in which an operator is called."""

    __hash__ = str.__hash__  # kernels are looked up by it, and Enum's own takes longer

    FORWARD = "forward"
    BACKWARD = "backward"
    """The gradient of a block's input."""
    WEIGHT = "weight"
    """The gradient of a block's weights."""
    STEP = "step"
    """Once a step: sums, norms, apply, cast, batch."""


class Origin(enum.StrEnum):
    """The place that a tensor comes from."""

    MADE = "made"
    """An operator of the stage makes it."""
    ADDRESSED = "addressed"
    """It can be had again at any time, and is compared there: weights, the batch."""
    RECEIVED = "received"
    """Another stage has made it and compares it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor that operators read or make."""

    name: Name
    size_bytes: Count
    origin: Origin = Origin.MADE


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call inside a pass of a block."""

    block: Index
    in_pass: Pass
    ordinal: Count
    """Its place among the operators of its block and pass."""
    name: Name
    """The function that is called, for people."""
    inputs: Operands
    outputs: Operands
    median_s: Seconds
    """Of one execution, without communication."""
    static: bool = True
    """Whether shapes and times are the same in every step. If not, the dynamic planner has it."""
    communication_s: Seconds = 0.0
    """Spent to gather its operands; 0 if it does not communicate. An execution right after another
    one uses the same operands, a later one gathers them again."""
    overwrites: Operands = ()
    """Inputs whose memory it writes, so that nobody can read them afterwards."""
    compared: bool = False
    """Whether its outputs are compared anyway: by the vote, or by another cell."""
    waits: bool = field(default=True, metadata=OMITTED)
    """Whether trainers can execute it again later: not what draws, writes to its operands, or makes
    numbers that the host reads."""

    @property
    def id(self) -> str:
        """Return its identity in the stage, e.g. ``3/weight/0``."""
        return f"{self.block}/{self.in_pass.value}/{self.ordinal}"

    @property
    def replay_s(self) -> float:
        """Return how long an execution takes that gathers its operands again."""
        return self.median_s + self.communication_s


class Graph:
    """The operators of a stage in the order of their first execution, and who reads what.

    Operators are addressed by their place in that order.

    Args:
        tensors: all that operators read or make.
        operators: in the order in which the primary path executes them.

    Raises:
        InvalidSpecError: a name is not known or used twice, a tensor is read before it is made or
            after it is overwritten, or is made twice or never; the field is named.
    """

    def __init__(self, tensors: Sequence[Tensor], operators: Sequence[Operator]) -> None:
        self.operators = tuple(operators)
        self.tensors: Mapping[str, Tensor] = _by_name(tensors)
        self.ids: tuple[str, ...] = tuple(operator.id for operator in self.operators)
        self.places: Mapping[str, int] = _places(self.ids)
        self.makers: dict[str, int] = {}
        """By tensor: who makes it."""
        self.readers: dict[str, list[int]] = {name: [] for name in self.tensors}
        """By tensor: who reads it, in order."""
        self.overwriters: dict[str, int] = {}
        """By tensor: who destroys it."""
        for place, operator in enumerate(self.operators):
            self._add(place, operator)
        for number, tensor in enumerate(tensors):
            if tensor.origin is Origin.MADE and tensor.name not in self.makers:
                raise InvalidSpecError(
                    f"tensors[{number}]",
                    f"{tensor.name} has the origin made, but no operator makes it",
                )

    def _add(self, place: int, operator: Operator) -> None:
        field = f"operators[{place}]"
        for name in operator.inputs:
            self._check_readable(f"{field}.inputs", name)
            self.readers[name].append(place)
        for name in operator.overwrites:
            if name not in operator.inputs:
                raise InvalidSpecError(f"{field}.overwrites", f"{name} is none of its inputs")
            self.overwriters[name] = place
        for name in operator.outputs:
            tensor = self._tensor(f"{field}.outputs", name)
            if tensor.origin is not Origin.MADE:
                raise InvalidSpecError(
                    f"{field}.outputs", f"{name} has the origin {tensor.origin.value}, not made"
                )
            if name in self.makers:
                first = self.operators[self.makers[name]].id
                raise InvalidSpecError(
                    f"{field}.outputs",
                    f"{name} is made twice, by {first} and {operator.id}; a tensor that is written "
                    "in place has a new name afterwards",
                )
            self.makers[name] = place
        for kind, names in (("inputs", operator.inputs), ("outputs", operator.outputs)):
            if len(set(names)) < len(names):
                raise InvalidSpecError(f"{field}.{kind}", "lists a tensor twice")

    def _check_readable(self, field: str, name: str) -> None:
        tensor = self._tensor(field, name)
        if tensor.origin is Origin.MADE and name not in self.makers:
            raise InvalidSpecError(field, f"{name} is read before any operator has made it")
        if name in self.overwriters:
            by = self.operators[self.overwriters[name]].id
            raise InvalidSpecError(field, f"{name} is read after {by} has overwritten it")

    def _tensor(self, field: str, name: str) -> Tensor:
        if name not in self.tensors:
            raise InvalidSpecError(field, f"{quote(name)} is not in tensors")
        return self.tensors[name]

    @cached_property
    def blocks(self) -> Mapping[int, tuple[int, ...]]:
        """Return the places of each block's operators, ascending; those of the step left out."""
        found: dict[int, list[int]] = {}
        for place, operator in enumerate(self.operators):
            if operator.in_pass is not Pass.STEP:
                found.setdefault(operator.block, []).append(place)
        return {block: tuple(places) for block, places in sorted(found.items())}

    def find_reaching(self, results: Iterable[str]) -> frozenset[int]:
        """Return the operators from which a path of tensors leads to one of ``results``.

        O(operators and their operands).
        """
        wanted = set(results)
        found = set()
        for place in range(len(self.operators) - 1, -1, -1):
            operator = self.operators[place]
            if not wanted.isdisjoint(operator.outputs):
                found.add(place)
                wanted.update(operator.inputs)
        return frozenset(found)

    def outer_inputs(self, places: Iterable[int]) -> tuple[str, ...]:
        """Return what operators read that none of them makes, each once, in order."""
        inside = set(places)
        found: dict[str, None] = {}
        for place in sorted(inside):
            for name in self.operators[place].inputs:
                if self.makers.get(name) not in inside:
                    found[name] = None
        return tuple(found)

    def size_of(self, names: Iterable[str], until: int = 0) -> int:
        """Return the bytes of tensors that a check has to retain.

        Args:
            names: of the tensors.
            until: number of operators executed when the check is over. Addressed tensors cost
                nothing, unless they are overwritten before that: then the check has a copy.
        """
        tensors = (self.tensors[name] for name in names)
        return sum(
            tensor.size_bytes
            for tensor in tensors
            if tensor.origin is not Origin.ADDRESSED
            or self.overwriters.get(tensor.name, until) < until
        )


def _by_name(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, tensor in enumerate(tensors):
        if tensor.name in found:
            raise InvalidSpecError(
                f"tensors[{number}].name", f"{quote(tensor.name)} is twice there"
            )
        found[tensor.name] = tensor
    return found


def _places(ids: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for place, name in enumerate(ids):
        if name in found:
            raise InvalidSpecError(f"operators[{place}]", f"{name} is there twice")
        found[name] = place
    return found
