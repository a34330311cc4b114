"""Cuts the state of a position into units, and refuses units that do not tile it.

A unit is the smallest thing that is copied by itself: an expert, a gate, the rest of a layer, or a
whole block that does not say its units (MoEvement, arXiv 2412.15411, section 3.2, where it is an
"operator"; for dense models appendix E). A unit names slices of parameters. Its state is what lies
at their places in the block's flat buffer: masters, optimizer moments and compute weights all have
that layout, so one list of spans serves them all.

The units of a block must hold each of its elements once. What one of them holds twice would be
applied twice in a replay, and what none holds would be lost. Padding belongs to the unit that holds
the element before it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from mainstay_core.base.bounds import MAX_BLOCKS, MAX_TYPES, Count, Index, Longest, Name
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.sizes.reduction_sizes import PAD

MAX_UNITS = MAX_TYPES
"""Units of a position."""


class UnitKind(enum.StrEnum):
    """The part that a unit plays in its block; orderings tell experts from the rest by it."""

    EXPERT = "expert"
    GATE = "gate"
    REST = "rest"
    """What a block has beside its experts and its gate."""
    LAYER = "layer"
    """A whole block."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """A place whose ranks have interchangeable states, whatever their replica."""

    stage: Index
    inner: Index = 0

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", inner rank {self.inner}" if self.inner else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The place of one parameter in its block's flat buffer."""

    name: Name
    offset: Count
    """First element. Invariant: a multiple of the layout's padding, 32 elements."""
    num_elements: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The flat buffer of one block: its parameters one behind the other, in ascending order."""

    name: Name
    """Model-wide, e.g. ``layers.3``."""
    parameters: Annotated[tuple[Parameter, ...], Longest(MAX_TYPES)]
    num_elements: Count
    """Elements of the buffer, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Consecutive elements of one parameter, e.g. one expert's rows of a stacked weight."""

    parameter: Name
    start: Count = 0
    stop: Count | None = None
    """The element after the last; None is the parameter's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """A unit as its block declares it."""

    name: Name
    """Unique in the block, e.g. ``expert.5``."""
    kind: UnitKind
    slices: Annotated[tuple[ParameterSlice, ...], Longest(MAX_TYPES)]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """Consecutive elements of a block's flat buffer."""

    start: Count
    stop: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit with its place in the model's state.

    Invariant: spans ascend, are not empty, do not touch, and begin and end at multiples of the
    layout's padding.
    """

    name: Name
    """Model-wide: the block's name, then that in the block, e.g. ``layers.3.expert.5``. A block
    that is one unit gives it its own name."""
    kind: UnitKind
    position: Position
    block: Name
    block_index: Index
    """Of the block in its position, in model order."""
    spans: Annotated[tuple[Span, ...], Longest(MAX_TYPES)]

    @property
    def num_elements(self) -> int:
        """Elements of the state, padding included."""
        return sum(span.stop - span.start for span in self.spans)


class _Piece(NamedTuple):
    """Elements of a block's buffer that a unit claims."""

    start: int
    stop: int
    unit: str


def tile_position(
    position: Position, blocks: Sequence[tuple[Block, Sequence[UnitSpec]]]
) -> tuple[Unit, ...]:
    """Return the units of a position, block by block, in the order of declaration.

    Args:
        position: whose state it is.
        blocks: of the position, in model order, each with its declared units; with none it is one
            unit.

    Raises:
        InvalidSpecError: units do not tile their block, or two units have one name.
    """
    if len(blocks) > MAX_BLOCKS:
        raise InvalidSpecError(str(position), f"has more than {MAX_BLOCKS} blocks")
    units = tuple(
        unit
        for index, (block, declared) in enumerate(blocks)
        for unit in _tile_block(position, index, block, declared)
    )
    if len(units) > MAX_UNITS:
        raise InvalidSpecError(str(position), f"has {len(units)} units, at most {MAX_UNITS}")
    _refuse_twice([unit.name for unit in units], str(position))
    return units


def _tile_block(
    position: Position, index: int, block: Block, declared: Sequence[UnitSpec]
) -> list[Unit]:
    _check_layout(block)
    if not declared and not block.num_elements:
        return []
    if not declared:
        whole = (Span(start=0, stop=block.num_elements),)
        return [_unit(position, index, block, block.name, UnitKind.LAYER, whole)]
    _refuse_twice([unit.name for unit in declared], f"{block.name}.units")
    pieces = [piece for unit in declared for piece in _pieces(block, unit)]
    _refuse_overlap_and_gap(block, sorted(pieces))
    return [
        _unit(
            position,
            index,
            block,
            f"{block.name}.{unit.name}",
            unit.kind,
            merge_spans(Span(start=p.start, stop=p.stop) for p in pieces if p.unit == unit.name),
        )
        for unit in declared
    ]


def _unit(
    position: Position,
    index: int,
    block: Block,
    name: str,
    kind: UnitKind,
    spans: tuple[Span, ...],
) -> Unit:
    return Unit(
        name=name,
        kind=kind,
        position=position,
        block=block.name,
        block_index=index,
        spans=spans,
    )


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same elements as ascending spans that do not touch."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            last = merged.pop()
            span = Span(start=last.start, stop=max(last.stop, span.stop))
        merged.append(span)
    return tuple(merged)


def _check_layout(block: Block) -> None:
    """Refuse a buffer that is no layout: then no unit could tile it."""
    end = 0
    for parameter in block.parameters:
        if parameter.offset != end:
            raise InvalidSpecError(
                f"{block.name}.{parameter.name}", f"starts at {parameter.offset}, must at {end}"
            )
        end = parameter.offset + _padded(parameter.num_elements)
    if block.num_elements != end:
        raise InvalidSpecError(
            block.name, f"has {block.num_elements} elements, its parameters take {end}"
        )


def _padded(num_elements: int) -> int:
    return -(-num_elements // PAD) * PAD


def _pieces(block: Block, unit: UnitSpec) -> list[_Piece]:
    """Return what a unit claims of the buffer, the padding behind a parameter's end included."""
    field = f"{block.name}.units.{unit.name}"
    if not unit.slices:
        raise InvalidSpecError(field, "has no slice, must have at least one")
    parameters = {parameter.name: parameter for parameter in block.parameters}
    pieces = []
    for part in unit.slices:
        parameter = parameters.get(part.parameter)
        if parameter is None:
            raise InvalidSpecError(
                field, f"names the parameter {part.parameter}, which {block.name} does not have"
            )
        start, stop = _edges(f"{field}.{part.parameter}", parameter, part)
        pieces.append(_Piece(start, stop, unit.name))
    return pieces


def _edges(field: str, parameter: Parameter, part: ParameterSlice) -> tuple[int, int]:
    count = parameter.num_elements
    stop = count if part.stop is None else part.stop
    if not 0 <= part.start < stop <= count:
        raise InvalidSpecError(
            field, f"is [{part.start}:{stop}], must be a part of [0:{count}] that is not empty"
        )
    for edge in (part.start, stop):
        if edge % PAD and edge != count:
            raise InvalidSpecError(
                field,
                f"is cut at element {edge}, must be cut at a multiple of {PAD} or at its end",
            )
    return parameter.offset + part.start, parameter.offset + _padded(stop)


def _refuse_overlap_and_gap(block: Block, pieces: Sequence[_Piece]) -> None:
    """Raise unless sorted pieces hold each element of the block once."""
    field = f"{block.name}.units"
    at, before = 0, ""
    for piece in pieces:
        if piece.start < at:
            raise InvalidSpecError(
                field,
                f"{before} and {piece.unit} both hold "
                f"{_elements(block, piece.start, min(at, piece.stop))}",
            )
        if piece.start > at:
            raise InvalidSpecError(field, f"none holds {_elements(block, at, piece.start)}")
        at, before = piece.stop, piece.unit
    if at < block.num_elements:
        raise InvalidSpecError(field, f"none holds {_elements(block, at, block.num_elements)}")


def _elements(block: Block, start: int, stop: int) -> str:
    """Return the first parameter in an interval of the buffer, with its elements there."""
    for parameter in block.parameters:
        end = parameter.offset + parameter.num_elements
        if start < end:
            first, last = start - parameter.offset, min(stop, end) - parameter.offset
            return f"elements [{first}:{last}] of {parameter.name}"
    return f"elements [{start}:{stop}] of the buffer"


def _refuse_twice(names: Sequence[str], field: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidSpecError(field, f"has two units named {name}")
        seen.add(name)
