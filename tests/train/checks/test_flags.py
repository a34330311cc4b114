"""Comparisons that stay on the device until a type counts, as on a GPU; here they are made to."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.train.checks.step import MODELS, TYPES, Step
from tests.train.checks.test_flips import draw, has_effect

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.checks import at_once, flags
from mainstay_train.checks.checker import NOWHERE, Checks
from mainstay_train.checks.flags import Flags
from mainstay_train.checks.places import Phase, Place
from mainstay_train.kernels import bits
from mainstay_train.kernels.dispatch import key_of
from mainstay_train.kernels.imprints import imprint

Setting = tuple[str, bool, int, int]
"""Model, recompute, stages, bytes for checks that wait."""
MUCH = 1 << 30
QUICK: list[Setting] = [("llama bf16", True, 2, 0), ("moe", False, 1, MUCH)]
ALL: list[Setting] = [
    (model, recompute, stages, budget)
    for model in MODELS
    for recompute in (False, True)
    for stages, budget in ((1, 0), (2, 0), (2, MUCH))
]
PLACE = Place(0, Phase.FORWARD, Pass.FORWARD, 0, 0, 0, "block")


def check_flips(setting: Setting, num_flips: int, *, with_steps: bool = False) -> Counter[str]:
    """Run steps with one flip each; return how many were found, by verdict.

    Args:
        setting: of the steps.
        num_flips: so many.
        with_steps: whether some are in what belongs to no block.
    """
    model, recompute, stages, budget = setting
    step = Step(
        model,
        recompute=recompute,
        stages=stages,
        waiting_bytes=budget,
        is_flagged=True,
        micro_batches=1,
    )
    clean = step.run(Mode.OFF)
    spots = [spot for spot in step.list() if with_steps or spot.place.in_pass is not Pass.STEP]
    rng = random.Random(str(setting))
    found: Counter[str] = Counter()
    for _ in range(num_flips):
        spot, flip = draw(rng, spots)
        ended = step.run(Mode.FULL, flip, spot)
        assert ended.digests == clean.digests, (spot, flip)
        if has_effect(step, clean, spot, flip):
            assert len(ended.findings) == 1, (spot, flip)
        assert len(ended.findings) <= 1, (spot, flip)
        for finding in ended.findings:
            assert (finding.operator, finding.ordinal) == (spot.kernel, spot.ordinal)
            assert finding.block == spot.place.name
            # What waits in memory that it is given is judged by imprints, on a CPU alone.
            is_late = finding.verdict is Verdict.UNDECIDED
            assert finding.num_elements == (0 if is_late else 1) or budget
            assert (finding.remedy is Remedy.VOID_TYPE) == bool(ended.num_refused)
            assert budget or (finding.remedy is Remedy.VOID_TYPE) == is_late
            found[finding.verdict] += 1
    return found


@pytest.mark.parametrize("setting", QUICK, ids=str)
@pytest.mark.usefixtures("flipped")
def test_a_flip_is_found_when_the_type_is_about_to_count_and_changes_nothing(
    setting: Setting,
) -> None:
    found = check_flips(setting, 5)
    assert found[Verdict.UNDECIDED] >= 2


@pytest.mark.chaos
@pytest.mark.parametrize("setting", ALL, ids=str)
@pytest.mark.usefixtures("flipped")
def test_of_many_flips_each_effective_one_is_found_late_or_at_once(setting: Setting) -> None:
    found = check_flips(setting, 60, with_steps=True)

    logging.getLogger(__name__).info("%s: %s", setting, dict(found))
    assert found[Verdict.UNDECIDED] >= 10
    assert found[Verdict.PRIMARY_HIT] >= 1, "what is no pass of a block is looked at at once"


def test_the_host_looks_at_no_real_number_of_a_blocks_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("llama bf16", recompute=False, is_flagged=True, micro_batches=1)
    clean, looks = step.run(Mode.OFF), Counter[tuple[str, bool]]()
    check = at_once.check

    def look(checks, at, call, primary, *given):  # type: ignore[no-untyped-def]
        if at.block is not None:
            is_real = all(tensor.is_floating_point() for tensor in primary[1])
            looks[call.kernel.name, is_real] += 1
        return check(checks, at, call, primary, *given)

    monkeypatch.setattr(at_once, "check", look)
    ended = step.run(Mode.FULL)

    assert (ended.digests, ended.findings) == (clean.digests, [])
    # The head changes in place what its forward has left: memory of another action.
    assert {name for name, is_real in looks if is_real} == {"aten.mul_"}
    assert any(not is_real for _, is_real in looks)


def test_a_type_that_was_flagged_is_computed_again_with_comparisons_at_once() -> None:
    step = Step("llama", recompute=False, is_flagged=True, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [s for s in step.list() if s.place.in_pass is Pass.BACKWARD and s.kernel == "aten.mm"]
    flip = spots[0].flip(element=3, bit=30, execution=Execution.PRIMARY, sticky=True)
    (engine,) = step._engines[Mode.FULL]
    engine.checks.order("stays", 0, Phase.BACKWARD, flip)

    ended = step.run(Mode.FULL)

    assert ended.digests == clean.digests
    told = [(finding.verdict, finding.remedy) for finding in ended.findings]
    assert told == [
        (Verdict.UNDECIDED, Remedy.VOID_TYPE),
        (Verdict.PRIMARY_HIT, Remedy.REPAIR),
    ]
    assert ended.num_refused == 1


def test_a_replay_looks_at_once() -> None:
    """It has no vote that could call a type bad."""
    step = Step("llama", recompute=False, is_flagged=True)
    (engine,) = step._engines[Mode.FULL]
    assert engine.checks.flags_at(PLACE) is engine.checks.flags
    engine.checks.begin_program({})
    assert engine.checks.flags_at(PLACE) is None


def test_what_blocks_make_once_and_keep_is_right_at_once() -> None:
    step = Step("llama", recompute=False, is_flagged=True, is_warm=False, micro_batches=1)
    clean = step.run(Mode.OFF)
    spot = next(
        spot
        for spot in step.list(Mode.OFF)
        if (spot.place.in_pass, spot.kernel) == (Pass.FORWARD, "aten.mm")
    )

    ended = step.run(Mode.FULL, spot.flip(element=3, bit=30), spot)

    assert ended.digests == clean.digests
    assert [finding.remedy for finding in ended.findings] == [Remedy.REPAIR]


@pytest.mark.parametrize("in_pass", [Pass.BACKWARD, Pass.WEIGHT])
def test_a_buffer_that_a_block_sets_is_right_at_once_in_any_pass(in_pass: Pass) -> None:
    findings: list[Finding] = []
    checks = Checks(Mode.FULL, tell=findings.append, flags=Flags(everywhere=True))
    checks._is_warm = checks._computes = True
    checks.gradient = key_of(gradient := torch.zeros(8))
    flip = Flip(in_pass=in_pass, operator="aten.copy_", element=3, bit=30)
    checks.order("flip", 0, Phase.BACKWARD, flip)
    buffer, right = torch.zeros(8), torch.arange(8.0)

    with checks.over(Phase.BACKWARD, shard_type=0, micro_batch=0) as scope:
        scope.enter(in_pass, 0, "block")
        buffer.copy_(right)
        gradient.add_(right)

    assert torch.equal(buffer, right)
    assert [finding.remedy for finding in findings] == [Remedy.REPAIR]
    assert bool(checks.flags) == (in_pass is Pass.WEIGHT), "of the gradient alone"


def test_what_is_changed_in_place_elsewhere_than_flags_lie_can_be_executed_a_third_time() -> None:
    """A kernel of the user's may change memory of the host by what it reads on a device."""
    findings: list[Finding] = []
    checks = Checks(Mode.FULL, tell=findings.append, flags=Flags(everywhere=True))
    checks._is_warm = checks._computes = True
    elsewhere = [torch.zeros(8, device="meta")]
    checks.flags.compare(PLACE, (0, "aten.mm"), elsewhere, elsewhere)
    flip = Flip(in_pass=Pass.FORWARD, operator="aten.mul_", element=3, bit=20)
    checks.order("flip", 0, Phase.FORWARD, flip)

    with checks.over(Phase.FORWARD, shard_type=0, micro_batch=0) as scope:
        scope.enter(Pass.FORWARD, 0, "block")
        made = torch.empty(8)
        made.fill_(2.0)
        made.mul_(3.0)

    assert made.tolist() == [6.0] * 8
    assert [finding.verdict for finding in findings] == [Verdict.PRIMARY_HIT]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_wrong_number_that_makes_a_block_raise_is_found_by_its_flag(stages: int) -> None:
    step = Step("bounded", recompute=False, stages=stages, is_flagged=True)
    clean = step.run(Mode.OFF)
    spot = next(
        s
        for s in step.list(Mode.FULL)
        if (s.place.phase, s.place.name, s.kernel) == (Phase.FORWARD, "layers.0", "aten.add")
        and (s.place.shard_type, s.place.micro_batch) == (0, 0)
        and s.ordinal > 0
    )

    ended = step.run(Mode.FULL, spot.flip(element=3, bit=30), spot)

    assert ended.digests == clean.digests
    assert ended.num_refused == 1
    assert [finding.verdict for finding in ended.findings][:1] == [Verdict.UNDECIDED]


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.arange(35, dtype=torch.float32).view(5, 7).t(),
    "bfloat16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "complex64": lambda: torch.ones(5, 2, dtype=torch.complex64),
    "not a number": lambda: torch.full((3,), torch.nan),
    "scalar": lambda: torch.tensor(1.5, dtype=torch.float64),
    "nothing": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("kind", VALUES)
def test_one_bit_raises_a_flag_and_none_does_not(kind: str) -> None:
    value, into = VALUES[kind](), torch.tensor(True)
    twin = value.clone()
    bits.differ_into(into, value, twin)
    assert not into
    if bits.flip_bit(twin, 1, 0):
        bits.differ_into(into, value, twin)
        assert into


def test_minus_zero_differs_from_zero() -> None:
    into = torch.tensor(False)
    bits.differ_into(into, torch.zeros(3), -torch.zeros(3))
    assert into


@pytest.mark.parametrize("most", [flags.BLOCK, flags.MAX_NOTED])
def test_flags_are_read_in_their_order_whatever_their_number(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags, "MAX_NOTED", most)
    kept, zero, one = Flags(), [torch.zeros(1)], [torch.ones(1)]
    wrong = (5, flags.BLOCK - 1, flags.BLOCK + 3, 2 * flags.BLOCK + 9)
    for number in range(2 * flags.BLOCK + 10):
        found = one if number in wrong else zero
        kept.compare(PLACE, (number, "aten.mm"), zero, found)

    assert kept
    assert [compared.ordinal for compared in kept.read()] == [*wrong]
    assert not kept
    assert kept.read() == []


def test_what_is_dropped_is_not_read_and_what_comes_next_is() -> None:
    kept, zero, one = Flags(), torch.zeros(2), torch.ones(2)
    kept.compare(PLACE, (0, "aten.mm"), [zero], [one])
    kept.send()
    kept.compare(PLACE, (1, "aten.mm"), [zero], [one])
    kept.drop()
    kept.compare(PLACE, (2, "aten.mm"), [zero, zero], [zero, one])
    kept.compare(PLACE, (3, "aten.mm"), [zero], [torch.zeros(3)])

    found = [(compared.ordinal, compared.output) for compared in kept.read()]
    assert found == [(2, 1), (3, 0)]


def test_what_a_device_has_copied_to_the_host_is_compared_there() -> None:
    """A waiting check of such a copy would end the step, as flags lie on the device."""
    on_host, on_device = torch.zeros(2), torch.zeros(2, device="meta")
    kept = Flags()
    assert kept.takes_kept([on_device])
    assert not kept.takes_kept([on_host])
    kept.compare(PLACE, (0, "aten.mm"), [on_device], [on_device])
    assert not kept.takes_kept([on_device, on_host])
    assert not kept.takes_kept([imprint(on_host)])
    assert Flags(everywhere=True).takes_kept([on_host])


def test_types_that_do_not_count_are_not_judged() -> None:
    found: list[Finding] = []
    checks = Checks(Mode.FULL, tell=found.append)
    for shard_type in (0, 1):
        at = replace(PLACE, shard_type=shard_type)
        checks.flags.compare(at, (4, "aten.mm"), [torch.zeros(2)], [torch.ones(2)])

    checks.judge([1])

    assert [told.shard_type for told in found] == [1]
    assert "differ in some elements; what both were made from was gone" in found[0].describe()
    assert checks.void == {1}
    assert not checks.flags


def test_a_ballot_calls_a_flagged_type_bad() -> None:
    step = Step("llama", recompute=False, is_flagged=True, micro_batches=1)
    step.run(Mode.FULL)
    spots = [s for s in step.list() if s.place.in_pass is Pass.WEIGHT and s.kernel == "aten.mm"]
    spot = next(s for s in spots if s.place.shard_type == 1)
    (engine,) = step._engines[Mode.FULL]
    engine.drop_held()
    engine.checks.order("flip", 0, Phase.BACKWARD, spot.flip(element=3, bit=30))

    engine.compute(TYPES, 0, None)
    table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
    engine.reduce(None, table, [0], 0)
    ballot = engine.ballot(None, table, 0, NOWHERE, engine.state.masters_digest().whole.hex())

    assert ballot.bad == (1,)
    assert [finding.verdict for finding in step._findings] == [Verdict.UNDECIDED]
