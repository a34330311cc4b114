"""Recomputes are compared with forwards: each wrong bit in either is found, none counts."""

from __future__ import annotations

import logging
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
from tests.train.checks.step import MODELS, Spot, Step
from tests.train.checks.test_flips import draw, has_effect

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.schedule import BATCHED_IMPRINT, COMPILED_IMPRINT, is_pointwise_cheaper
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.checks import prices
from mainstay_train.checks.executions import CheckedKernels
from mainstay_train.checks.places import Phase
from mainstay_train.kernels import imprints
from mainstay_train.kernels.calls import UnreliableDeviceError
from mainstay_train.models import attention

SLOT = Slot(pod=PodUid("a"), index=0)

Setting = tuple[str, int]
"""Model, stages."""
QUICK: list[Setting] = [("llama", 2), ("llama bf16", 1), ("llama dropout", 1), ("moe", 1)]
ALL: list[Setting] = [(model, stages) for model in MODELS for stages in (1, 2)]


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether kernels that compute element by element are executed twice at once: they are not."""
    is_cheap = [False]
    monkeypatch.setattr(prices, "is_pointwise_cheaper", lambda *_: is_cheap[0])
    return is_cheap


def is_last(step: Step, spot: Spot) -> bool:
    """Whether a kernel belongs to the block that has no recompute."""
    blocks = step._engines[Mode.OFF][spot.stage].state.blocks
    return blocks[spot.place.block or 0].spec.is_last


def what_follows(step: Step, spot: Spot) -> tuple[Verdict, Remedy]:
    if spot.place.phase is Phase.BACKWARD:
        return Verdict.CHECKER_HIT, Remedy.REPAIR
    if is_last(step, spot):
        return Verdict.PRIMARY_HIT, Remedy.REPAIR
    return Verdict.PRIMARY_HIT, Remedy.VOID_TYPE


def check_flips(setting: Setting, num_flips: int, seed: int, flipped: list[bool]) -> Counter[str]:
    """Run steps with one flip each; return how many have an effect without checks, by phase."""
    model, stages = setting
    step = Step(model, recompute=True, stages=stages, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [spot for spot in step.list(Mode.PIGGYBACK) if spot.place.in_pass is Pass.FORWARD]
    unprotected = frozenset(step.list(Mode.OFF))
    rng = random.Random(f"{seed} {setting}")
    effective: Counter[str] = Counter()
    for _ in range(num_flips):
        spot, flip = draw(rng, spots)
        flip = spot.flip(output=flip.output, element=flip.element, bit=flip.bit)
        flipped.clear()
        ended = step.run(Mode.PIGGYBACK, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        assert [len(ended.findings)] == [int(changed) for changed in flipped], (spot, flip)
        if spot in unprotected and has_effect(step, clean, spot, flip):
            effective[spot.place.phase.value] += 1
        for finding in ended.findings:
            raised = finding.operator == "forward"
            assert raised or (finding.operator, finding.ordinal) == (spot.kernel, spot.ordinal)
            assert finding.block == spot.place.name
            follows = what_follows(step, spot)
            if raised:
                follows = Verdict.PRIMARY_HIT, Remedy.REPAIR
            assert (finding.verdict, finding.remedy) == follows
            assert ended.num_refused == (finding.remedy is Remedy.VOID_TYPE)
    return effective


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_each_flip_in_a_forward_or_a_recompute_is_found_once_and_changes_nothing(
    setting: Setting, flipped: list[bool]
) -> None:
    assert sum(check_flips(setting, 12, 1, flipped).values()) > 0


def test_what_is_executed_twice_for_less_than_its_imprint_is_repaired_at_once(
    cheap: list[bool], flipped: list[bool]
) -> None:
    cheap[0] = True
    step = Step("llama", recompute=True, stages=2, micro_batches=1)
    clean = step.run(Mode.OFF)
    num_changed = 0
    for phase, kernel in product((Phase.FORWARD, Phase.BACKWARD), ("aten.add", "aten.mul")):
        spot = first(step, phase, kernel)
        for execution in (Execution.PRIMARY, Execution.CHECKER):
            flipped.clear()
            flip = spot.flip(element=3, bit=30, execution=execution)
            ended = step.run(Mode.PIGGYBACK, flip, spot)
            assert (ended.digests, ended.num_refused) == (clean.digests, 0)
            assert len(ended.findings) == len(flipped) == 1
            for finding in ended.findings:
                num_changed += 1
                assert (finding.operator, finding.ordinal) == (kernel, spot.ordinal)
    assert num_changed == 8


@pytest.mark.parametrize("is_compiled", [True, False])
def test_without_compiled_code_what_computes_element_by_element_has_no_imprints(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    price = COMPILED_IMPRINT if is_compiled else BATCHED_IMPRINT
    monkeypatch.setattr(imprints, "price", lambda: price)
    monkeypatch.setattr(prices, "is_pointwise_cheaper", is_pointwise_cheaper)
    step = Step("llama", recompute=True, micro_batches=1)
    clean = step.run(Mode.OFF)
    spot = first(step, Phase.FORWARD, "aten.mul")

    ended = step.run(Mode.PIGGYBACK, spot.flip(element=3, bit=30), spot)

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert finding.remedy is (Remedy.VOID_TYPE if is_compiled else Remedy.REPAIR)


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
def test_of_many_flips_in_forwards_and_recomputes_each_effective_one_is_found(
    setting: Setting, flipped: list[bool]
) -> None:
    effective = check_flips(setting, 100, 2, flipped)

    logging.getLogger(__name__).info("%s: %s", setting, dict(effective))
    assert set(effective) == {"forward", "backward"}
    assert sum(effective.values()) >= 20


@pytest.mark.parametrize("setting", ALL, ids=str)
def test_comparing_moves_no_bit_and_finds_nothing_in_clean_steps(setting: Setting) -> None:
    model, stages = setting
    step = Step(model, recompute=True, stages=stages)

    plain, checked = step.run(Mode.OFF), step.run(Mode.PIGGYBACK)

    assert checked.digests == plain.digests
    assert checked.findings == []
    assert checked.num_refused == 0


def test_a_forward_that_a_wrong_index_ends_is_executed_again() -> None:
    step = Step("moe", recompute=True, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [s for s in step.list(Mode.PIGGYBACK) if s.place.phase is Phase.FORWARD]
    spot = next(s for s in spots if s.kernel == "aten.argsort" or s.kernel == "aten.sort")

    ended = step.run(Mode.PIGGYBACK, spot.flip(output=1, element=1, bit=40), spot)

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert (finding.operator, finding.remedy) == ("forward", Remedy.REPAIR)
    assert "IndexError" in finding.reason or "RuntimeError" in finding.reason
    assert ended.num_refused == 0


def test_what_blocks_count_is_checked_where_their_counts_are_joined() -> None:
    step = Step("moe", recompute=True, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [s for s in step.list(Mode.PIGGYBACK) if s.place.in_pass is Pass.BACKWARD]
    join = next(s for s in reversed(spots) if s.kernel == "aten.cat")

    ended = step.run(Mode.PIGGYBACK, join.flip(output=0, element=0, bit=1), join)

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert (finding.verdict, finding.remedy) == (Verdict.PRIMARY_HIT, Remedy.REPAIR)


def first(step: Step, phase: Phase, kernel: str) -> Spot:
    spots = step.list(Mode.PIGGYBACK)
    return next(
        s
        for s in spots
        if (s.place.phase, s.place.in_pass, s.place.name, s.kernel)
        == (phase, Pass.FORWARD, "layers.0", kernel)
    )


def test_a_vote_names_the_type_that_is_void_until_it_is_computed_again() -> None:
    step = Step("llama", recompute=True, micro_batches=1)
    (engine,) = step._engines[Mode.PIGGYBACK]
    spot = first(step, Phase.FORWARD, "aten.mm")
    step.run(Mode.OFF)
    engine.checks.order("flip", 0, Phase.FORWARD, spot.flip(element=3, bit=30))
    step._compute([engine])
    table = [Supply(partial=partial, index=0) for partial in engine.store.held()]

    for _ in range(2):  # to reduce the same again does not help
        engine.reduce(None, table, [0], 0)
        assert engine.ballot(None, table, 0, SLOT, "", 0).bad == (0,)
    engine.types.drop(partial for partial in engine.store.held() if partial.first == 0)
    engine.compute((0, 1), 0, None)
    engine.reduce(None, table, [0], 0)

    assert engine.ballot(None, table, 0, SLOT, "", 0).bad == ()


def test_a_device_of_whose_three_executions_no_two_agree_is_not_relied_on() -> None:
    step = Step("llama", recompute=True, micro_batches=1)
    (engine,) = step._engines[Mode.PIGGYBACK]
    spots = [first(step, phase, "aten.mm") for phase in (Phase.FORWARD, Phase.BACKWARD)]
    for spot, bit in zip(spots, (30, 29), strict=True):
        engine.checks.order("flip", 0, spot.place.phase, spot.flip(element=3, bit=bit))

    with pytest.raises(UnreliableDeviceError, match=r"aten.mm \(#\d+, forward of layers"):
        step.run(Mode.PIGGYBACK)


def test_what_a_block_computes_once_and_keeps_is_executed_twice() -> None:
    """Tables of rotations are made in the first forward, and no recompute makes them again."""
    attention._rotations.cache_clear()
    step = Step("llama", recompute=True, micro_batches=1)
    clean = step.run(Mode.OFF)
    attention._rotations.cache_clear()
    (engine,) = step._engines[Mode.PIGGYBACK]
    flip = Flip(in_pass=Pass.FORWARD, operator="aten.arange", element=2, bit=20)
    engine.checks.order("flip", 0, Phase.FORWARD, flip)

    ended = step.run(Mode.PIGGYBACK)

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert (finding.operator, finding.remedy) == ("aten.arange", Remedy.REPAIR)


@pytest.mark.parametrize("recompute", [1.0, 0.5])
def test_a_copy_between_two_blocks_is_executed_twice(recompute: float) -> None:
    """Forward and recompute of the next block both read it, so they agree on a wrong bit."""
    step = Step("transposed", recompute=recompute, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [
        spot
        for spot in step.list(Mode.PIGGYBACK)
        if (spot.place.phase, spot.place.name) == (Phase.FORWARD, "layers.0")
    ]
    copy = spots[-1]
    assert copy.kernel == "aten.clone"

    ended = step.run(Mode.PIGGYBACK, copy.flip(element=3, bit=22), copy)

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert (finding.operator, finding.ordinal) == ("aten.clone", copy.ordinal)
    assert (finding.verdict, finding.remedy) == (Verdict.PRIMARY_HIT, Remedy.REPAIR)


def test_without_flips_the_kernels_of_gradients_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("llama", recompute=True, micro_batches=1)
    step.run(Mode.PIGGYBACK)
    seen: set[Pass] = set()
    execute = CheckedKernels._execute

    def noting(self: CheckedKernels, *args: Any) -> Any:
        seen.add(self._place.in_pass)
        return execute(self, *args)

    monkeypatch.setattr(CheckedKernels, "_execute", noting)
    step.run(Mode.PIGGYBACK)

    assert seen == {Pass.FORWARD}


def test_what_a_gradient_gets_wrong_is_not_found() -> None:
    """Piggyback covers forward and recompute alone, and the documents say so."""
    step = Step("llama", recompute=True)
    clean = step.run(Mode.OFF)
    spot = next(s for s in step.list() if s.place.in_pass is Pass.WEIGHT and s.kernel == "aten.mm")

    ended = step.run(Mode.PIGGYBACK, spot.flip(element=3, bit=30), spot)

    assert ended.findings == []
    assert ended.digests != clean.digests
