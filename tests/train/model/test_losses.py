"""The chunked losses against torch's own in fp64, and what they hold in memory."""

import pytest
import torch
from torch.nn import functional

from mainstay_train.compute.measure import LiveBytes
from mainstay_train.exact import draws, numerics
from mainstay_train.model import blocks, losses, split

ADDRESS = draws.Address(1, 2, 3, 0)


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def given(count, vocab, dim=8, dtype=torch.float32):
    """Inputs, weight and targets; some targets are ignored."""
    x = torch.randn(count, dim, generator=ADDRESS.generator("x")).to(dtype)
    weight = torch.randn(vocab, dim, generator=ADDRESS.generator("w")).to(dtype)
    targets = torch.randint(0, vocab, (count,), generator=ADDRESS.generator("t"))
    targets[::5] = losses.IGNORED_TARGET
    return x, weight, targets


def reference(x, weight, targets):
    """Loss and gradients of input and weight in fp64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    loss = functional.cross_entropy(
        x @ weight.t(), targets, ignore_index=losses.IGNORED_TARGET, reduction="sum"
    )
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def projected(chunk_elements, vocab, dim=8, *, factor=1.0, dtype=torch.float32):
    """A block that is nothing but the last projection with its loss."""
    spec = blocks.BlockSpec(
        name="head",
        build=lambda: Head(dim, vocab, chunk_elements),
        module_loss=lambda module, x, targets: factor * module.out(x, targets),
    )
    return blocks.Block(spec, dtype=dtype)


class Head(torch.nn.Module):
    def __init__(self, dim, vocab, chunk_elements):
        super().__init__()
        self.out = losses.ProjectedCrossEntropy(dim, vocab, chunk_elements=chunk_elements)

    def forward(self, x):
        return x


def backward(block, x, targets, *, start=None):
    """Loss and gradients, the weight's added to ``start`` where there is one."""
    tape = block.recompute_loss(x, targets, ADDRESS)
    loss = tape.loss
    dx = block.backward_input(tape)
    flat = torch.full((block.layout.size,), float("nan")) if start is None else start.clone()
    views = block.layout.views(flat)
    block.backward_weight(tape, views, accumulate=start is not None)
    return loss, dx, views["head.out.weight"]


@pytest.mark.parametrize("chunk_elements", [1, 90, 31 * 17, 1 << 24])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_projection_with_its_loss_is_that_of_torch_however_it_is_cut(chunk_elements, factor):
    x, weight, targets = given(31, 17)
    block = projected(chunk_elements, 17, factor=factor)
    block.layout.views(block.masters)["head.out.weight"].copy_(weight)
    found, dx, dw = backward(block, x, targets)
    loss, want_dx, want_dw = (factor * t for t in reference(x, weight, targets))
    torch.testing.assert_close(found.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dw.double(), want_dw, rtol=1e-4, atol=1e-5)
    before = torch.ones(block.layout.size)
    _, _, added = backward(block, x, targets, start=before)
    assert torch.equal(added, 1 + dw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_elements", [1, 90, 1 << 24])
def test_the_loss_of_logits_is_that_of_torch_however_it_is_cut(chunk_elements, dtype):
    logits, _, targets = given(31, 3, dim=17, dtype=dtype)
    logits.requires_grad_()
    given_as = logits.view(1, 31, 17), targets.view(1, 31)
    loss = losses.cross_entropy_sum(*given_as, chunk_elements)
    (dx,) = torch.autograd.grad(2 * loss, logits)
    wide = logits.detach().double().requires_grad_()
    want = functional.cross_entropy(wide, targets, reduction="sum")
    (want_dx,) = torch.autograd.grad(2 * want, wide)
    assert (loss.dtype, dx.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    near = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(dx.double(), want_dx, rtol=near, atol=near)


def test_large_logits_neither_overflow_nor_vanish():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    loss = losses.cross_entropy_sum(logits, torch.tensor([1, 0]))
    (dx,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(2e4 + 1.0986, rel=1e-6)
    assert torch.equal(dx[0], torch.tensor([1.0, -1.0, 0.0]))


def test_a_target_outside_the_vocabulary_is_the_users_mistake():
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        losses.cross_entropy_sum(torch.zeros(2, 3), torch.tensor([1, 3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_a_chunk_are_all_that_is_ever_there(dtype):
    chunk, tokens, dim = 4096, 512, 8
    peaks = []
    for vocab in (256, 2048):
        block = projected(chunk, vocab, dtype=dtype)
        x, _, targets = given(tokens, vocab, dtype=dtype)
        views = torch.zeros(block.layout.size)
        with LiveBytes() as live:
            backward(block, x, targets, start=views)
        peaks.append(live.peak - 4 * vocab * dim)  # the copy of what is added to
    assert max(peaks) < 3 * 4 * chunk + 40 * tokens * dim < 4 * tokens * 2048 / 8


def test_bf16_products_of_64_micro_batches_are_summed_in_fp32():
    """Each sum of n terms in fp32 is off by at most n roundings of the sum of absolute terms."""
    tokens, outs, ins, count = 96, 24, 40, 64
    total = torch.zeros(outs, ins)
    rounded = torch.zeros(outs, ins)  # as it would be with products that are bf16
    exact, size = torch.zeros(2, outs, ins, dtype=torch.float64)
    for number in range(count):
        random = draws.Address(0, 0, 0, number).generator("operands")
        dy = (1 + torch.randn(tokens, outs, generator=random)).bfloat16()
        x = torch.randn(tokens, ins, generator=random).bfloat16()
        split.add_product(total, dy, x, number > 0)
        rounded += torch.mm(dy.t(), x)
        exact += dy.double().t() @ x.double()
        size += dy.double().abs().t() @ x.double().abs()
    bound = (count + tokens) * 2.0**-24 * size
    assert bool(((total - exact).abs() <= bound).all())
    assert bool(((rounded - exact).abs() > bound).any())


def test_wide_products_are_the_same_however_large_the_pieces_are():
    random = ADDRESS.generator("p")
    dy = torch.randint(-3, 4, (50, 13), generator=random).bfloat16()
    x = torch.randint(-3, 4, (50, 21), generator=random).bfloat16()
    want = dy.float().t() @ x.float()  # of whole numbers: without a rounding error
    for elements in (1, 21, 100, 1 << 22):
        view = torch.full((13, 21), 7.0)
        split.add_product(view, dy, x, True, elements)
        assert torch.equal(view, 7 + want)
        split.add_product(view, dy, x, False, elements)
        assert torch.equal(view, want)


def test_a_product_of_no_tokens_is_zero_and_leaves_a_sum_as_it_is():
    dy, x = torch.zeros(0, 13, dtype=torch.bfloat16), torch.zeros(0, 21, dtype=torch.bfloat16)
    view = torch.full((13, 21), 7.0)
    split.add_product(view, dy, x, True)
    assert bool((view == 7).all())
    split.add_product(view, dy, x, False)
    assert bool((view == 0).all())
