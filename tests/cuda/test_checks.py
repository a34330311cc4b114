"""Checks on a device: clean steps raise no alarm, and a flipped bit is found and repaired."""

import random

import pytest
import torch
from tests.train.checks.step import MODELS, Step

from mainstay_core.dmr.flips import Execution
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.dmr.verdicts import Verdict
from mainstay_train.checks import at_once
from mainstay_train.compute import purity
from mainstay_train.kernels import bits
from mainstay_train.model import workload

WRONG = {Execution.PRIMARY: Verdict.PRIMARY_HIT, Execution.CHECKER: Verdict.CHECKER_HIT}
SETTINGS = [
    ("llama", 0.0),
    ("llama bf16", 1.0),
    ("llama dropout", 1.0),
    ("moe", 1.0),
    ("moe bf16", 0.0),
]


@pytest.fixture(autouse=True)
def small_integers(monkeypatch):
    """A wrong index that is used would end the device for this process."""
    flip_bit = bits.flip_bit

    def flip(tensor, element, bit):
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        return flip_bit(tensor, element, 0 if is_whole else bit)

    monkeypatch.setattr(bits, "flip_bit", flip)


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIGGYBACK])
@pytest.mark.parametrize(("model", "recompute"), SETTINGS, ids=str)
def test_checks_move_no_bit_and_find_nothing_in_clean_steps(device, model, recompute, mode):
    step = Step(model, recompute=recompute, device=str(device))
    plain, checked = step.run(Mode.OFF), step.run(mode)
    assert [finding.place for finding in checked.findings] == []
    assert checked.digests == plain.digests


@pytest.mark.parametrize(("model", "recompute"), SETTINGS, ids=str)
def test_a_flipped_bit_is_found_and_repaired(device, model, recompute):
    step = Step(model, recompute=recompute, device=str(device), micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = step.list()
    rng, found, late = random.Random(model), 0, 0
    for _ in range(10):
        spot = rng.choice(spots)
        execution = rng.choice([Execution.PRIMARY, Execution.CHECKER])
        flip = spot.flip(
            output=rng.randrange(3),
            element=rng.randrange(1 << 20),
            bit=rng.randrange(64),
            execution=execution,
        )
        ended = step.run(Mode.FULL, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        assert len(ended.findings) <= 1, (spot, flip)  # what has no elements has no bits
        for finding in ended.findings:
            assert (finding.ordinal, finding.operator) == (spot.ordinal, spot.kernel)
            is_late = finding.verdict is Verdict.UNDECIDED
            assert is_late or finding.verdict is WRONG[execution]
            assert (finding.num_elements, ended.num_refused) == ((0, 1) if is_late else (1, 0))
            late += is_late
        found += len(ended.findings)
    assert found >= 5
    assert device.type == "cpu" or late >= 3, "most kernels are those of blocks"


def test_the_host_looks_at_no_real_number_of_a_blocks_pass(device, monkeypatch):
    step = Step("llama bf16", recompute=1.0, device=str(device), is_flagged=True)
    check, looks = at_once.check, []

    def look(checks, place, call, primary, *given):
        if place.block is not None and primary[1][0].is_floating_point():
            looks.append((place.in_pass, call.kernel.name))
        return check(checks, place, call, primary, *given)

    monkeypatch.setattr(at_once, "check", look)
    assert step.run(Mode.FULL).digests == step.run(Mode.OFF).digests
    # The head changes in place what its forward has left: memory of another action.
    assert {name for _, name in looks} <= {"aten.mul_"}
    assert len(looks) <= 6, "one in each micro-batch"


def test_kernels_have_the_same_numbers_with_checks_and_without(device):
    step = Step("llama", recompute=1.0, device=str(device))
    assert step.list(Mode.FULL) == step.list(Mode.OFF)


@pytest.mark.parametrize("model", ["llama bf16", "moe"])
@pytest.mark.parametrize("plan", [PlanName.NAIVE, PlanName.DYNAMIC])
def test_blocks_are_tried_before_a_trainer_starts(device, model, plan):
    purity.check(workload.load(*MODELS[model]), device, Mode.FULL, plan)
    assert purity.computes_the_same(device)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_compared_flipped_and_repaired(device, dtype):
    tensor = torch.ones(5, 7, device=device).to(dtype).t()
    twin = tensor.clone()
    assert bits.are_equal(tensor, twin)
    assert bits.flip_bit(twin, 11, 3)
    assert not bits.are_equal(tensor, twin)
    assert bits.count_differing(tensor, twin) == 1
    assert bits.digest_of([tensor]) != bits.digest_of([twin])
    bits.overwrite(twin, tensor)
    assert bits.are_equal(tensor, twin)
