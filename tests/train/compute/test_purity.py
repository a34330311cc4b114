"""A block that is no pure function is told apart from a device that computes wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.train.checks.step import MODELS
from tests.train.checks.test_checker import Worn
from tests.train.model.test_trial import model
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
from mainstay_train.checks.checker import UnreliableDeviceError
from mainstay_train.compute import purity
from mainstay_train.exact import numerics
from mainstay_train.exact.initialization import Init, default_init
from mainstay_train.model import split, workload
from mainstay_train.model.blocks import BlockSpec

CPU = torch.device("cpu")
CALLS: dict[str, Iterator[int]] = {}
LIBRARY = torch.library.Library("mainstay_purity", "DEF")
for kernel in ("noise", "sometimes", "once", "flagged"):
    LIBRARY.define(f"{kernel}(Tensor x) -> Tensor")
# Kernels that look into what is no input of theirs.
LIBRARY.impl("noise", lambda x: x + next(CALLS["noise"]), "CPU")
LIBRARY.impl("sometimes", lambda x: x + next(CALLS["sometimes"]) % 2, "CPU")
LIBRARY.impl("once", lambda x: x + (next(CALLS["once"]) == 1), "CPU")
FLAGS: list[str] = []
LIBRARY.impl("flagged", lambda x: x + len(FLAGS), "CPU")


@pytest.fixture(autouse=True)
def _arithmetic() -> None:
    numerics.setup("cpu")
    CALLS.update({name: itertools.count() for name in ("noise", "sometimes", "once", "host")})


WITNESS = CheckRules(witness_every_steps=5)


class Odd(split.SplitModule):
    """A weight, and something that is done to the input besides."""

    def __init__(self, besides: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self._besides = besides

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self._besides(x.detach())


def check(besides: Callable[[torch.Tensor], torch.Tensor], plan: PlanName = PlanName.NAIVE) -> None:
    purity.check(model(BlockSpec(name="odd", build=lambda: Odd(besides))), CPU, plan=plan)


@pytest.mark.parametrize("kernel", ["noise", "sometimes"])
def test_a_kernel_that_gives_other_bits_each_time_is_named_with_its_block(kernel: str) -> None:
    with pytest.raises(
        InvalidSpecError,
        match=rf"spec\.detection\.dmr\.mode: is Full, but mainstay_purity\.{kernel} \(#\d\) in the "
        r"forward pass of odd gave other bits .* so block 'odd' is no pure function",
    ):
        check(getattr(torch.ops.mainstay_purity, kernel))


def test_a_block_that_asks_the_host_is_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"block 'odd' gives other bits of the output when"):
        check(lambda x: x * next(CALLS["host"]))


class Recurrent(nn.Module):
    """An LSTM along the sequence."""

    def __init__(self, rnn: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.rnn = rnn(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.rnn, nn.LSTM):
            return self.rnn(x)[0]
        state: tuple[torch.Tensor, torch.Tensor] | None = None
        outputs = []
        for each in x.unbind(-2):
            state = self.rnn(each, state)
            outputs.append(state[0])
        return torch.stack(outputs, -2)


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIGGYBACK])
def test_an_lstm_on_a_cpu_is_refused_by_its_kernel_and_not_as_impure(mode: Mode) -> None:
    whole, by_cells = (
        model(BlockSpec(name="lstm", build=lambda rnn=rnn: Recurrent(rnn)))  # type: ignore[misc]
        for rnn in (partial(nn.LSTM, batch_first=True), nn.LSTMCell)
    )

    with pytest.raises(
        InvalidSpecError,
        match=rf"mode: is {mode.value}, but block 'lstm' calls aten\.mkldnn_rnn_layer, whose "
        r"workspace it does not write whole, .*; use nn\.LSTMCell for each",
    ):
        purity.check(whole, CPU, mode)
    purity.check(by_cells, CPU, mode)


def test_the_refusal_names_the_mode_of_the_job() -> None:
    odd = BlockSpec(name="odd", build=lambda: Odd(torch.ops.mainstay_purity.noise))
    with pytest.raises(InvalidSpecError, match=r"detection\.dmr\.mode: is Piggyback, but"):
        purity.check(model(odd), CPU, Mode.PIGGYBACK)


def test_what_differs_once_is_nobodys_fault() -> None:
    check(torch.ops.mainstay_purity.once)
    assert next(CALLS["once"]) > 2 * purity.ROUNDS


def test_a_device_that_is_always_wrong_is_no_fault_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Worn(monkeypatch)
    with pytest.raises(UnreliableDeviceError, match="also where no code of the workload ran"):
        check(torch.zeros_like)


def flagged(x: torch.Tensor) -> torch.Tensor:
    """A kernel of which the block sets how it computes, as with flags of torch's backends."""
    FLAGS.append("quick")
    try:
        return torch.ops.mainstay_purity.flagged(x)
    finally:
        FLAGS.pop()


def test_a_kernel_that_depends_on_what_its_block_sets_is_named_where_checks_wait() -> None:
    check(flagged)
    with pytest.raises(
        InvalidSpecError,
        match=r"spec\.detection\.dmr\.plan: is Dynamic, but mainstay_purity\.flagged \(#\d\) in "
        r"the forward pass of odd gave other bits when it was executed again after block 'odd' had "
        r"returned, in 5 of 5 runs: .* or use Naive",
    ):
        check(flagged, PlanName.DYNAMIC)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_models_that_come_with_mainstay_are_pure(name: str) -> None:
    entrypoint, config = MODELS[name]
    purity.check(workload.load(entrypoint, config), CPU, plan=PlanName.AUTO)


def watch(besides: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Try a block as in a job that has a witness and no checks."""
    odd = BlockSpec(name="odd", build=lambda: Odd(besides))
    purity.try_blocks(model(odd), CPU, WITNESS)


@pytest.mark.parametrize(
    "besides",
    [
        torch.ops.mainstay_purity.noise,
        torch.ops.mainstay_purity.sometimes,
        lambda x: x * next(CALLS["host"]),
    ],
    ids=["noise", "sometimes", "host"],
)
def test_with_a_witness_alone_a_block_that_is_no_pure_function_is_named(
    besides: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Replicas would differ, and devices be accused."""
    with pytest.raises(
        InvalidSpecError,
        match=r"spec\.detection\.witness\.everySteps: is 5, but block 'odd' gave other bits of the "
        r"output when it was run again, 5 of 5 times, so it is no pure function .* or use 0",
    ):
        watch(besides)


class Counting(split.SplitModule):
    """Counts something else in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split.count(torch.tensor([next(CALLS["host"])]))
        return x * self.weight


class NoisyBackward(torch.autograd.Function):
    """Its gradient is another one in each run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return dy * (1 + next(CALLS["host"]))


class Layer(nn.Module):
    """A residual layer, whose projection to the output may begin as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = split.Linear(8, 8), split.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noisy: torch.Tensor = NoisyBackward.apply(self.up(x))  # type: ignore[no-untyped-call]
        return x + self.down(noisy)


def zero_down(name: str, shape: Sequence[int]) -> Init:
    """How a layer with an output projection of zeros begins."""
    return Init(std=0.0) if name.startswith("down") else default_init(name, shape)


@pytest.mark.parametrize("rules", [WITNESS, CheckRules(mode=Mode.FULL)], ids=["witness", "full"])
@pytest.mark.parametrize(
    ("odd", "what"),
    [
        (BlockSpec(name="odd", build=Counting, statistics=("tokens",)), "what it counts"),
        (BlockSpec(name="odd", build=Layer, init=zero_down), "the gradient of the input"),
    ],
    ids=["counts", "behind zeros"],
)
def test_what_a_block_counts_and_what_weights_hide_that_begin_as_zeros_is_compared(
    odd: BlockSpec, what: str, rules: CheckRules
) -> None:
    with pytest.raises(InvalidSpecError, match=f"block 'odd' (gave|gives) other bits of {what}"):
        purity.try_blocks(model(odd), CPU, rules)


def test_compiled_blocks_were_tried_when_they_were_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their trial compares two runs already; to build each kind anew takes a compile."""
    monkeypatch.setattr(workload.Workload, "build", None)
    purity.try_blocks(model(), CPU, WITNESS, compiles=True)
    with pytest.raises(TypeError):
        purity.try_blocks(model(), CPU, WITNESS)


def test_with_a_witness_alone_what_differs_once_is_nobodys_fault() -> None:
    watch(torch.ops.mainstay_purity.once)
    assert next(CALLS["once"]) > purity.ROUNDS


def test_with_a_witness_alone_a_device_that_is_always_wrong_is_no_fault_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Worn(monkeypatch)
    with pytest.raises(UnreliableDeviceError, match="also where no code of the workload ran"):
        watch(torch.ops.mainstay_purity.noise)


def test_what_checks_cannot_look_at_a_witness_may_be_used_with() -> None:
    def sparse(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(8).to_sparse(), x.view(-1, 8).t()).t().view(x.shape)

    with pytest.raises(InvalidSpecError, match="sparse"):
        check(sparse)
    watch(sparse)


def test_blocks_are_tried_as_the_rules_ask_for_it() -> None:
    trial = purity.Trial
    assert purity.trials_of(CheckRules()) == frozenset()
    assert purity.trials_of(WITNESS) == {trial.REPEATED}
    both = CheckRules(mode=Mode.PIGGYBACK, witness_every_steps=5)
    assert purity.trials_of(both) == {trial.REPEATED, trial.AT_ONCE}
    late = CheckRules(mode=Mode.FULL, plan=PlanName.AUTO)
    assert purity.trials_of(late) == set(trial)
