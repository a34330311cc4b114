"""A witness names the one of several ranks of a stage whose device is always wrong.

The ranks are processes that compute the tensor-parallel Llama; a sticky fault is put into one of
them. What they tell of a type is what replicas tell in their votes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from benchmarks.support.flips.chains import ProcessChain, StepFailedError
from benchmarks.support.flips.rank import COLLECTIVE, Setting, Spot, Variant
from tests.train.crew import Nursery

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import Ruling, Telling, Told, rule

TYPE, WIDTH = 0, 2
CELLS = Setting(model="Llama fp32", stages=2, inner=WIDTH, micro_batches=2)


def slot(chain: int, position: int) -> Slot:
    return Slot(pod=PodUid(f"{'abc'[chain]}{position}"), index=0)


def judged(right: Telling, wrong: Telling) -> Ruling:
    """What follows where replica 0 tells something else than two others, each time."""
    told = [
        Told(
            quorum=1,
            attempt=attempt,
            replica=chain,
            cells=tuple(slot(chain, position) for position in range(len(right))),
            telling=right if chain else wrong,
        )
        for attempt, chains in ((0, (0, 1)), (1, (0, 1, 2)))
        for chain in chains
    ]
    return rule(told, WIDTH)


def sticky(spot: Spot, rng: random.Random, bit: int | None = None) -> Flip:
    place = spot.place
    return Flip(
        in_pass=place.in_pass,
        shard_type=place.shard_type,
        micro_batch=place.micro_batch,
        block=place.block,
        operator=spot.kernel if spot.ordinal is None else spot.ordinal,
        element=rng.randrange(1 << 20),
        bit=rng.randrange(16, 32) if bit is None else bit,
        execution=Execution.BOTH,
        sticky=True,
    )


@pytest.fixture(scope="module")
def chain(nursery: Nursery) -> Iterator[ProcessChain]:
    made = ProcessChain(CELLS, nursery)
    yield made
    made.close()


def spots_of_type(chain: ProcessChain) -> list[Spot]:
    found = chain.list_spots(Variant.OFF)
    return [
        spot
        for spot in found
        if spot.place.shard_type == TYPE and spot.place.in_pass is not Pass.STEP
    ]


def tell(chain: ProcessChain, *broken: tuple[Spot, Flip]) -> Telling:
    """What the ranks tell of the type, with faults in some devices."""
    chain.reset(Variant.OFF)
    for spot, flip in broken:
        chain.order(Variant.OFF, flip, spot)
    return chain.tell(Variant.OFF, TYPE)


def check(chain: ProcessChain, num_faults: int, seed: int) -> None:
    """Put faults into ranks of stages and passes in turn; whoever is wrong is named alone."""
    spots = spots_of_type(chain)
    right = tell(chain)
    assert all(account.exchanged and not account.is_partial for account in right)
    assert tell(chain) == right
    by_place: dict[object, list[Spot]] = {}
    for spot in spots:
        place = spot.rank, spot.place.phase, spot.place.in_pass, spot.kind == COLLECTIVE
        by_place.setdefault(place, []).append(spot)
    rng = random.Random(seed)
    places = [*by_place.values()]
    num_named = 0
    for number in range(num_faults):
        spot = rng.choice(places[(seed + number) % len(places)])
        try:
            wrong = tell(chain, (spot, sticky(spot, rng)))
        except StepFailedError:
            continue  # a wrong index, for instance, which nobody needs a witness for
        ruling = judged(right, wrong)
        assert ruling.agreed == right
        named = {(d.slot, d.verdict) for d in ruling.deviations}
        if wrong == right:
            assert not named
            continue
        assert named == {(slot(0, spot.rank), Verdict.DETERMINISTIC)}, (spot, ruling.reason)
        num_named += 1
    assert num_named > num_faults // 3


def test_a_sticky_fault_of_a_rank_names_its_device_and_no_other(chain: ProcessChain) -> None:
    check(chain, 18, seed=1)


@pytest.mark.chaos
def test_many_sticky_faults_name_the_device_that_has_them(chain: ProcessChain) -> None:
    check(chain, 200, seed=2)


def test_a_sum_that_is_wrong_on_all_ranks_names_the_whole_cell_and_no_single_device(
    chain: ProcessChain,
) -> None:
    right, rng = tell(chain), random.Random(3)
    sums = [spot for spot in spots_of_type(chain) if spot.kind == COLLECTIVE]
    for stage in range(2):
        one = next(s for s in sums if s.rank == stage * WIDTH and s.place.in_pass is Pass.FORWARD)
        ranks = range(stage * WIDTH, (stage + 1) * WIDTH)
        both = [s for s in sums if s.rank in ranks and s.place == one.place]
        flip = sticky(one, rng, bit=30)
        ruling = judged(right, tell(chain, *((each, flip) for each in both[:1] + both[-1:])))
        assert {d.verdict for d in ruling.deviations} == {Verdict.WIRE}
        assert {d.slot for d in ruling.deviations} == {slot(0, position) for position in ranks}
        assert "which compute together" in ruling.reason
