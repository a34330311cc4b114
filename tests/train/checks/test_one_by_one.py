"""Large kernels are executed twice with one result at a time, and found and repaired as others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.train.checks.single import TELLING, WRITING, check_repair, run
from tests.train.checks.step import Step

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.flips import Execution
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_train.checks import one_by_one
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase

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
@pytest.mark.parametrize("name", sorted(WRITING.keys() - TELLING))
def test_each_kernel_is_repaired_wherever_it_writes(name: str, execution: Execution) -> None:
    # Of the checker's wrong result an imprint is left: no element of it can be counted.
    num_elements = 1 if execution is Execution.PRIMARY else 0
    assert check_repair(name, execution).num_elements == num_elements


SUM: dict[str, Callable[[torch.Tensor], Any]] = {
    "made": lambda x: x.sum(0),
    "out": lambda x: torch.sum(x, 0, out=torch.zeros(4)),
    "in place": lambda x: torch.ones(4).add_(x[0]).index_add_(0, torch.arange(4), x[1]),
    "complex": lambda x: (torch.view_as_complex(x.clone().view(4, 2, 2)) * 1j).sum(0),
}


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
@pytest.mark.parametrize("name", SUM)
def test_what_differs_in_a_small_result_of_large_operands_is_counted(
    name: str, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WRITING, name, SUM[name])
    monkeypatch.setattr(one_by_one, "is_large", lambda *_: True)
    monkeypatch.setattr(one_by_one, "LARGE_BYTES", 33)

    assert check_repair(name, execution).num_elements == 1


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIGGYBACK])
def test_a_sparse_result_is_refused_by_the_names_of_block_and_kernel(mode: Mode) -> None:
    checks = Checks(mode)  # with no memory for checks that wait
    assert checks.spares_memory
    said = (
        rf"dmr\.mode: is {mode.value}, but block 'layers\.0' calls aten\._to_sparse "
        "with a sparse tensor, whose bits are not compared; use dense tensors"
    )
    with checks.over(Phase.FORWARD) as scope:
        scope.enter(Pass.FORWARD, 0, "layers.0")
        with scope.twice(), pytest.raises(InvalidSpecError, match=said):
            torch.eye(3).to_sparse()


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
