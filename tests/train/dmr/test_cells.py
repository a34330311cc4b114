"""Ranks of a cell plan alike: recomputes as checks, flips in sums, a rank that has just come."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from benchmarks.flips import Tally, spots_of, step_with, take_clean_steps, try_flips, warm
from benchmarks.support.flips.chains import ProcessChain, run_step
from benchmarks.support.flips.rank import COLLECTIVE, MUCH, Setting, Variant, job_of
from tests.train.crew import Nursery

from mainstay_core.base.shape import Order
from mainstay_core.dmr.static import plan_checks
from mainstay_core.wire.profiling import ProfileQuestion
from mainstay_train.dmr.answer import profile_stage

CELL = Setting(model="Llama fp32", recompute=1.0, stages=1, inner=2, waiting_bytes=MUCH)


@pytest.fixture(scope="module")
def chain(nursery: Nursery) -> Iterator[ProcessChain]:
    made = ProcessChain(CELL, nursery)
    yield made
    made.close()


def test_ranks_of_a_cell_make_one_plan_and_flips_of_their_sums_are_found(
    chain: ProcessChain,
) -> None:
    chain.reset(Variant.OFF)
    clean, _ = run_step(chain, Variant.OFF)
    warm(chain, Variant.AUTO)
    standings = chain.standings(Variant.AUTO)
    assert len(set(standings)) == 1
    assert standings[0][-2] > 0, "a plan is followed"
    chain.reset(Variant.AUTO)
    assert run_step(chain, Variant.AUTO) == (clean, 0)

    sums = spots_of(chain, Variant.AUTO)[COLLECTIVE]
    for spot in (sums[0], sums[-1]):
        flip = replace(spot.flip(random.Random(5), first_only=True), bit=30)
        (digests, findings), _ = step_with(chain, Variant.AUTO, spot, flip)
        assert digests == clean[0]
        assert findings, spot


def test_ranks_of_a_cell_follow_a_plan_that_one_process_has_made_for_all_of_them(
    chain: ProcessChain,
) -> None:
    """It has played each rank of the cell in turn, and sent nothing."""
    question = ProfileQuestion(
        config=job_of(CELL), stage=0, steps=2, window_s=1.0, budget_bytes=MUCH
    )
    plan = plan_checks(profile_stage(question, time.perf_counter))
    chain.reset(Variant.OFF)
    clean, _ = run_step(chain, Variant.OFF)
    for rank in range(CELL.inner):
        chain.renew(Variant.AUTO, rank, plan)

    warm(chain, Variant.AUTO)

    standings = chain.standings(Variant.AUTO)
    assert len(set(standings)) == 1
    assert standings[0][-2] > 0, "the plan is followed"
    chain.reset(Variant.AUTO)
    assert run_step(chain, Variant.AUTO) == (clean, 0)
    for rank in range(CELL.inner):
        chain.renew(Variant.AUTO, rank)


@pytest.mark.chaos
@pytest.mark.parametrize("variant", [Variant.AUTO, Variant.DYNAMIC])
def test_flips_of_all_classes_are_found_where_checks_of_a_cell_wait(
    chain: ProcessChain, variant: Variant
) -> None:
    tally = Tally()
    try_flips(chain, variant, 60, random.Random(5), tally, str(CELL))
    assert not tally.broken


@pytest.mark.chaos
@pytest.mark.parametrize("order", [*Order])
def test_bits_are_the_same_whatever_checks_of_a_cell_wait_for(
    nursery: Nursery, order: Order
) -> None:
    """How many are executed while a sum is under way depends on the other rank."""
    chosen = replace(CELL, stages=2, micro_batches=2, order=order)
    with closing(ProcessChain(chosen, nursery)) as chain:
        tally = Tally()
        take_clean_steps(chain, Variant.DYNAMIC, 2, tally, str(chosen))
        try_flips(chain, Variant.DYNAMIC, 4, random.Random(3), tally, str(chosen))
    assert not tally.broken
    assert sum(tally.counts.values()) > 4


@pytest.mark.parametrize(
    "variant", [pytest.param(Variant.AUTO, marks=pytest.mark.chaos), Variant.PIGGYBACK]
)
def test_a_rank_that_has_just_come_executes_what_the_others_do(
    chain: ProcessChain, variant: Variant
) -> None:
    """Else one rank would wait in a collective that the other does not execute."""
    chain.reset(Variant.OFF)
    clean, _ = run_step(chain, Variant.OFF)
    warm(chain, variant)
    chain.renew(variant, 1)
    for _ in range(6):
        chain.reset(variant)
        assert run_step(chain, variant) == (clean, 0)
    assert len(set(chain.standings(variant))) == 1
