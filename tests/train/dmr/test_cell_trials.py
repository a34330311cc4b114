"""Cells that are played in one process: their bits, and wrong ones on the wire and in states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from benchmarks.flips import Tally, take_clean_steps, try_flips
from benchmarks.support.flips.cells import TYPES, CellsChain
from benchmarks.support.flips.chains import run_step
from benchmarks.support.flips.rank import MUCH, RATE, RankTrials, Setting, Variant

from mainstay_core.dmr.flips import Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.compute import comparisons
from mainstay_train.dmr.cell_trials import COMPUTED_WITH, STATE, WIRE
from mainstay_train.dmr.played_cells import NUM_CELLS, PlayedCells
from mainstay_train.dmr.played_exchanges import PlayedExchanges, PlayedGroup

BF16 = Setting(model="Llama bf16", cells=NUM_CELLS, bucket_bytes=1, waiting_bytes=MUCH)
FP32 = replace(BF16, model="Llama fp32")


@pytest.fixture(scope="module")
def chain() -> Iterator[CellsChain]:
    made = CellsChain(BF16)
    yield made
    made.close()


def test_what_cells_send_comes_to_each_as_its_own_piece_until_one_gives_up() -> None:
    exchanges = PlayedExchanges(2)
    one, other = PlayedGroup(exchanges, 0), PlayedGroup(exchanges, 1)
    mine = one.start_exchange(torch.zeros(3), torch.tensor([1.0, 2.0]), (1, 2), (1, 1))
    assert not mine.is_over
    theirs = other.start_exchange(torch.zeros(2), torch.tensor([3.0, 4.0, 5.0]), (1, 1), (2, 1))
    assert mine.is_over
    one.finish_exchange(mine)
    other.finish_exchange(theirs)
    assert mine.received.tolist() == [1, 3, 4]
    assert theirs.received.tolist() == [2, 5]

    alone = one.start_exchange(torch.zeros(2), torch.zeros(2), (1, 1), (1, 1))
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(one.finish_exchange, alone)
        other.abandon(())
        assert isinstance(waits.exception(), GroupEnded)
    assert alone.is_over
    assert one.ended is not None
    with pytest.raises(GroupEnded):
        one.start_exchange(torch.zeros(2), torch.zeros(2), (1, 1), (1, 1))


def test_three_cells_come_to_the_bits_of_one_that_computes_all_types() -> None:
    """So what is played reduces, votes and applies as it should."""
    three = [RankTrials(FP32, cell, Variant.OFF).engine for cell in range(NUM_CELLS)]
    (one,) = [RankTrials(FP32, 0, Variant.OFF).engine]
    types = sorted(t for each in TYPES for t in each)
    together, alone = PlayedCells(three, TYPES, RATE), PlayedCells([one], [types], RATE)
    for step in range(2):
        states = together.run(step).states
        assert [*set(states)] == [*alone.run(step).states]
    together.close()
    alone.close()


@pytest.mark.parametrize(
    "variant", [pytest.param(Variant.NAIVE, marks=pytest.mark.chaos), Variant.DYNAMIC]
)
def test_flips_of_all_classes_are_found_in_several_cells(
    chain: CellsChain, variant: Variant
) -> None:
    tally = Tally()
    try_flips(chain, variant, 11, random.Random(3), tally, "cells")
    assert tally.broken == []
    kinds = {kind for kind, what in tally.counts if what == "drawn"}
    assert kinds >= {WIRE, STATE, "reduce", "apply"}
    assert tally.counts[WIRE, "found"] == 1


def test_a_wrong_bit_on_the_wire_is_found_by_its_digest_and_by_nothing_else(
    chain: CellsChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    spots = [spot for spot in chain.list_spots(Variant.OFF) if spot.where is Where.WIRE]
    assert {spot.rank for spot in spots} == set(range(NUM_CELLS))
    flip = Flip(in_pass=Pass.STEP, where=Where.WIRE, element=5, bit=29)
    chain.reset(Variant.OFF)
    clean, _ = run_step(chain, Variant.OFF)

    def come_to(variant: Variant) -> tuple[bool, bool]:
        chain.reset(variant)
        chain.order(variant, flip, spots[-1])
        ended, _ = run_step(chain, variant)
        return bool(ended[1]), ended[0] == clean[0]

    assert come_to(Variant.OFF) == (False, False)
    assert come_to(Variant.NAIVE) == (True, True)
    monkeypatch.setattr(comparisons, "tell_arrived", lambda *_: "")
    assert come_to(Variant.NAIVE) == (False, False)


@pytest.mark.parametrize(
    "setting", [BF16, pytest.param(FP32, marks=pytest.mark.chaos)], ids=["bf16", "fp32"]
)
def test_state_that_only_apply_reads_heals_and_what_is_computed_with_is_promised_nothing(
    setting: Setting,
) -> None:
    chain = CellsChain(setting)
    spots = [spot for spot in chain.list_spots(Variant.OFF) if spot.where is Where.STATE]
    late = {spot.part for spot in spots if spot.kind == COMPUTED_WITH}
    is_bf16 = setting is BF16
    assert late == {StatePart.COMPUTE if is_bf16 else StatePart.MASTERS}
    assert {spot.part for spot in spots} - late == (
        {StatePart.MASTERS, StatePart.MOMENTS} if is_bf16 else {StatePart.MOMENTS}
    )
    last = {spot.part: spot for spot in spots if spot.rank == 1}  # all of the last block is used
    for part, spot in last.items():
        about = {"where": Where.STATE, "block": spot.place.block, "part": part}
        flip = Flip(in_pass=Pass.STEP, element=3000, bit=12, **about)
        tried = chain.try_state(Variant.NAIVE, spot, flip)
        assert tried.effective, spot
        assert tried.equal == tried.is_promised, spot
        assert tried.found or not tried.is_promised, spot
    chain.close()


def test_clean_steps_of_cells_raise_no_alarm_in_any_variant(chain: CellsChain) -> None:
    for variant in (Variant.NAIVE, Variant.DYNAMIC, Variant.AUTO):
        tally = Tally()
        take_clean_steps(chain, variant, 2, tally, "cells")
        assert (tally.num_clean, tally.num_alarms, tally.broken) == (2, 0, [])


def test_a_step_on_which_no_votes_can_agree_fails() -> None:
    """Of two cells with other states nobody knows which is right."""
    engines = [RankTrials(FP32, cell, Variant.NAIVE).engine for cell in range(2)]
    cells = PlayedCells(engines, [(0, 1), (2,)], RATE)
    cells.reset()
    flip = Flip(in_pass=Pass.STEP, where=Where.STATE, part=StatePart.MOMENTS, element=7, bit=29)
    found = cells.follow(1, flip, [("",), ("",)])
    cells.close()
    assert not found.found
    assert "differ from the rest of the stage" in found.why
