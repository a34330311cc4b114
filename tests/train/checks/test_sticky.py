"""Flips that stay in a device: they repeat themselves, so the device alone finds nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.checks.step import Spot, Step

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Verdict
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.flips import FlipOrders, Missed
from mainstay_train.checks.places import Phase, Place

FAULTS = Path(__file__).resolve().parents[3] / "docs" / "faults.md"


def sticky(in_pass: Pass, operator: int | str | None, bit: int = 20, block: int = 0) -> Flip:
    return Flip(
        in_pass=in_pass,
        block=block,
        operator=operator,
        element=3,
        bit=bit,
        execution=Execution.BOTH,
        sticky=True,
    )


def test_a_sticky_flip_is_found_by_nobody_and_the_digests_are_wrong_again_and_again() -> None:
    step = Step("llama", recompute=True)
    clean = step.run(Mode.OFF)
    for phase, flip in (
        (Phase.FORWARD, sticky(Pass.FORWARD, "aten.mm", block=1)),
        (Phase.BACKWARD, sticky(Pass.WEIGHT, "aten.mm", block=1)),
    ):
        runs = []
        # Not with Piggyback, which sees a fault that hits forwards and no recompute, every time.
        for mode in (Mode.OFF, Mode.FULL):
            (engine,) = step._engines[mode]
            engine.checks.order("broken", 0, phase, flip)
            runs += [step.run(mode), step.run(mode)]
            engine.checks._orders = FlipOrders()

        assert all(run.findings == [] for run in runs), phase
        assert len({run.digests for run in runs}) == 1, "it repeats itself, in both modes"
        assert runs[0].digests != clean.digests
    assert step.run(Mode.FULL).digests == clean.digests


def product(checks: Checks, step: int = 0) -> list[float]:
    checks.begin_step(step)
    with checks.over(Phase.FORWARD, shard_type=2, micro_batch=1) as scope:
        scope.enter(Pass.FORWARD, 0, "block")
        first = torch.ones(2, 2) @ torch.ones(2, 2)
        second = torch.ones(2, 2) @ torch.ones(2, 2)
    return [*first.flatten().tolist(), *second.flatten().tolist()]


@pytest.mark.parametrize(
    ("operator", "wrong"), [("aten.mm", [3, 7]), (None, [3]), (0, [3])], ids=str
)
def test_a_sticky_flip_hits_each_call_of_a_name_in_every_step(
    operator: int | str | None, wrong: list[int]
) -> None:
    checks = Checks(Mode.OFF)
    with checks.over(Phase.FORWARD):
        pass
    checks.order("broken", 3, Phase.FORWARD, sticky(Pass.FORWARD, operator, bit=31))
    kernels = [] if operator == "aten.mm" else ["aten.fill_"]  # ones() is the first kernel
    for step in (3, 4, 2, 9):
        values = product(checks, step)
        if kernels:
            assert values != [2.0] * 8
        else:
            assert [n for n, value in enumerate(values) if value != 2] == wrong


def test_a_third_execution_on_a_broken_device_is_wrong_likewise() -> None:
    found: list[Finding] = []
    checks = Checks(Mode.FULL, tell=found.append)
    checks.order("broken", 0, Phase.FORWARD, sticky(Pass.FORWARD, "aten.mm", bit=31))
    once = Flip(in_pass=Pass.FORWARD, operator="aten.mm", element=0, bit=31)
    checks.order("once", 0, Phase.FORWARD, once)

    assert product(checks) == [2, 2, 2, -2] * 2

    (finding,) = found
    assert finding.verdict is Verdict.PRIMARY_HIT, "not an unreliable device"


def test_a_sticky_flip_that_finds_no_kernel_is_no_missed_one_and_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missed: list[Missed] = []
    checks = Checks(Mode.OFF, miss=missed.append)
    checks.order("broken", 0, Phase.FORWARD, sticky(Pass.FORWARD, "aten.mmm"))
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            product(checks, step)

    (record,) = caplog.records
    assert "flip broken waits for its kernel" in record.getMessage()
    assert "the nearest names there are aten.mm" in record.getMessage()
    assert missed == [], "a later step may have it"


@pytest.mark.parametrize(
    ("fields", "tail"),
    [
        ({}, ""),
        ({"execution": Execution.CHECKER}, ", in the second execution, if there is one"),
        ({"sticky": True}, ", from now on in every execution"),
    ],
    ids=["primary", "checker", "sticky"],
)
def test_the_log_says_once_what_a_flip_is_put_into(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any], tail: str
) -> None:
    checks = Checks(Mode.FULL)
    flip = Flip(in_pass=Pass.FORWARD, operator="aten.mm", element=0, bit=31, **fields)
    checks.order("fault-0", 3, Phase.FORWARD, flip)
    with caplog.at_level(logging.INFO):
        product(checks, 3)

    told = [r.getMessage() for r in caplog.records if "is put in" in r.getMessage()]
    line = (
        "flip fault-0 is put in: aten.mm, step 3, phase forward, forward pass, "
        "type 2, micro-batch 1, block 0"
    )
    assert told == [line + tail]
    assert f"```\n{line}\n```" in FAULTS.read_text()


def test_the_log_does_not_say_of_a_flip_that_found_no_kernel_that_it_is_put_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks = Checks(Mode.OFF)
    flip = Flip(in_pass=Pass.FORWARD, operator="aten.mmm", element=0, bit=31)
    checks.order("fault-0", 0, Phase.FORWARD, flip)
    with caplog.at_level(logging.INFO):
        product(checks)
        checks.begin_step(1)

    assert "is put in" not in caplog.text
    assert "flip fault-0 was not put in" in caplog.text


def test_a_sticky_flip_strikes_in_the_step_in_which_its_type_comes_first() -> None:
    missed: list[Missed] = []
    checks = Checks(Mode.OFF, miss=missed.append)
    flip = replace(sticky(Pass.FORWARD, "aten.mm", bit=31), shard_type=2)
    checks.order("broken", 0, Phase.FORWARD, flip)
    with checks.over(Phase.FORWARD, 0, shard_type=1, micro_batch=1) as scope:
        scope.enter(Pass.FORWARD, 0, "block")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).min() == 2

    assert min(product(checks, 1)) < 0, "here the rank computes type 2"
    assert missed == []


def test_a_flip_of_one_step_waits_for_its_own_step_alone() -> None:
    orders = FlipOrders()
    orders.add("f", 3, Phase.FORWARD, Flip(in_pass=Pass.STEP, element=0, bit=0))

    assert orders.take(Place(2, Phase.FORWARD), 0, "aten.mm") == []
    assert len(orders.take(Place(3, Phase.FORWARD), 5, "aten.mm")) == 1
    assert orders.is_empty


def test_spots_name_what_a_sticky_flip_can() -> None:
    """A sticky flip at each kind of pass of a block is put into every type's execution."""
    step = Step("llama", recompute=True)
    spots = step.list()
    for phase, in_pass in (
        (Phase.FORWARD, Pass.FORWARD),
        (Phase.BACKWARD, Pass.FORWARD),
        (Phase.BACKWARD, Pass.BACKWARD),
        (Phase.BACKWARD, Pass.WEIGHT),
    ):
        spot = next(
            s
            for s in spots
            if (s.place.phase, s.place.in_pass, s.place.block) == (phase, in_pass, 1)
        )
        assert hits(step, spot) == 2 * 3, "two micro-batches of three types"


def hits(step: Step, spot: Spot) -> int:
    """How often a sticky flip at a spot is put in."""
    (engine,) = step._engines[Mode.OFF]
    orders = Counting()
    engine.checks._orders = orders
    orders.add(
        "broken", 0, spot.place.phase, sticky(spot.place.in_pass, spot.ordinal, bit=0, block=1)
    )
    step.run(Mode.OFF)
    engine.checks._orders = FlipOrders()
    return orders.hits


class Counting(FlipOrders):
    """Counts the flips that it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0

    def take(self, *args: object, **kwargs: object) -> list[Flip]:
        found = super().take(*args, **kwargs)  # type: ignore[arg-type]
        self.hits += len(found)
        return found
