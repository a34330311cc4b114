import copy

import pytest
import torch
from torch import nn

from mainstay_train.compute import measure
from mainstay_train.exact import draws, initialization, numerics
from mainstay_train.model import blocks, data, losses, split
from mainstay_train.models import llama, llama_config

ADDRESS = draws.Address(1, 2, 3, 0)


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def _spec(build, **changes):
    return blocks.BlockSpec(name="block", build=build, **changes)


def _layer(**changes):
    config = llama_config.LlamaConfig(
        dim=24, layers=2, heads=4, kv_heads=2, hidden=40, sequence=10, micro_batch_size=2, **changes
    )
    return llama.block_specs(config)


def _autograd(block, x, dy, address=ADDRESS):
    """The same module under ordinary autograd, in fp64 where it is the reference."""
    module = copy.deepcopy(block.module).double()
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    x = x.double() if x.is_floating_point() else x
    leaf = x.clone().requires_grad_(x.is_floating_point())
    module(leaf, address).backward(dy.double()) if block.spec.draws else module(leaf).backward(
        dy.double()
    )
    return leaf.grad, {f"block.{n}": p.grad for n, p in module.named_parameters()}


class _Mixed(nn.Module):
    """Split and plain modules, a bias, a weight used twice and one never used."""

    def __init__(self):
        super().__init__()
        self.first = split.Linear(8, 8, bias=True)
        self.norm = split.RMSNorm(8)
        self.plain = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.zeros(3, 3))
        self.same = self.first

    def forward(self, x):
        x = self.first(x)
        return self.plain(torch.tanh(self.same(self.norm(x)))) * self.plain.bias


@pytest.mark.parametrize("build", [_Mixed, lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU())])
def test_split_backward_equals_autograd(build):
    block = blocks.Block(_spec(build))
    block.initialize(5)
    for parameter in block.module.parameters():
        parameter.data.normal_(generator=ADDRESS.generator("p"))
    x = torch.randn(2, 5, 8, generator=ADDRESS.generator("x"))
    dy = torch.randn(2, 5, 8, generator=ADDRESS.generator("dy"))
    tape = block.recompute(x, ADDRESS)
    assert torch.equal(tape.output, block.forward(x, ADDRESS))
    dx = block.backward_input(tape, dy)
    grads = block.layout.views(block.layout and torch.full((block.layout.size,), float("nan")))
    block.backward_weight(tape, grads)
    want_dx, want = _autograd(block, x, dy)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)
    assert grads.keys() == want.keys()
    for name, gradient in grads.items():
        expected = torch.zeros_like(gradient) if want[name] is None else want[name]
        torch.testing.assert_close(gradient.double(), expected.double(), rtol=1e-4, atol=1e-4)


def _llama_fp64_loss(specs, seed, tokens, targets):
    """The whole model in fp64 under ordinary autograd."""
    made = [blocks.Block(spec) for spec in specs]
    x, parameters = tokens, {}
    for block in made:
        block.initialize(seed)
        module = copy.deepcopy(block.module)
        for name, parameter in list(module.named_parameters()):
            parameter.data = parameter.data.double()
            parameter.requires_grad_(True)
            parameters[f"{block.name}.{name}"] = parameter
        x = module(x, ADDRESS) if block.spec.draws else module(x)
    x = nn.functional.linear(x, parameters["head.out.weight"])
    loss = nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in parameters.items()}


def test_llama_gradients_equal_autograd_over_the_whole_model():
    specs = _layer()
    tokens = torch.randint(0, 256, (2, 10), generator=ADDRESS.generator("t"))
    targets = torch.randint(0, 256, (2, 10), generator=ADDRESS.generator("u"))
    chain = [blocks.Block(spec) for spec in specs]
    x, inputs = tokens, []
    for block in chain:
        block.initialize(9)
        inputs.append(x)
        x = block.forward(x, ADDRESS)
    loss = chain[-1].recompute_loss(inputs[-1], targets, ADDRESS).loss
    found, dy = {}, None
    for block, x in zip(reversed(chain), reversed(inputs), strict=True):
        last = block is chain[-1]
        tape = block.recompute_loss(x, targets, ADDRESS) if last else block.recompute(x, ADDRESS)
        dy = block.backward_input(tape, dy)
        views = block.layout.views(torch.empty(block.layout.size))
        block.backward_weight(tape, views)
        found |= views
    assert dy is None
    want_loss, want = _llama_fp64_loss(specs, 9, tokens, targets)
    torch.testing.assert_close(loss.double(), want_loss.double(), rtol=1e-5, atol=1e-4)
    assert found.keys() == want.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), want[name].double(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recompute_has_the_bits_of_forward_and_repeats_itself(dtype):
    for spec in _layer(dropout=0.2):
        block = blocks.Block(spec, dtype=dtype)
        block.initialize(3)
        x = torch.randn(2, 10, 24, generator=ADDRESS.generator("x")).to(dtype)
        if spec.name == "embedding":
            x = torch.randint(0, 256, (2, 10), generator=ADDRESS.generator("t"))
        y = block.forward(x, ADDRESS)
        first, second = block.recompute(x, ADDRESS), block.recompute(x.clone(), ADDRESS)
        assert y.dtype == dtype
        assert torch.equal(first.output, y)
        dy = torch.randn(y.shape, generator=ADDRESS.generator("dy")).to(dtype)
        dx = [block.backward_input(tape, dy) for tape in (first, second)]
        assert dx[0] is None or torch.equal(*dx)
        flats = [torch.zeros(block.layout.size) for _ in range(2)]
        for tape, flat in zip((first, second), flats, strict=True):
            block.backward_weight(tape, block.layout.views(flat))
        assert torch.equal(*flats)
        assert flats[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulating_adds_each_micro_batchs_own_rounded_gradient(dtype):
    specs = _layer()
    for spec in (specs[0], specs[1]):
        block = blocks.Block(spec, dtype=dtype)
        block.initialize(3)
        singles, total = [], torch.full((block.layout.size,), float("nan"))
        for micro_batch in range(3):
            address = draws.Address(0, 0, 0, micro_batch)
            x = torch.randn(2, 10, 24, generator=address.generator("x")).to(dtype)
            if spec.name == "embedding":
                x = torch.randint(0, 256, (2, 10), generator=address.generator("t"))
            for target, accumulate in ((torch.zeros(block.layout.size), False), (total, True)):
                tape = block.recompute(x, address)
                block.backward_input(tape, torch.ones(2, 10, 24, dtype=dtype))
                views = block.layout.views(target)
                block.backward_weight(tape, views, accumulate=accumulate and micro_batch > 0)
                singles += [] if accumulate else [target]
        for param in block.layout.params:
            a, b = param.offset, param.offset + param.numel
            expected = singles[0][a:b] + singles[1][a:b] + singles[2][a:b]
            assert torch.equal(total[a:b], expected)


def test_rows_of_a_table_are_added_as_by_a_whole_table_per_micro_batch():
    """The brute force: all rows of a micro-batch into a table of zeros, then that table added."""
    random = torch.Generator().manual_seed(1)
    for _ in range(300):
        size, count, width = torch.randint(1, 40, (3,), generator=random).tolist()
        table = torch.zeros(size, width)
        expected = table.clone()
        for _ in range(3):
            places = torch.randint(0, size, (count,), generator=random)
            rows = torch.randn(count, width, generator=random).bfloat16()
            split.add_rows(table, places, rows)
            expected += torch.zeros_like(expected).index_add_(0, places, rows.float())
            assert torch.equal(table.view(torch.int32), expected.view(torch.int32))


def test_the_gradient_of_an_embedding_takes_memory_for_tokens_and_not_for_the_table():
    peaks = []
    for size in (100, 10_000):
        block = blocks.Block(_spec(lambda size=size: split.Embedding(size, 8)))
        views = block.layout.views(torch.zeros(block.layout.size))
        tape = block.recompute(torch.arange(20).reshape(2, 10), ADDRESS)
        block.backward_input(tape, torch.ones(2, 10, 8))
        with measure.LiveBytes() as live:
            block.backward_weight(tape, views, accumulate=True)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] < 100 * 8 * 4


class _Draws(nn.Module):
    def forward(self, x):
        return x * torch.rand(())


class _Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_Draws, "running generator"),
        (_Counts, r"changed its buffers \['calls'\]"),
        (lambda: nn.Sequential(nn.Dropout(0.1)), "Dropout"),
        (lambda: nn.Sequential(nn.BatchNorm1d(3)), "BatchNorm1d"),
    ],
)
def test_a_block_that_is_no_pure_function_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        blocks.Block(_spec(build)).forward(torch.ones(3), ADDRESS)


def test_only_the_last_block_has_a_loss_and_it_is_an_fp32_sum():
    x, targets = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="has no loss"):
        blocks.Block(_spec(nn.Identity)).recompute_loss(x, targets, ADDRESS)
    with pytest.raises(ValueError, match="fp32 scalar"):
        blocks.Block(_spec(nn.Identity, loss=lambda y, _: y)).recompute_loss(x, targets, ADDRESS)


def test_ignored_targets_count_not_as_loss():
    block = blocks.Block(_spec(nn.Identity, loss=losses.cross_entropy_sum))
    x = torch.zeros(4, 256)
    targets = torch.tensor([1, losses.IGNORED_TARGET, 2, losses.IGNORED_TARGET])
    loss = block.recompute_loss(x, targets, ADDRESS).loss
    torch.testing.assert_close(loss, 2 * torch.log(torch.tensor(256.0)))


def test_masters_feed_the_module_through_refresh():
    for dtype in (torch.float32, torch.bfloat16):
        block = blocks.Block(_spec(lambda: nn.Linear(4, 4)), dtype=dtype)
        block.masters.fill_(1.5)
        block.refresh()
        assert block.module.weight.dtype == dtype
        assert bool((block.module.weight == 1.5).all())
        assert block.masters.dtype == torch.float32


def test_first_values_depend_on_seed_and_name_alone():
    a = initialization.init_tensor(1, "layers.0.w", (3, 4), 0.02)
    assert torch.equal(a, initialization.init_tensor(1, "layers.0.w", (3, 4), 0.02))
    assert not torch.equal(a, initialization.init_tensor(1, "layers.1.w", (3, 4), 0.02))
    assert not torch.equal(a, initialization.init_tensor(2, "layers.0.w", (3, 4), 0.02))
    assert bool((initialization.init_tensor(1, "n", (3,), 0.0, 1.0) == 1).all())


def test_draws_depend_on_the_whole_address_and_the_site():
    base = ADDRESS.uniform((8,), "a")
    assert torch.equal(base, draws.Address(1, 2, 3, 0).uniform((8,), "a"))
    others = [
        draws.Address(0, 2, 3, 0), draws.Address(1, 0, 3, 0), draws.Address(1, 2, 0, 0),
        draws.Address(1, 2, 3, 1),
    ]  # fmt: skip
    assert not any(torch.equal(base, other.uniform((8,), "a")) for other in others)
    assert not torch.equal(base, ADDRESS.uniform((8,), "b"))
    assert draws.hash64("ab", "c") != draws.hash64("a", "bc")
    assert draws.hash64(1, 23) != draws.hash64(12, 3)


def test_the_vocabulary_of_bytes_is_what_the_head_predicts():
    block = blocks.Block(_layer()[-1])
    assert block.layout.params[-1].shape == (data.VOCAB_SIZE, 24)
