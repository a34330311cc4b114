"""Large kernels are executed twice with one result at a time, and found and repaired as others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.train.checks.step import Step
from tests.train.checks.test_checker import WRITING, count_kernels, flip_of, halves, run, tensors

from mainstay_core.dmr.flips import Execution
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks import bits, one_by_one

GROWING = torch.library.Library("mainstay_one_by_one", "DEF")
GROWING.define("grow(Tensor x) -> Tensor")
MADE: list[Any] = []


def grow(x: torch.Tensor) -> torch.Tensor:
    assert not [made for made in MADE if made() is not None], "the first result is gone"
    result = x * 2.0
    MADE.append(weakref.ref(result))
    return result


GROWING.impl("grow", grow, "CPU")


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_by_one, "LARGE_BYTES", 1)


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
@pytest.mark.parametrize("name", [name for name in WRITING if name != "number"])
def test_each_kernel_is_repaired_wherever_it_writes(name: str, execution: Execution) -> None:
    work = WRITING[name]
    whole, right = halves(), halves()
    expected = work(right)
    last = len(count_kernels(work)) - 1

    result, findings = run(lambda: work(whole), flip_of(last, execution=execution))

    wrong = execution is Execution.PRIMARY
    assert [(f.verdict, f.remedy, f.num_elements) for f in findings] == [
        (Verdict.PRIMARY_HIT, Remedy.REPAIR, 1)
        if wrong
        else (Verdict.CHECKER_HIT, Remedy.NOTHING, 0)
    ]
    assert bits.are_equal(whole._base, right._base)
    for one, other in zip(tensors(result), tensors(expected), strict=True):
        assert bits.are_equal(one, other)


def test_one_result_is_there_at_a_time() -> None:
    MADE.clear()
    gc.collect()

    run(lambda: torch.ops.mainstay_one_by_one.grow(torch.ones(4)))

    assert len(MADE) == 2


@pytest.mark.parametrize("model", ["llama", "llama bf16", "moe"])
def test_steps_have_the_bits_of_others(model: str) -> None:
    step = Step(model, recompute=True, micro_batches=1)

    plain, checked = step.run(Mode.OFF), step.run(Mode.FULL)

    assert checked.digests == plain.digests
    assert checked.findings == []
