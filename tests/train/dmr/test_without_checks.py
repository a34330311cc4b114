"""Jobs without checks: what of a wrong bit is noticed, and what is not.

Each case belongs to a row of the table "What is noticed without checks" in
docs/silent-corruption.md; tests/core/test_silent_corruption_table.py has the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from benchmarks.support.flips.cells import TYPES
from benchmarks.support.flips.rank import BATCH, RATE, RankTrials, Setting, Spot, Variant

from mainstay_core.dmr.flips import Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_train.checks.places import Phase
from mainstay_train.dmr.cell_trials import WIRE
from mainstay_train.dmr.flip_trials import RECOMPUTE
from mainstay_train.dmr.played_cells import NUM_CELLS, PlayedCells, StepEnd

WRONG = 0
"""The cell that gets a wrong bit: of all it alone has a partial of two types."""
EXPONENT = 24
"""A bit that makes a number four times as large or a quarter, in fp32 and, modulo 16, in bf16."""
ELEMENT = 81
"""Of the sixth token: attention gives the first one itself, whatever its products are."""


class Unchecked:
    """Cells of a stage that check nothing: they vote, and do what their votes say."""

    def __init__(self, num_cells: int, model: str = "Llama fp32") -> None:
        # Each block is a bucket of its own, so that all cells own some.
        setting = Setting(model=model, recompute=1.0, cells=num_cells, bucket_bytes=1)
        self._ranks = [RankTrials(setting, cell, Variant.OFF) for cell in range(num_cells)]
        self.cells = PlayedCells([rank.engine for rank in self._ranks], TYPES[:num_cells], RATE)
        self.clean = self.run(None)

    def spots(self) -> Sequence[Spot]:
        """Return every place of a step where a wrong bit can be put in."""
        self.cells.reset()
        self._ranks[WRONG].listen()
        self.cells.run(0)
        return self._ranks[WRONG].heard()

    def run(self, flip: Flip | None, phase: Phase = Phase.FORWARD, step: int = 0) -> list[StepEnd]:
        """Take three steps, with a wrong bit in one of them."""
        self.cells.reset()
        checks = self.cells.engines[WRONG].checks
        if flip is not None:
            checks.order("flip", step, phase, flip)
        ends = [self.cells.run(number) for number in range(3)]
        assert checks._orders.is_empty
        assert [finding for rank in self._ranks for finding in rank.findings] == []
        return ends


@pytest.fixture(scope="module")
def three() -> Iterator[Unchecked]:
    made = Unchecked(NUM_CELLS)
    yield made
    made.cells.close()


def flip_at(spot: Spot, bit: int) -> Flip:
    place = spot.place
    return Flip(
        in_pass=place.in_pass,
        shard_type=place.shard_type,
        micro_batch=place.micro_batch,
        block=place.block,
        operator=spot.ordinal,
        element=ELEMENT,
        bit=bit,
        where=spot.where,
    )


def is_unnoticed(ends: Sequence[StepEnd], clean: Sequence[StepEnd]) -> bool:
    """Whether no vote was refused, and all cells have the same state, which is a wrong one."""
    return all(
        end.refusals == () and len(set(end.states)) == 1 and end.states != other.states
        for end, other in zip(ends, clean, strict=True)
    )


@pytest.mark.parametrize(
    "kind",
    ["forward pass", RECOMPUTE, "backward pass", "weight pass", "sums of types", WIRE, BATCH],
)
def test_all_cells_agree_on_what_one_has_computed_received_or_read_wrongly(
    three: Unchecked, kind: str
) -> None:
    spots = [spot for spot in three.spots() if spot.kind == kind]
    products = [spot for spot in spots if spot.kernel == "aten.mm"]
    first, *_, last = products or [*spots, *spots]
    # The last product of a recompute is the output of its block, which no gradient needs.
    for spot in (first,) if kind == RECOMPUTE else (first, last):
        ends = three.run(flip_at(spot, 0 if kind == BATCH else EXPONENT), spot.place.phase)

        assert is_unnoticed(ends, three.clean), spot


def test_all_cells_get_what_an_owner_has_summed_wrongly(three: Unchecked) -> None:
    spots = [spot for spot in three.spots() if spot.place.phase is Phase.REDUCE]
    adds = [spot for spot in spots if spot.kernel.startswith("aten.add")]

    ends = three.run(flip_at(adds[0], EXPONENT), Phase.REDUCE)

    assert is_unnoticed(ends, three.clean), adds[0]


def test_a_norm_that_one_cell_computes_wrongly_is_refused_and_nobody_is_named(
    three: Unchecked,
) -> None:
    spots = [spot for spot in three.spots() if spot.place.phase is Phase.REDUCE]
    (*_, last) = [spot for spot in spots if not spot.kernel.startswith("aten.add")]

    ends = three.run(flip_at(last, EXPONENT), Phase.REDUCE)

    (why,) = ends[0].refusals
    assert "its cells disagree" in why
    assert [end.states for end in ends] == [end.states for end in three.clean]


def test_masters_that_one_of_three_cells_applies_wrongly_are_named_in_the_next_vote(
    three: Unchecked,
) -> None:
    (spot, *_) = [spot for spot in three.spots() if spot.kernel == "aten._fused_adamw_"]

    ends = three.run(flip_at(spot, EXPONENT), Phase.APPLY)

    assert ends[0].refusals == (), "not in the vote of its own step"
    assert len(set(ends[0].states)) == 2
    (why,) = ends[1].refusals
    assert f"r{WRONG}.s0.i0" in why
    assert "differ from the rest of the stage" in why
    assert [end.states for end in ends[1:]] == [end.states for end in three.clean[1:]]


def test_masters_that_the_only_cell_applies_wrongly_are_never_found() -> None:
    one = Unchecked(1)
    (spot, *_) = [spot for spot in one.spots() if spot.kernel == "aten._fused_adamw_"]

    ends = one.run(flip_at(spot, EXPONENT), Phase.APPLY)
    one.cells.close()

    assert is_unnoticed(ends, one.clean)


def test_no_vote_compares_moments(three: Unchecked) -> None:
    # A low bit, as a high one moves the masters, which the next vote compares; but not one of the
    # lowest, which go as the gradient is added.
    flip = Flip(
        in_pass=Pass.STEP, where=Where.STATE, part=StatePart.MOMENTS, block=1, element=5, bit=5
    )

    ends = three.run(flip, step=1)

    assert [end.refusals for end in ends] == [(), (), ()]
    assert len(set(ends[1].states)) == 2, "one cell has another state"


def test_all_cells_agree_on_what_one_has_computed_with_a_wrong_copy() -> None:
    narrow = Unchecked(NUM_CELLS, "Llama bf16")
    last = len(narrow.cells.engines[WRONG].state.blocks) - 1  # all of it is computed with
    about = {"where": Where.STATE, "part": StatePart.COMPUTE, "block": last}

    ends = narrow.run(Flip(in_pass=Pass.STEP, element=3000, bit=12, **about))
    narrow.cells.close()

    assert is_unnoticed(ends, narrow.clean)
