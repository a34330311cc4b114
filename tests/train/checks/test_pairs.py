"""Two wrong bits in one step: it ends as an undisturbed one, and something is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.train.checks.step import Ended, Spot, Step
from tests.train.checks.test_flips import draw

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.places import Phase

MUCH = 1 << 30
Setting = tuple[str, Mode, int, int]
"""Model, mode, stages, bytes that checks which wait may keep."""
QUICK: list[Setting] = [
    ("llama", Mode.FULL, 1, 0),
    ("llama bf16", Mode.FULL, 2, MUCH),
    ("moe", Mode.PIGGYBACK, 2, 0),
]
ALL: list[Setting] = [
    (model, mode, stages, waiting)
    for model in ("llama", "llama bf16", "moe", "moe bf16")
    for mode, waiting in ((Mode.FULL, 0), (Mode.FULL, MUCH), (Mode.PIGGYBACK, 0))
    for stages in (1, 2)
]


def place_of(spot: Spot) -> tuple[object, ...]:
    """The kernel, whether it is called in the forward or in the recompute."""
    place = replace(spot.place, phase=Phase.FORWARD)
    return place, spot.stage, spot.ordinal


def run_with(step: Step, mode: Mode, pair: list[tuple[Spot, Flip]]) -> Ended:
    """Run a step with two flips; the second may be of what the first one has made void."""
    (spot, flip), (other, another) = pair
    engines = step._engines[mode]
    for engine in engines:
        engine.checks.take_orders(FlipOrders())
    engines[other.stage].checks.order("other", 0, other.place.phase, another)
    return step.run(mode, flip, spot)


def check_pairs(setting: Setting, num_pairs: int, flipped: list[bool]) -> int:
    """Run steps with two flips each; return in how many something was found."""
    model, mode, stages, waiting_bytes = setting
    covers_forward = mode is Mode.PIGGYBACK
    step = Step(model, recompute=True, stages=stages, micro_batches=1, waiting_bytes=waiting_bytes)
    clean = step.run(Mode.OFF)
    listed = step.list(mode if covers_forward else Mode.OFF)
    spots = [s for s in listed if not covers_forward or s.place.in_pass is Pass.FORWARD]
    rng, num_found = random.Random(str(setting)), 0
    for _ in range(num_pairs):
        pair = [draw(rng, spots) for _ in range(2)]
        if place_of(pair[0][0]) == place_of(pair[1][0]):
            continue  # one kernel that is wrong in several executions: an unreliable device
        if covers_forward:
            pair = [(spot, replace(flip, execution=Execution.PRIMARY)) for spot, flip in pair]
        flipped.clear()
        ended = run_with(step, mode, pair)
        assert ended.digests == clean.digests, pair
        # What is void already is not looked at any more.
        assert bool(ended.findings) == any(flipped), pair
        num_found += bool(ended.findings)
    return num_found


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_two_wrong_bits_in_a_step_change_nothing(setting: Setting, flipped: list[bool]) -> None:
    assert check_pairs(setting, 6, flipped) > 0


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_many_pairs_of_wrong_bits_change_nothing(setting: Setting, flipped: list[bool]) -> None:
    assert check_pairs(setting, 40, flipped) > 20
