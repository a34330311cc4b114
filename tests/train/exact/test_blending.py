"""A stage made of others, against a twin in numpy written from the paper's formula."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy
import pytest
import torch
from tests.train.checks.wrong_once import WrongOnce
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mainstay_core.dmr.settings import Mode
from mainstay_core.reinitialisation.likeness import kind_of
from mainstay_core.reinitialisation.sources import Left, Policy, plan_reinitialisation
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import (
    BlockOutline,
    BlockSource,
    MadeBlock,
    MadePosition,
    OptimizerState,
    Reinitialisation,
    SourceKind,
)
from mainstay_train.checks.checker import Checks
from mainstay_train.exact import numerics, optimizer
from mainstay_train.exact.blending import SETTLED_STEPS, make_anew
from mainstay_train.model import blocks
from mainstay_train.session.session import Session

NORMS_SQ = {"layers.0": 0.3, "layers.1": 0.05, "layers.4": 2.0, "layers.5": 0.7}


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def stage(*names, keeps=True, dtype=torch.float32):
    """A stage of like blocks with an odd number of elements, trained for a step if ``keeps``."""
    specs = [blocks.BlockSpec(name=name, build=lambda: nn.Linear(17, 9)) for name in names]
    factory = optimizer.adamw() if keeps else optimizer.each(torch.optim.SGD)
    state = optimizer.StageState([blocks.Block(s, dtype=dtype) for s in specs], factory)
    state.initialize(sum(map(len, names)) + int(names[0][-1]))
    return state


def planned(**policy):
    kind = kind_of([("weight", (9, 17)), ("bias", (9,))])
    names = [("layers.0", "layers.1"), ("layers.2", "layers.3"), ("layers.4", "layers.5")]
    outline = tuple(tuple(BlockOutline(name=n, kind=kind) for n in each) for each in names)
    plan = plan_reinitialisation(
        outline, [(1, 0)], version=3, norms_sq=NORMS_SQ, left=Left(), policy=Policy(**policy)
    )
    assert isinstance(plan, Reinitialisation)
    (made,) = plan.positions
    return made


def twin(before, after):
    """W = (w_a W_a + w_b W_b) / (w_a + w_b), with w the squared norm (algorithm 1)."""
    w_a = NORMS_SQ["layers.0"] + NORMS_SQ["layers.1"]
    w_b = NORMS_SQ["layers.4"] + NORMS_SQ["layers.5"]
    a, b = w_a / (w_a + w_b), 1.0 - w_a / (w_a + w_b)
    return {
        name: (a * before[name].astype("f8") + b * after[name].astype("f8")).astype("f4")
        for name in before
    }


def masters(state):
    """By block's place in the stage and local name."""
    return {
        (place, name.removeprefix(f"{block.name}.")): view.numpy().copy()
        for place, block in enumerate(state.blocks)
        for name, view in block.layout.views(block.masters).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_made_anew_is_the_formulas_to_the_bit(dtype):
    before, after = stage("layers.0", "layers.1", keeps=False), stage("layers.4", "layers.5")
    lost = stage("layers.2", "layers.3", dtype=dtype)
    lost.apply([torch.ones(b.layout.size) for b in lost.blocks], 1.0, 0.1)

    make_anew(lost, planned(), {(0, 0): before, (2, 0): after})

    expected = twin(masters(before), masters(after))
    found = masters(lost)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert numpy.array_equal(found[name], values), name
    rest = [flat for flat in lost.flats() if flat.kind != "master"]
    assert rest
    assert not any(flat.tensor.any() for flat in rest), "an optimizer that has seen nothing"
    for block in lost.blocks:
        assert torch.equal(block.compute, block.masters.to(dtype))


class Largest(TorchDispatchMode):
    """Remembers how many bytes the largest new memory of an operation has."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        own = {x.untyped_storage().data_ptr() for x in tree_flatten(args)[0] if torch.is_tensor(x)}
        for one in tree_flatten(found)[0]:
            if torch.is_tensor(one) and one.untyped_storage().data_ptr() not in own:
                self.num_bytes = max(self.num_bytes, one.untyped_storage().nbytes())
        return found


def wide(name, seed):
    """A stage of one large block."""
    spec = blocks.BlockSpec(name=name, build=lambda: nn.Linear(1024, 513))
    state = optimizer.StageState([blocks.Block(spec, dtype=torch.float32)], optimizer.stateless)
    state.initialize(seed)
    return state


@pytest.mark.parametrize("weights", [(0.3, 0.7), (0.2, 0.3, 0.5)])
def test_a_blend_of_large_blocks_takes_no_memory_of_their_size(weights):
    """Two sources go by compiled code where there is any; more of them never do."""
    lost, sources = wide("layers.9", 9), [wide(f"layers.{i}", i) for i in range(len(weights))]
    given = tuple(
        BlockSource(kind=SourceKind.NEIGHBOUR, stage=i, block=f"layers.{i}", weight=weight)
        for i, weight in enumerate(weights)
    )
    made = MadePosition(stage=9, blocks=(MadeBlock(block="layers.9", sources=given),))
    for block in lost.blocks:
        block.masters.fill_(7.0)  # what was lost, and what lies between parameters

    with Largest() as largest:
        make_anew(lost, made, {(i, 0): source for i, source in enumerate(sources)})

    had = [masters(source) for source in sources]
    for name, values in masters(lost).items():
        wide_sum = weights[0] * had[0][name].astype("f8")
        for weight, each in zip(weights[1:], had[1:], strict=True):
            wide_sum += weight * each[name].astype("f8")
        assert numpy.array_equal(values, wide_sum.astype("f4")), name
    (block,) = lost.blocks
    named = sum(view.abs().sum() for view in block.layout.views(block.masters).values())
    assert float(block.masters.abs().sum()) == pytest.approx(float(named), rel=1e-5)
    assert largest.num_bytes <= 1 << 19


def trained(steps, *names):
    """A stage of like blocks that has taken so many steps of Adam."""
    state = stage(*names)
    for step in range(steps):
        gradients = [torch.full((b.layout.size,), 0.1 * (step + len(b.name))) for b in state.blocks]
        state.apply(gradients, 1.0, 0.01)
    return state


def kept(state, kind):
    """One kind of optimizer state, by block's place in the stage and local name."""
    places = {block.name: place for place, block in enumerate(state.blocks)}
    tensors = [t for t in state.state_tensors() if t.kind == kind]
    named = [(t, t.name.rpartition(".")) for t in tensors]
    return {(places[block], local): t.tensor.numpy().copy() for t, (block, _, local) in named}


def count(state, steps):
    """Have an optimizer say that it has taken so many steps."""
    for flat in state.flats():
        if flat.kind == "step":
            flat.tensor.fill_(steps)


def test_averaged_moments_have_the_parameters_weights_and_the_younger_sources_count():
    """Of sources that have trained as long the count is theirs."""
    before, after = trained(3, "layers.0", "layers.1"), trained(5, "layers.4", "layers.5")
    count(before, SETTLED_STEPS)
    count(after, SETTLED_STEPS + 2)
    lost, again = trained(7, "layers.2", "layers.3"), trained(0, "layers.2", "layers.3")
    made = planned(optimizer_state=OptimizerState.AVERAGE)

    make_anew(lost, made, {(0, 0): before, (2, 0): after})
    make_anew(again, made, {(0, 0): before, (2, 0): after})

    for kind in ("exp_avg", "exp_avg_sq"):
        expected, found = twin(kept(before, kind), kept(after, kind)), kept(lost, kind)
        assert any(values.any() for values in expected.values())
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert numpy.array_equal(found[name], values), (kind, name)
    assert {float(n) for n in kept(lost, "step").values()} == {SETTLED_STEPS}
    for mine, theirs in zip(lost.flats(), again.flats(), strict=True):
        assert torch.equal(mine.tensor, theirs.tensor), "what was lost leaves no trace"


@pytest.mark.parametrize("form", ["compiled", "torch"], indirect=True)
def test_a_wrong_bit_in_a_blend_is_repaired(form):
    before, after = stage("layers.0", "layers.1"), stage("layers.4", "layers.5")
    kernel = "mainstay.blend" if form == "compiled" else "aten.add_"
    right, hit = stage("layers.2", "layers.3"), stage("layers.2", "layers.3")
    findings, sources = [], {(0, 0): before, (2, 0): after}
    make_anew(right, planned(), sources)

    def make(state, made, *, keeps_own):
        make_anew(state, made, sources, None if keeps_own else {})
        return ""

    session = SimpleNamespace(
        _checks=Checks(Mode.FULL, tell=findings.append),
        _wait_copied=lambda: 0.0,
        beside=SimpleNamespace(make=make),
        engine=SimpleNamespace(state=hit),
    )
    with WrongOnce(kernel, dtype=torch.float32 if form == "compiled" else torch.float64) as wrong:
        asyncio.run(Session.make_anew(session, planned(), keeps_own=True))

    assert wrong.was_wrong
    for one, other in zip(right.flats(), hit.flats(), strict=True):
        assert torch.equal(one.tensor, other.tensor), one.id
    assert [finding.operator for finding in findings] == [kernel]


def furthest(state):
    """How far the step goes that a state takes with the gradient that it has always had."""
    before = [block.masters.clone() for block in state.blocks]
    state.apply([torch.full((b.layout.size,), 0.1) for b in state.blocks], 1.0, 0.01)
    pairs = zip(before, state.blocks, strict=True)
    return max(float((block.masters - was).abs().max()) for was, block in pairs)


def alike(steps, *names):
    """A stage that has taken so many steps of Adam with the same gradient everywhere."""
    state = stage(*names)
    for _ in range(steps):
        furthest(state)
    return state


@pytest.mark.parametrize("young", range(9))
@pytest.mark.parametrize("weighting", [Weighting.UNIFORM, Weighting.GRADIENT_NORM])
def test_adam_steps_no_further_with_averaged_moments_than_its_sources_do(young, weighting):
    """The one was itself made anew lately. Its few steps must not stand for the other's many."""
    before, after = alike(200, "layers.0", "layers.1"), alike(young, "layers.4", "layers.5")
    lost = alike(0, "layers.2", "layers.3")
    policy = {"optimizer_state": OptimizerState.AVERAGE, "weighting": weighting}

    make_anew(lost, planned(**policy), {(0, 0): before, (2, 0): after})

    rest = [flat for flat in lost.flats() if flat.kind != "master"]
    assert not any(flat.tensor.any() for flat in rest), "an optimizer that has seen nothing"
    for _ in range(9):
        assert furthest(lost) <= 1.001 * max(furthest(before), furthest(after))


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_sources_that_have_trained_as_long_are_averaged_however_few_steps_that_is(steps):
    before, after = alike(steps, "layers.0", "layers.1"), alike(steps, "layers.4", "layers.5")
    lost = alike(0, "layers.2", "layers.3")
    policy = {"optimizer_state": OptimizerState.AVERAGE, "weighting": Weighting.UNIFORM}

    make_anew(lost, planned(**policy), {(0, 0): before, (2, 0): after})

    assert {float(n) for n in kept(lost, "step").values()} == {steps}
    assert furthest(lost) <= 1.001 * max(furthest(before), furthest(after))


def test_an_optimizer_without_counts_has_its_momentum_averaged():
    factory = optimizer.each(torch.optim.SGD, momentum=0.9)

    def moved(*names):
        spec = [blocks.BlockSpec(name=name, build=lambda: nn.Linear(17, 9)) for name in names]
        state = optimizer.StageState([blocks.Block(s, dtype=torch.float32) for s in spec], factory)
        state.initialize(1)
        state.apply(
            [torch.full((b.layout.size,), 1.0 + int(names[0][-1])) for b in state.blocks], 1.0, 0.01
        )
        return state

    before, after = moved("layers.0", "layers.1"), moved("layers.4", "layers.5")
    lost = moved("layers.2", "layers.3")
    make_anew(
        lost, planned(optimizer_state=OptimizerState.AVERAGE), {(0, 0): before, (2, 0): after}
    )
    expected = twin(kept(before, "momentum_buffer"), kept(after, "momentum_buffer"))
    for name, values in kept(lost, "momentum_buffer").items():
        assert numpy.array_equal(values, expected[name])


def test_parameters_that_an_inner_rank_holds_are_copied():
    other, own = stage("layers.0"), stage("layers.2")
    made = MadePosition(
        stage=1,
        inner=1,
        blocks=(
            MadeBlock(
                block="layers.2",
                sources=(
                    BlockSource(
                        kind=SourceKind.INNER_RANK,
                        stage=1,
                        inner=0,
                        block="layers.2",
                        parameters=("bias",),
                    ),
                    BlockSource(kind=SourceKind.NEIGHBOUR, stage=0, inner=1, block="layers.0"),
                ),
            ),
        ),
    )
    lost = stage("layers.2")

    make_anew(lost, made, {(0, 1): other, (1, 0): own})

    assert numpy.array_equal(masters(lost)[0, "bias"], masters(own)[0, "bias"])
    assert numpy.array_equal(masters(lost)[0, "weight"], masters(other)[0, "weight"])


def test_a_boost_is_the_learning_rate_of_its_block_alone():
    plain, boosted = stage("layers.0", "layers.1"), stage("layers.0", "layers.1")
    by_hand = stage("layers.0", "layers.1")
    gradient = [torch.ones(b.layout.size) for b in plain.blocks]

    plain.apply(gradient, 1.0, 0.1)
    by_hand.apply(gradient, 1.0, 0.1 * 1.1)
    boosted.apply(gradient, 1.0, 0.1, boosts={"layers.1": 1.1})

    assert torch.equal(boosted.blocks[0].masters, plain.blocks[0].masters)
    assert torch.equal(boosted.blocks[1].masters, by_hand.blocks[1].masters)
