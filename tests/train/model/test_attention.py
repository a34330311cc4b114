"""Attention by the fused kernel against the explicit form, and what is refused."""

import hashlib
import subprocess
import sys

import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.compute.measure import LiveBytes
from mainstay_train.exact import draws, numerics
from mainstay_train.model import workload
from mainstay_train.models import attention

CPU = torch.device("cpu")
SMALL = {"dim": 32, "layers": 1, "heads": 4, "kvHeads": 2, "hidden": 32}
SHAPES = [(4, 2, 8), (3, 1, 16), (2, 2, 6)]
"""Heads of queries and of keys, and their width."""


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def computed(form, shape, *, length=70, batch=2, dtype=torch.float32):
    """Output and gradient of one attention."""
    heads, kv_heads, width = shape
    random = draws.Address(0, 1, 2, 3).generator("qkv")
    size = (batch, length, (heads + 2 * kv_heads) * width)
    qkv = torch.randn(size, generator=random).to(dtype).requires_grad_()
    out = attention.attend(qkv, *shape, 10_000.0, form)
    dy = torch.randn(out.shape, generator=random).to(dtype)
    return out.detach(), torch.autograd.grad(out, qkv, dy)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fused_kernel_computes_what_the_explicit_form_does(shape, dtype):
    near = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    for found, want in zip(
        computed("flash", shape, dtype=dtype),
        computed("explicit", shape, dtype=dtype),
        strict=True,
    ):
        torch.testing.assert_close(found, want, rtol=near, atol=near)


def digest_of_flash():
    """Of outputs and gradients, in both types."""
    found = hashlib.blake2b(digest_size=8)
    for dtype in (torch.float32, torch.bfloat16):
        for tensor in computed("flash", SHAPES[0], length=300, dtype=dtype):
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def test_the_fused_kernel_has_the_same_bits_in_every_run_and_process():
    ours = {digest_of_flash() for _ in range(3)}
    script = (
        "from mainstay_train.exact import numerics; numerics.setup('cpu')\n"
        "from tests.train.model import test_attention as t; print(t.digest_of_flash())\n"
    )
    theirs = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert ours == {theirs.stdout.strip()}


def test_what_a_layer_keeps_grows_with_the_sequence_and_not_with_its_square():
    def peak(form, length):
        model = workload.load("", {**SMALL, "sequence": length, "attention": form})
        (layer,) = model.build([1])
        x, address = torch.zeros(1, length, 32), draws.Address(0, 0, 0, 0)
        layer.forward(x, address)  # makes rotations and a mask
        with LiveBytes() as live:
            layer.backward_input(layer.recompute(x, address), torch.zeros_like(x))
        return live.peak

    short, long = (peak("flash", length) for length in (256, 1024))
    assert long == pytest.approx(4 * short, rel=0.01)
    assert peak("explicit", 1024) > 8 * peak("explicit", 256)


def test_auto_is_flash_where_there_is_a_kernel_of_the_type():
    cuda = torch.device("cuda:0")
    for device, dtype, form in [
        (CPU, torch.float32, "flash"),
        (CPU, torch.bfloat16, "flash"),
        (cuda, torch.bfloat16, "flash"),
        (cuda, torch.float32, "explicit"),
    ]:
        assert attention.choose("auto", device, dtype) == form
        assert attention.choose("explicit", device, dtype) == "explicit"


def test_the_form_in_use_is_in_the_fingerprint():
    for wanted, form in [("auto", "flash"), ("flash", "flash"), ("explicit", "explicit")]:
        model = workload.load("", {**SMALL, "attention": wanted})
        assert model.fingerprint(CPU)["attention"] == form


def test_an_unknown_form_is_refused_by_the_field():
    with pytest.raises(InvalidSpecError) as refused:
        workload.load("", {**SMALL, "attention": "flsh"})
    assert str(refused.value) == (
        "workload.config.attention: must be one of auto, flash, explicit, got 'flsh'"
    )


def check_with(compute):
    return attention.check("flash", CPU, torch.float32, *SHAPES[0], compute)


def test_a_device_without_the_kernel_is_refused_with_what_is_right():
    def none(*_):
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    with pytest.raises(InvalidSpecError) as refused:
        check_with(none)
    assert str(refused.value) == (
        "workload.config.attention: is 'flash', but this torch has no flash attention of "
        "torch.float32 with heads of width 8 on cpu whose backward is deterministic (No available "
        "kernel. Aborting execution.); use 'explicit', which every device has"
    )


def test_a_kernel_whose_bits_vary_is_refused():
    calls = iter(range(100))

    def varies(*given):
        return attention.attend(*given) + next(calls) * 1e-6

    with pytest.raises(InvalidSpecError, match=r"config\.attention: .* have other bits; use 'expl"):
        check_with(varies)


def test_lack_of_memory_is_no_mistake_of_the_users():
    def full(*_):
        raise torch.OutOfMemoryError("the device is full")

    with pytest.raises(torch.OutOfMemoryError):
        check_with(full)
