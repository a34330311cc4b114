"""Blocks as compiled code: their bits repeat, gradients are unrounded, and what cannot is refused.

Compiling takes seconds, so a small block is compiled once, in the type that asks for more.
"""

import shutil
from functools import partial

import pytest
import torch
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact import draws, numerics
from mainstay_train.model import blocks, compilation, data, split, trial, workload
from mainstay_train.models import moe
from mainstay_train.models.llama_config import parse_config
from mainstay_train.models.moe_config import MoeConfig

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method")
HAS_COMPILER = shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler (g++)")
CPU = torch.device("cpu")
SHAPE = (1, 6, 8)


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


class Mixed(nn.Module):
    """Modules that defer gradients, one of them called twice, one of torch's, and a draw."""

    def __init__(self):
        super().__init__()
        self.norm = split.RMSNorm(8)
        self.twice = split.Linear(8, 8, bias=True)
        self.plain = nn.Linear(8, 8)

    def forward(self, x, address):
        x = x + torch.tanh(self.twice(self.norm(x)))
        x = x * (address.uniform(x.shape, "here") > 0.25)
        return self.plain(torch.tanh(self.twice(x)))


class Varying(nn.Module):
    """A module that adds what a compiler does not see into: the number of its calls, scaled."""

    def __init__(self, scale):
        super().__init__()
        self.out = split.Linear(8, 8)
        self.scale, self.calls = scale, []
        self.count = torch.compiler.disable(lambda: self.calls.append(0) or len(self.calls))

    def forward(self, x):
        return self.out(x) + self.scale * self.count()


MIXED = blocks.BlockSpec(name="mixed", build=Mixed, draws=True)


def run(block, x, address):
    """Output, the input's gradient and the weights' of a micro-batch."""
    tape = block.recompute(x, address)
    output = tape.output.detach()
    dx = block.backward_input(tape, torch.cos(output))
    views = block.layout.views(torch.full((block.layout.size,), float("nan")))
    block.backward_weight(tape, views)
    return output, dx, views


def graphs():
    """Number of graphs that were compiled so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@pytest.mark.chaos
@needs_compiler
def test_a_compiled_block_is_the_same_function_and_repeats_its_bits():
    dtype, near = torch.bfloat16, 0.05
    plain, compiled = (blocks.Block(MIXED, dtype=dtype, compiles=c) for c in (False, True))
    plain.initialize(5)
    compiled.initialize(5)
    made = []
    for length in (6, 4):
        for step in range(3):
            address = draws.Address(1, step, 3, 4)
            x = torch.randn(2, length, 8, generator=address.generator("x")).to(dtype)
            output, dx, weights = run(compiled, x, address)
            made.append(graphs())
            assert torch.equal(compiled.forward(x, address), output)
            again = run(compiled, x.clone(), address)
            assert torch.equal(again[0], output)
            assert torch.equal(again[1], dx)
            wanted = run(plain, x, address)
            torch.testing.assert_close(output, wanted[0], rtol=near, atol=near)
            torch.testing.assert_close(dx, wanted[1], rtol=near, atol=near)
            for name, gradient in weights.items():
                assert torch.equal(again[2][name], gradient)
                torch.testing.assert_close(gradient, wanted[2][name], rtol=near, atol=4 * near)
                rounded = torch.equal(gradient.bfloat16().float(), gradient)
                assert rounded == name.startswith("mixed.plain"), name
    first, other = made[0], made[3]
    assert made == [first] * 3 + [other] * 3, "compiled for each shape, not for each address"
    assert other > first


@pytest.mark.chaos
@needs_compiler
def test_a_compiled_layer_with_experts_counts_and_repeats_its_bits():
    sizes = {
        "dim": 16, "layers": 1, "heads": 2, "kvHeads": 1, "sequence": 6, "denseLayers": 0,
        "experts": 4, "activeExperts": 2, "expertHidden": 8,
    }  # fmt: skip
    (spec,) = moe.block_specs(parse_config(sizes, MoeConfig))[1:2]
    plain, compiled = (blocks.Block(spec, compiles=c) for c in (False, True))
    x = torch.randn(1, 6, 16, generator=draws.Address(1, 2, 3, 4).generator("x"))
    found = []
    for block in (plain, compiled, compiled):
        block.initialize(5)
        address = draws.Address(1, len(found), 3, 4)
        counted = block.recompute(x, address).statistics
        found.append((*run(block, x, address), counted))
    for wanted, given, again in zip(*found, strict=True):
        if isinstance(wanted, dict):
            assert all(torch.equal(given[name], again[name]) for name in given)
            for name, gradient in wanted.items():
                torch.testing.assert_close(given[name], gradient, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(given, again)
            torch.testing.assert_close(given, wanted, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="only split modules that are not compiled"):
        compiled.backward_weight(compiled.recompute(x, address), {}, frozen=["layers.0.rest"])


def model(*middle, **last):
    """A workload whose last block is given, and those between it and the first."""
    return workload.Workload(
        blocks=(
            blocks.BlockSpec(name="embedding", build=lambda: split.Embedding(256, 8)),
            *middle,
            blocks.BlockSpec(loss=lambda y, targets: y.float().sum() + 0 * targets.sum(), **last),
        ),
        dataset=data.ByteDataset(data.STDLIB, sequence=6, micro_batch_size=1),
        activation_shape=SHAPE,
        learning_rate=lambda _: 0.1,
    )


@needs_compiler
def test_a_trial_names_the_compiler_and_refuses_a_block_whose_bits_vary():
    entry = trial.check(model(name="head", build=lambda: split.Linear(8, 256)), CPU)
    assert entry["compile"].startswith("inductor by block, ")
    assert "g++" in entry["compile"]

    even, odd = (
        blocks.BlockSpec(name=name, build=partial(Varying, scale))
        for name, scale in (("even", 0), ("odd", 1))
    )
    with pytest.raises(InvalidSpecError, match=r"two runs of block 'odd' .* other bits; use Off"):
        trial.check(model(even, odd, name="head", build=lambda: split.Linear(8, 256)), CPU)


@needs_compiler
def test_a_compiler_that_is_missing_or_fails_is_named_with_the_field():
    import torch._inductor.config

    head = model(name="head", build=lambda: split.Linear(8, 256))
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")}),
        pytest.raises(
            InvalidSpecError, match=r"spec\.runtime\.compile: .*C\+\+ compiler .* or use Off"
        ),
    ):
        trial.check(head, CPU)
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "/bin/true")}),
        pytest.raises(InvalidSpecError, match=r"block 'head' cannot be compiled here .*; use Off"),
    ):
        trial.check(
            model(name="head", build=lambda: nn.Sequential(split.RMSNorm(8), split.Linear(8, 257))),
            CPU,
        )


def test_a_training_loop_of_its_own_is_not_compiled_and_says_so():
    compilation.check_loop("off", "train.py:train")
    with pytest.raises(
        InvalidSpecError, match=r"compile: is Blocks, but train\.py:train is a train"
    ):
        compilation.check_loop("blocks", "train.py:train")
