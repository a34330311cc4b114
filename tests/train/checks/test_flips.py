"""Steps with a wrong bit: with checks they end as undisturbed ones, and each is found once."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter

import pytest
import torch
from tests.train.checks.step import MODELS, Ended, Spot, Step

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks import checker
from mainstay_train.checks.places import Phase
from mainstay_train.kernels import bits
from mainstay_train.model.workload import WorkloadError

QUICK = [
    ("llama", False, 1),
    ("llama bf16", True, 2),
    ("llama dropout", True, 1),
    ("moe", True, 1),
    ("moe bf16", False, 1),
]
"""Model, recompute, stages."""
ALL = [
    (model, recompute, stages)
    for model in MODELS
    for recompute in (False, True)
    for stages in (1, 2)
]
WRONG = {Execution.PRIMARY: Verdict.PRIMARY_HIT, Execution.CHECKER: Verdict.CHECKER_HIT}


@pytest.fixture(autouse=True)
def small_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checks a high bit of a count would ask for more memory than there is."""
    flip_bit = bits.flip_bit

    def flip(tensor: torch.Tensor, element: int, bit: int) -> bool:
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        return flip_bit(tensor, element, bit % 3 if is_whole else bit)

    monkeypatch.setattr(bits, "flip_bit", flip)


def draw(rng: random.Random, spots: list[Spot]) -> tuple[Spot, Flip]:
    """A place by its phase and pass first: products are few among the kernels."""
    places = Counter((s.place.phase, s.place.in_pass) for s in spots)
    phase, in_pass = rng.choice(sorted(places))
    spot = rng.choice([s for s in spots if (s.place.phase, s.place.in_pass) == (phase, in_pass)])
    flip = spot.flip(
        output=rng.randrange(3),
        element=rng.randrange(1 << 20),
        bit=rng.randrange(64),
        execution=rng.choice([Execution.PRIMARY, Execution.PRIMARY, Execution.CHECKER]),
    )
    return spot, flip


def has_effect(step: Step, clean: Ended, spot: Spot, flip: Flip) -> bool:
    """Whether a flip changes a result where nothing is checked."""
    try:
        return step.run(Mode.OFF, flip, spot).digests != clean.digests
    except (RuntimeError, IndexError, ValueError, MemoryError, WorkloadError):
        return True  # it ended the step


def check_flips(
    setting: tuple[str, bool, int], num_flips: int, seed: int, micro_batches: int = 2
) -> Counter[str]:
    """Run steps with one flip each; return how many had an effect, by place."""
    model, recompute, stages = setting
    step = Step(model, recompute=recompute, stages=stages, micro_batches=micro_batches)
    clean = step.run(Mode.OFF)
    spots = step.list()
    rng = random.Random(f"{seed} {setting}")
    effective: Counter[str] = Counter()
    for _ in range(num_flips):
        spot, flip = draw(rng, spots)
        ended = step.run(Mode.FULL, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        if has_effect(step, clean, spot, flip):
            assert len(ended.findings) == 1, (spot, flip)
            effective[f"{spot.place.phase.value} {spot.place.in_pass.value}"] += 1
        assert len(ended.findings) <= 1  # what has no elements has no bits
        for finding in ended.findings:
            assert (finding.step, finding.ordinal) == (0, spot.ordinal)
            assert (finding.operator, finding.in_pass) == (spot.kernel, spot.place.in_pass)
            assert finding.block == spot.place.name
            assert finding.num_elements == 1
            assert finding.verdict is WRONG[flip.execution]
    return effective


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_each_flip_that_has_an_effect_is_found_once_and_changes_nothing(
    setting: tuple[str, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "MAX_TOLD", 1)  # of a step: each run is one of its own
    micro_batches = 2 if setting == QUICK[0] else 1

    assert sum(check_flips(setting, 12, seed=1, micro_batches=micro_batches).values()) > 0


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_of_two_thousand_flips_each_effective_one_is_found(setting: tuple[str, bool, int]) -> None:
    effective = check_flips(setting, 100, seed=2)

    logging.getLogger(__name__).info("%s: %s", setting, dict(effective))
    # Most of what is drawn for the reduction and for the apply changes nothing: few are left there.
    assert {name.split()[0] for name in effective} >= {"forward", "backward"}
    assert sum(effective.values()) >= 20


@pytest.mark.parametrize("setting", ALL, ids=str)
def test_checks_move_no_bit_and_find_nothing_in_clean_steps(
    setting: tuple[str, bool, int],
) -> None:
    model, recompute, stages = setting
    step = Step(model, recompute=recompute, stages=stages)

    plain, checked = step.run(Mode.OFF), step.run(Mode.FULL)

    assert checked.digests == plain.digests
    assert checked.findings == []


@pytest.mark.parametrize("stages", [1, 2])
def test_the_bits_are_the_same_whichever_share_of_the_blocks_is_recomputed(stages: int) -> None:
    digests, again = set(), []
    for share in (0.0, 0.25, 0.5, 1.0):
        step = Step("llama bf16", recompute=share, stages=stages, micro_batches=1)
        digests.add(step.run(Mode.OFF).digests)
        spots = step.list() if stages == 1 else []
        recomputed = {
            spot.place.block
            for spot in spots
            if (spot.place.phase, spot.place.in_pass) == (Phase.BACKWARD, Pass.FORWARD)
        }
        again.append(len(recomputed))

    assert len(digests) == 1
    assert stages > 1 or again == [0, 1, 2, 3], "the first blocks, never the loss"


def test_kernels_have_the_same_numbers_with_checks_and_without() -> None:
    step = Step("moe", recompute=True)

    spots = step.list(Mode.FULL)

    assert spots == step.list(Mode.OFF)
    assert {spot.place.phase for spot in spots} == set(Phase)
    assert {spot.place.in_pass for spot in spots if spot.place.name} == set(Pass) - {Pass.STEP}


def find(spots: list[Spot], phase: Phase, in_pass: Pass, kernel: str) -> Spot:
    return next(
        spot
        for spot in spots
        if (spot.place.phase, spot.place.in_pass, spot.kernel) == (phase, in_pass, kernel)
    )


def test_what_is_wrong_in_both_executions_is_not_found_and_the_gradient_is_wrong() -> None:
    step = Step("llama", recompute=False)
    clean = step.run(Mode.OFF)
    spot = find(step.list(), Phase.BACKWARD, Pass.WEIGHT, "aten.mm")
    flip = spot.flip(element=3, bit=30, execution=Execution.BOTH)

    ended = step.run(Mode.FULL, flip, spot)

    assert ended.findings == []
    assert ended.digests != clean.digests
    assert ended.digests == step.run(Mode.OFF, flip, spot).digests


def test_a_finding_says_what_was_wrong_and_that_it_was_repaired() -> None:
    step = Step("llama", recompute=True)
    spot = find(step.list(), Phase.FORWARD, Pass.FORWARD, "aten.mm")

    (finding,) = step.run(Mode.FULL, spot.flip(element=5, bit=1), spot).findings

    assert finding.verdict is Verdict.PRIMARY_HIT
    assert finding.remedy is Remedy.REPAIR
    assert finding.place == f"aten.mm (#{spot.ordinal}) in the forward pass of {spot.place.name}"
    assert (finding.shard_type, finding.micro_batch) == (0, 0)
    assert (finding.output, finding.num_elements) == (0, 1)


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
def test_of_a_wrong_sum_of_the_state_the_element_is_counted(execution: Execution) -> None:
    pytest.importorskip("llvmlite")
    # Its operands are large, so one result is kept at a time: but the sums are small.
    step = Step("llama", recompute=False, micro_batches=1)
    spot = find(step.list(), Phase.VOTE, Pass.STEP, "mainstay.row_sums")
    flip = spot.flip(output=2, element=515_686, bit=42, execution=execution)

    (finding,) = step.run(Mode.FULL, flip, spot).findings

    assert (finding.operator, finding.num_elements) == ("mainstay.row_sums", 1)
    assert finding.verdict is WRONG[execution]


def test_no_kernel_of_a_step_makes_what_compiled_code_finds_memory_by() -> None:
    """A high bit of it would end the process, where no check could tell."""
    pytest.importorskip("llvmlite")
    step = Step("llama", recompute=False, micro_batches=1)

    kernels = [spot.kernel for spot in step.list()]

    made = [before for before, k in itertools.pairwise(kernels) if k == "mainstay.row_sums"]
    assert made
    assert "aten.zeros_like" not in made
