"""The optimizer on a device: its bits repeat, and depend on nothing but a parameter's own."""

import pytest
import torch
from torch import nn

from mainstay_train.exact import numerics, optimizer
from mainstay_train.exact.optimizer import StageState
from mainstay_train.kernels import bits
from mainstay_train.model import blocks

SPECS = [
    blocks.BlockSpec(name="a", build=lambda: nn.Linear(30, 50)),
    blocks.BlockSpec(name="b", build=lambda: nn.Linear(50, 301)),
    blocks.BlockSpec(name="c", build=lambda: nn.LayerNorm(77)),
]
FACTORIES = {
    "adamw": optimizer.adamw(),
    "sgd": optimizer.each(torch.optim.SGD, momentum=0.9),
    "rmsprop": optimizer.each(torch.optim.RMSprop),
    "adagrad": optimizer.each(torch.optim.Adagrad),
}


def make(device, which=(0, 1, 2), factory="adamw", dtype=torch.float32):
    built = [blocks.Block(SPECS[i], device=device, dtype=dtype) for i in which]
    state = StageState(built, FACTORIES[factory])
    state.initialize(3)
    return state


def gradient(state, step, device):
    """Numbers that belong to a block, not to its stage."""
    flat = state.layout.allocate()
    for block, view in zip(state.blocks, state.layout.block_views(flat), strict=True):
        for param in block.layout.params:
            random = torch.Generator().manual_seed(step + sum(map(ord, param.name)))
            part = view[param.offset : param.offset + param.numel]
            part.copy_(torch.randn(param.numel, generator=random))
    return state.layout.block_views(flat.to(device))


def trained(device, which=(0, 1, 2), factory="adamw", dtype=torch.float32):
    state = make(device, which, factory, dtype)
    for step in range(5):
        state.apply(gradient(state, step, device), 1 / 7, 1e-2)
    return state


def told(state):
    """Digest of each tensor of a state, by name."""
    return {t.id: bits.digest_of([t.tensor]) for t in state.state_tensors()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factory", sorted(FACTORIES))
def test_apply_repeats_its_bits_wherever_the_tensors_lie(device, factory, dtype):
    first = trained(device, factory=factory, dtype=dtype)
    kept = torch.empty(1001, device=device)
    second = trained(device, factory=factory, dtype=dtype)
    assert told(first) == told(second)
    assert len(kept) == 1001
    computed = [bits.digest_of([block.compute for block in s.blocks]) for s in (first, second)]
    assert computed[0] == computed[1]
    assert first.masters_digest() == second.masters_digest()


@pytest.mark.parametrize("factory", sorted(FACTORIES))
def test_the_bits_do_not_depend_on_how_the_model_is_cut(device, factory):
    whole = told(trained(device, factory=factory))
    parts = [told(trained(device, which, factory)) for which in ((0,), (1, 2))]
    assert parts[0] | parts[1] == whole


def test_apply_to_some_parameters_has_their_bits(device):
    state, parts = make(device), make(device)
    names = [t.name for t in state.state_tensors() if t.kind == "master"]
    grads = gradient(state, 0, device)
    state.apply(grads, 0.5, 1e-2)
    parts.apply(grads, 0.5, 1e-2, only=frozenset(names[:2]))
    parts.apply(grads, 0.5, 1e-2, only=frozenset(names[2:]))
    assert told(parts) == told(state)


def test_the_state_is_where_its_blocks_are_and_digests_are_those_of_the_host(device):
    state = trained(device)
    assert {flat.tensor.device for flat in state.flats()} == {device}
    host = make("cpu")
    for mine, theirs in zip(host.flats(), state.flats(), strict=True):
        assert (mine.id, mine.tensor.dtype) == (theirs.id, theirs.tensor.dtype)
        mine.tensor.copy_(theirs.tensor)
    assert host.masters_digest() == state.masters_digest()
    for part in (0, 7):
        here, there = ([sums.tolist() for sums in s.rest_sums(part)] for s in (host, state))
        assert here == there
    assert [t.digest() for t in host.state_tensors()] == [t.digest() for t in state.state_tensors()]


def test_apply_is_near_that_of_the_host(device):
    here, there = trained("cpu"), trained(device)
    for mine, theirs in zip(here.state_tensors(), there.state_tensors(), strict=True):
        torch.testing.assert_close(theirs.tensor.cpu(), mine.tensor, rtol=1e-4, atol=1e-6)


def test_apply_does_not_wait_for_the_device(needs_cuda):
    state = make(needs_cuda)
    grads = gradient(state, 0, needs_cuda)
    state.apply(grads, 0.5, 1e-2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.apply(grads, 0.5, 1e-2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_arithmetic_is_set(needs_cuda):
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    assert numerics.setup(needs_cuda) == needs_cuda
