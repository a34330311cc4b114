import operator
import random
import subprocess
import sys

import pytest
import torch
from tests.train.operations import Operations
from torch import nn

from mainstay_core.base import digest
from mainstay_train.exact import numerics, optimizer
from mainstay_train.kernels import bits
from mainstay_train.model import blocks
from mainstay_train.sums import digests


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def _state(factory=None, dtype=torch.float32):
    specs = [
        blocks.BlockSpec(name="a", build=lambda: nn.Linear(30, 50)),
        blocks.BlockSpec(name="b", build=lambda: nn.Linear(50, 300)),
    ]
    built = [blocks.Block(spec, dtype=dtype) for spec in specs]
    return optimizer.StageState(built, factory or optimizer.adamw())


def _gradient(state, seed):
    generator = torch.Generator().manual_seed(seed)
    flat = state.layout.allocate()
    for view in state.layout.views(flat).values():
        view.normal_(generator=generator)
    return state.layout.block_views(flat)


def test_apply_equals_a_plain_adamw_over_the_same_tensors():
    state = _state()
    state.initialize(3)
    masters = {s.name: s.tensor for s in state.state_tensors() if s.kind == "master"}
    plain = {name: tensor.clone() for name, tensor in masters.items()}
    groups = [
        {"params": [p for p in plain.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in plain.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=False, foreach=False)
    for step in range(4):
        gradient = _gradient(state, step)
        state.apply(gradient, 0.25, 1e-2)
        views = {}
        for block, flat in zip(state.blocks, gradient, strict=True):
            views |= block.layout.views(flat)
        for name, tensor in plain.items():
            tensor.grad = views[name] * 0.25
        for group in reference.param_groups:
            group["lr"] = 1e-2
        reference.step()
    for name, tensor in plain.items():
        torch.testing.assert_close(masters[name], tensor, rtol=1e-6, atol=1e-7)


def test_our_adamw_has_the_bits_of_torchs():
    named = [("a", torch.randn(50, 7)), ("b", torch.randn(7))]
    theirs = [(name, tensor.clone()) for name, tensor in named]
    ours = optimizer.adamw()(named)
    groups = [
        {**group, "params": [tensor]}
        for group, (_, tensor) in zip(ours.param_groups, theirs, strict=True)
    ]
    reference = torch.optim.AdamW(groups)
    for step in range(4):
        for (_, mine), (_, other) in zip(named, theirs, strict=True):
            mine.grad = torch.full_like(mine, 0.1 * step).normal_()
            other.grad = mine.grad.clone()
        for group in (*ours.param_groups, *reference.param_groups):
            group["lr"] = 1e-2
        ours.step()
        reference.step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(named, theirs, strict=True))


def test_a_trainer_starts_without_torchs_compiler():
    code = "import sys; from mainstay_train.launcher import main; main.warm_up();"
    code += "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_masters_that_are_only_copied_need_no_compiler_of_torch():
    """A stage is made anew in milliseconds: the import would take seconds of them."""
    code = "import sys, torch; from mainstay_train.exact.optimizer import stateless;"
    code += "stateless([('w', torch.ones(2))]).step(); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_apply_repeats_itself_bit_by_bit_and_leaves_the_gradient_alone(dtype):
    """The fused kernel is bit-stable, wherever the allocator puts the tensors."""
    outcomes = []
    keep = []
    for run in range(4):
        keep.append(torch.empty(1000 * run + 1))  # shifts the heap
        state = _state(dtype=dtype)
        state.initialize(3)
        for step in range(5):
            gradient = _gradient(state, step)
            before = [flat.clone() for flat in gradient]
            state.apply(gradient, 1 / 7, 1e-2)
            assert all(map(torch.equal, gradient, before))
        outcomes.append([s.tensor.clone() for s in state.state_tensors()])
        computed = state.blocks[0].module.weight
        assert torch.equal(computed, state.state_tensors()[0].tensor.to(dtype))
    for outcome in outcomes[1:]:
        assert all(map(torch.equal, outcome, outcomes[0]))


@pytest.mark.parametrize("kind", ["adamw", torch.optim.Adagrad])
def test_the_bits_do_not_depend_on_how_an_apply_is_cut(kind):
    """A replay applies unit by unit what an ordinary step applies at once."""
    factory = optimizer.adamw() if kind == "adamw" else optimizer.each(kind)
    whole, cut = _state(factory), _state(factory)
    for state in (whole, cut):
        state.initialize(3)
    names = [s.name for s in whole.state_tensors() if s.kind == "master"]
    generator = random.Random(1)
    for step in range(5):
        gradient = _gradient(whole, step)
        whole.apply(gradient, 1 / 7, 1e-2)
        generator.shuffle(names)
        edge = generator.randint(1, len(names) - 1)
        for part in (names[:edge], names[edge:]):
            cut.apply(gradient, 1 / 7, 1e-2, only=frozenset(part))
        assert [s.digest() for s in cut.state_tensors()] == [
            s.digest() for s in whole.state_tensors()
        ]
        assert all(map(torch.equal, _computed(cut), _computed(whole)))


def _computed(state):
    return [parameter for block in state.blocks for parameter in block.module.parameters()]


def test_state_is_allocated_before_the_first_step_in_canonical_order():
    state = _state()
    names = [(s.name, s.kind) for s in state.state_tensors()]
    kinds = ["master", "exp_avg", "exp_avg_sq", "step"]
    assert names == [
        (name, kind) for name in ("a.weight", "a.bias", "b.weight", "b.bias") for kind in kinds
    ]
    assert [(s.name, s.kind) for s in state.flats()] == [(b, k) for b in "ab" for k in kinds]
    assert state.flats()[0].id == "master:a"
    storages = {s.tensor.untyped_storage().data_ptr() for s in state.flats()}
    for tensor in state.state_tensors():
        assert tensor.tensor.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "adam"])
def test_other_optimizers_whose_state_starts_from_zero_are_accepted(kind):
    def factory(named):
        tensors = [tensor for _, tensor in named]
        if kind == "sgd":
            return torch.optim.SGD(tensors, lr=0.0, momentum=0.9)
        if kind == "rmsprop":
            return torch.optim.RMSprop(tensors, lr=0.0)
        return torch.optim.Adam(tensors, lr=0.0)

    state = _state(factory)
    state.initialize(1)
    before = [s.tensor.clone() for s in state.flats()]
    for step in range(2):
        state.apply(_gradient(state, step), 1.0, 1e-3)
    changed = [not torch.equal(a, s.tensor) for a, s in zip(before, state.flats(), strict=True)]
    assert all(changed)
    assert set(state._optimizers[0].state[state.state_tensors()[0].tensor]) == {
        s.kind for s in state.flats() if s.kind != "master"
    }


def test_an_optimizer_whose_state_does_not_start_from_zero_is_refused():
    with pytest.raises(ValueError, match="NAdam does not start 'mu_product'"):
        _state(lambda named: torch.optim.NAdam([tensor for _, tensor in named]))


def test_the_masters_have_the_digest_of_their_tensors_one_by_one():
    state = _state()
    state.initialize(5)
    masters = [t for t in state.state_tensors() if t.kind == "master"]
    expected = digest.total(digests.tensor_digest(t.id, t.tensor) for t in masters)
    assert state.masters_digest() == optimizer.Shared(expected, digest.Digest.zero())
    state.flats()[0].tensor[31] += 1.0
    assert state.masters_digest().own != expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.chaos)]
)
def test_each_bit_beside_the_masters_is_in_one_of_the_parts_that_cells_compare(dtype):
    state = _state(dtype=dtype)
    state.initialize(3)
    state.apply(_gradient(state, 1), 0.25, 1e-2)

    def told():
        return [digests.added(state.rest_sums(part)) for part in range(optimizer.REST_PARTS)]

    before = told()
    rest = [flat.tensor for flat in state.flats() if flat.kind != "master"]
    if dtype != torch.float32:
        rest += [block.compute for block in state.blocks]
    assert len(rest) == (6 if dtype == torch.float32 else 8)
    for tensor in rest:
        size = tensor.numel()
        borders = {size * part // optimizer.REST_PARTS for part in range(optimizer.REST_PARTS)}
        for element in sorted({0, size // 2, size - 1, *borders, *(b - 1 for b in borders if b)}):
            bits.flip_bit(tensor, element, 0)
            assert sum(map(operator.ne, told(), before)) == 1, element
            bits.flip_bit(tensor, element, 0)
    for block in state.blocks:
        bits.flip_bit(block.masters, 0, 0)  # these are compared in each step
    assert told() == before


def _operations(width, num_blocks):
    specs = [
        blocks.BlockSpec(name=f"b{i}", build=lambda: nn.Linear(width, width))
        for i in range(num_blocks)
    ]
    state = optimizer.StageState([blocks.Block(spec) for spec in specs], optimizer.adamw())
    state.initialize(1)
    gradient = _gradient(state, 1)
    with Operations() as seen:
        state.apply(gradient, 0.5, 1e-3)
    return seen.count


def test_operations_of_an_apply_are_counted_by_blocks_alone():
    one, two, four = (_operations(8, num_blocks) for num_blocks in (1, 2, 4))
    assert four - two == 2 * (two - one)
    assert [_operations(700, num_blocks) for num_blocks in (1, 2)] == [one, two]


def test_the_learning_rate_warms_up_and_decays_by_the_step_alone():
    rate = optimizer.warmup_cosine(peak=1.0, warmup_steps=4, total_steps=104)
    assert [rate(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(54) == pytest.approx(0.55)
    assert rate(104) == rate(1000) == pytest.approx(0.1)
    assert optimizer.warmup_cosine(peak=1.0, warmup_steps=0, total_steps=1)(0) == 1.0
