"""The trial of skipped weight gradients finds every block whose other bits depend on them."""

from __future__ import annotations

from itertools import permutations, starmap
from typing import Any

import pytest
import torch
from tests.train.snapshots.trained_chain import MODELS, make_engine
from torch import nn

from mainstay_train.exact import numerics
from mainstay_train.model import blocks, data, split, trial, workload
from mainstay_train.model.units import Unit
from mainstay_train.snapshots.unit_bytes import UnitBytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _arithmetic() -> None:
    numerics.setup("cpu")


class Scale(torch.autograd.Function):
    """Multiplies by a weight; what it defers may write where others read."""

    @staticmethod
    def forward(ctx: Any, x: Any, anchor: Any, weight: Any, recorder: Any, writes: Any) -> Any:  # noqa: ARG004
        ctx.held = (x, weight, recorder, writes)
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, recorder, writes = ctx.held
        dx = dy * weight.detach()

        def weight_gradient(view: torch.Tensor, add: bool) -> None:
            assert not add
            view.copy_((dy * x).sum((0, 1)))
            if writes == "dx":
                dx.neg_()
            if writes == "dy":
                dy.neg_()

        recorder.defer(weight, weight_gradient)
        return dx, None, None, None, None


GOOD, WRITES_INPUT_GRADIENT, WRITES_OUTPUT_GRADIENT = range(3)


class Scales(split.SplitModule):
    """Two weights, of which the first may defer work that spoils the results of others."""

    def __init__(self, fault: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(8)) for _ in range(2))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recorder = split.current()
        if recorder is None:
            return x * self.first * self.second
        apply: Any = Scale.apply
        writes = {GOOD: "", WRITES_INPUT_GRADIENT: "dx", WRITES_OUTPUT_GRADIENT: "dy"}[self.fault]
        anchor = recorder.anchor
        y = apply(x, anchor, self.first, recorder, writes)
        if self.fault == WRITES_OUTPUT_GRADIENT:  # both have the same one if they are added
            return y + apply(x, anchor, self.second, recorder, "")
        return apply(y, anchor, self.second, recorder, "")


def scales(name: str, fault: int) -> blocks.BlockSpec:
    units = tuple(Unit(name=unit, parameters=(unit,)) for unit in ("first", "second"))
    return blocks.BlockSpec(name=name, build=lambda: Scales(fault), units=units)


def model(*middle: blocks.BlockSpec) -> workload.Workload:
    return workload.Workload(
        blocks=(
            blocks.BlockSpec(name="embedding", build=lambda: split.Embedding(256, 8)),
            *middle,
            blocks.BlockSpec(
                name="head",
                build=lambda: split.Linear(8, 256),
                loss=lambda y, targets: y.float().sum() + 0 * targets.sum(),
            ),
        ),
        dataset=data.ByteDataset(data.STDLIB, sequence=6, micro_batch_size=1),
        activation_shape=(1, 6, 8),
        learning_rate=lambda _: 0.1,
    )


def test_a_block_whose_deferred_work_writes_where_others_read_is_named() -> None:
    given = {"good": GOOD, "sent": WRITES_INPUT_GRADIENT, "shared": WRITES_OUTPUT_GRADIENT}
    found = trial.find_unskippable(model(*starmap(scales, given.items())), CPU)

    assert set(found) == {"sent", "shared"}
    assert "gradient of the input has other bits without the weight gradients of" in found["sent"]
    assert "shared.second has other bits without the weight gradients of" in found["shared"]


def test_all_blocks_that_are_alike_share_their_verdict() -> None:
    layers = [scales(name, WRITES_INPUT_GRADIENT) for name in ("one", "other")]

    assert set(trial.find_unskippable(model(*layers), CPU)) == {"one", "other"}


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_models_that_come_with_mainstay_skip_all_their_units(name: str, dtype: str) -> None:
    entrypoint, config = MODELS[name]
    loaded = workload.load(entrypoint, {**config, "dtype": dtype})

    assert trial.find_unskippable(loaded, CPU) == {}


@pytest.mark.parametrize("count", range(1, 20))
def test_of_each_two_units_some_run_leaves_out_only_one(count: int) -> None:
    units = [f"u{n}" for n in range(count)]
    sets = list(trial.skipped_sets(units))

    assert sets[0] == tuple(units)
    assert len(sets) <= 1 + 2 * (count - 1).bit_length()
    for one, other in permutations(units, 2):
        assert any(one in skipped and other not in skipped for skipped in sets)


def test_a_replay_computes_the_frozen_units_of_a_block_that_was_named() -> None:
    named = "layers.2"
    for unskippable in ([], [named]):
        engine = make_engine("moe", "float32", 1, unskippable)
        units = UnitBytes(engine.state, engine.reducer.reduced)
        (block,) = engine.state.blocks

        skipped = units.skippable(0, frozenset(units.names))

        assert block.name == named
        assert skipped == (() if unskippable else tuple(block.units))
