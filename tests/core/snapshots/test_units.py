"""Units tile a position's state exactly; whatever does not is refused by name."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.units import (
    Block,
    Parameter,
    ParameterSlice,
    Position,
    Span,
    UnitKind,
    UnitSpec,
    merge_spans,
    tile_position,
)

HERE = Position(stage=1)


def block_of(*sizes: int, name: str = "layers.3") -> Block:
    """A block whose parameters ``p0``, ``p1`` ... have these elements."""
    parameters, offset = [], 0
    for number, size in enumerate(sizes):
        parameters.append(Parameter(name=f"p{number}", offset=offset, num_elements=size))
        offset += -(-size // 32) * 32
    return Block(name=name, parameters=tuple(parameters), num_elements=offset)


def unit_of(name: str, *slices: tuple[str, int, int | None]) -> UnitSpec:
    return UnitSpec(
        name=name,
        kind=UnitKind.EXPERT,
        slices=tuple(ParameterSlice(parameter=p, start=a, stop=b) for p, a, b in slices),
    )


def holds_each_element_once(block: Block, units: list[UnitSpec]) -> bool:
    """The same question, element by element; for units whose edges are good."""
    held: dict[int, int] = dict.fromkeys(range(block.num_elements), 0)
    offsets = {parameter.name: parameter for parameter in block.parameters}
    for unit in units:
        for part in unit.slices:
            parameter = offsets[part.parameter]
            stop = parameter.num_elements if part.stop is None else part.stop
            end = -(-stop // 32) * 32
            for element in range(parameter.offset + part.start, parameter.offset + end):
                held[element] += 1
    return all(times == 1 for times in held.values())


def test_a_block_that_names_no_units_is_one_unit_under_its_own_name() -> None:
    (unit,) = tile_position(HERE, [(block_of(40, 33), ())])

    assert (unit.name, unit.kind, unit.position) == ("layers.3", UnitKind.LAYER, HERE)
    assert unit.spans == (Span(start=0, stop=128),)
    assert unit.num_elements == 128


def test_a_block_without_parameters_has_no_unit() -> None:
    assert tile_position(HERE, [(block_of(), ())]) == ()


def test_stacked_experts_are_slices_and_padding_belongs_to_the_last() -> None:
    block = block_of(64, 40)

    first, second, rest = tile_position(
        HERE,
        [
            (
                block,
                (
                    unit_of("expert.0", ("p0", 0, 32)),
                    unit_of("expert.1", ("p0", 32, None)),
                    UnitSpec(
                        name="rest",
                        kind=UnitKind.REST,
                        slices=(ParameterSlice(parameter="p1"),),
                    ),
                ),
            )
        ],
    )

    assert first.spans == (Span(start=0, stop=32),)
    assert second.name == "layers.3.expert.1"
    assert second.spans == (Span(start=32, stop=64),)
    assert rest.spans == (Span(start=64, stop=128),)


@pytest.mark.parametrize(
    ("units", "field", "problem"),
    [
        (
            [unit_of("a", ("p0", 0, None)), unit_of("b", ("p0", 32, None), ("p1", 0, None))],
            "layers.3.units",
            "a and b both hold elements [32:64] of p0",
        ),
        ([unit_of("a", ("p0", 0, None))], "layers.3.units", "none holds elements [0:40] of p1"),
        (
            [unit_of("a", ("p0", 32, None), ("p1", 0, None))],
            "layers.3.units",
            "none holds elements [0:32] of p0",
        ),
        (
            [unit_of("a", ("p0", 0, 33))],
            "layers.3.units.a.p0",
            "is cut at element 33, must be cut at a multiple of 32 or at its end",
        ),
        (
            [unit_of("a", ("p0", 8, 64))],
            "layers.3.units.a.p0",
            "is cut at element 8, must be cut at a multiple of 32 or at its end",
        ),
        (
            [unit_of("a", ("p0", 0, 96))],
            "layers.3.units.a.p0",
            "is [0:96], must be a part of [0:64] that is not empty",
        ),
        (
            [unit_of("a", ("p0", 32, 32))],
            "layers.3.units.a.p0",
            "is [32:32], must be a part of [0:64] that is not empty",
        ),
        (
            [unit_of("a", ("bias", 0, None))],
            "layers.3.units.a",
            "names the parameter bias, which layers.3 does not have",
        ),
        ([unit_of("a")], "layers.3.units.a", "has no slice, must have at least one"),
        (
            [unit_of("a", ("p0", 0, None)), unit_of("a", ("p1", 0, None))],
            "layers.3.units",
            "has two units named a",
        ),
        (
            [unit_of("a", ("p0", 0, None), ("p1", 0, None), ("p1", 0, 32))],
            "layers.3.units",
            "a and a both hold elements [0:32] of p1",
        ),
    ],
)
def test_units_that_do_not_tile_their_block_are_refused_by_name(
    units: list[UnitSpec], field: str, problem: str
) -> None:
    with pytest.raises(InvalidSpecError, match=re.escape(f"{field}: {problem}")):
        tile_position(HERE, [(block_of(64, 40), units)])


def test_names_are_unique_in_the_whole_position() -> None:
    outer = block_of(32, name="layers")
    inner = block_of(32, name="layers.3")

    with pytest.raises(InvalidSpecError, match=r"two units named layers\.3"):
        tile_position(HERE, [(outer, (unit_of("3", ("p0", 0, None)),)), (inner, ())])


def test_a_buffer_with_a_gap_is_no_layout() -> None:
    shifted = Parameter(name="p0", offset=32, num_elements=32)

    with pytest.raises(InvalidSpecError, match="starts at 32, must at 0"):
        tile_position(HERE, [(Block(name="b", parameters=(shifted,), num_elements=64), ())])
    with pytest.raises(InvalidSpecError, match="has 64 elements, its parameters take 32"):
        tile_position(
            HERE,
            [
                (
                    Block(
                        name="b",
                        parameters=(Parameter(name="p0", offset=0, num_elements=20),),
                        num_elements=64,
                    ),
                    (),
                )
            ],
        )


@pytest.mark.parametrize("seed", range(8))
def test_accepted_is_exactly_what_holds_each_element_once(seed: int) -> None:
    rng = random.Random(seed)
    accepted = 0
    for _ in range(500):
        sizes = [rng.choice((20, 32, 64, 70, 96)) for _ in range(rng.randint(1, 3))]
        block = block_of(*sizes)
        pieces = []
        for number, size in enumerate(sizes):
            cuts = sorted(rng.sample(range(0, size, 32), rng.randint(0, len(range(0, size, 32)))))
            edges = sorted({0, *cuts, size})
            pieces += [(f"p{number}", a, b) for a, b in itertools.pairwise(edges)]
        if rng.random() < 0.3:
            pieces.append(rng.choice(pieces))
        if rng.random() < 0.3:
            pieces.pop(rng.randrange(len(pieces)))
        rng.shuffle(pieces)
        number_of_units = rng.randint(1, 3)
        units = [
            unit_of(f"u{number}", *pieces[number::number_of_units])
            for number in range(number_of_units)
            if pieces[number::number_of_units]
        ]
        if not units:
            continue
        if not holds_each_element_once(block, units):
            with pytest.raises(InvalidSpecError):
                tile_position(HERE, [(block, units)])
            continue
        accepted += 1
        tiled = tile_position(HERE, [(block, units)])
        spans = sorted(span for unit in tiled for span in unit.spans)
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
        assert spans[-1].stop == block.num_elements
        assert all(unit.spans == merge_spans(unit.spans) for unit in tiled)
    assert accepted > 100
