"""What models are made of, on a device: equal bits each time, near the host's numbers, no waits."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from mainstay_train.exact.draws import Address
from mainstay_train.model import losses, split, trial, workload
from mainstay_train.models import attention, experts

LLAMA, MOE = "mainstay_train.models.llama:workload", "mainstay_train.models.moe:workload"
SMALL = {"dim": 64, "layers": 2, "heads": 4, "kvHeads": 2, "hidden": 96, "sequence": 48}
EXPERTS = SMALL | {
    "denseLayers": 1, "experts": 6, "activeExperts": 3, "sharedExperts": 1, "expertHidden": 24,
}  # fmt: skip
HEADS = [(4, 2, 64), (3, 1, 16), (8, 8, 128)]
"""Heads of queries and of keys, and their width."""


def drawn(shape, name, dtype=torch.float32):
    return torch.randn(shape, generator=Address(0, 1, 2, 3).generator(name)).to(dtype)


@contextlib.contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """Where the device is CUDA, what waits for it is an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def have_bits(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert trial.has_bits_of(one, other)


def attended(device, form, shape, dtype, *, length=150, batch=2):
    heads, kv_heads, width = shape
    qkv = drawn((batch, length, (heads + 2 * kv_heads) * width), "qkv", dtype).to(device)
    qkv.requires_grad_()
    out = attention.attend(qkv, *shape, 10_000.0, form)
    dy = drawn(out.shape, "dy", dtype).to(device)
    return out.detach(), torch.autograd.grad(out, qkv, dy)[0]


FORMS = [
    ("explicit", torch.float32),
    ("explicit", torch.bfloat16),
    ("flash", torch.bfloat16),
    ("flash", torch.float16),
]


@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
def test_attention_repeats_its_bits_forward_and_backward(device, form, dtype, shape):
    first = attended(device, form, shape, dtype)
    kept = torch.empty(777, device=device)  # what comes now lies elsewhere
    for _ in range(3):
        have_bits(first, attended(device, form, shape, dtype))
    assert len(kept) == 777
    near = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    for found, want in zip(first, attended("cpu", "explicit", shape, torch.float32), strict=True):
        torch.testing.assert_close(found.cpu().float(), want, rtol=near, atol=near)


@pytest.mark.parametrize("length", [1, 64, 129, 2048])
def test_flash_attention_of_any_length(device, length):
    first, second = (
        attended(device, "flash", HEADS[0], torch.bfloat16, length=length, batch=1) for _ in "ab"
    )
    have_bits(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_form_of_attention_is_tried_and_named(device, dtype):
    for wanted in ("auto", "explicit"):
        form = attention.check(wanted, device, dtype, 4, 2, 64)
        is_explicit = wanted == "explicit" or (device.type == "cuda" and dtype == torch.float32)
        assert form == ("explicit" if is_explicit else "flash")


def test_flash_in_fp32_is_refused_by_name_on_cuda(needs_cuda):
    with pytest.raises(Exception, match="use 'explicit'") as refused:
        attention.check("flash", needs_cuda, torch.float32, 4, 2, 64)
    assert type(refused.value).__name__ == "InvalidSpecError"


def test_dropout_draws_the_same_everywhere_and_nobody_waits(device):
    x = torch.ones(40, 50, device=device)
    address = Address(1, 2, 3, 4)
    first = attention.drop(x, address, "layer", "place", 0.3)
    with without_waits(device):
        second = attention.drop(x, address, "layer", "place", 0.3)
    have_bits([first], [second])
    assert torch.equal(
        first.cpu() != 0, attention.drop(x.cpu(), address, "layer", "place", 0.3) != 0
    )


@pytest.mark.parametrize("add", [False, True])
def test_weight_gradients_of_bf16_are_summed_in_fp32(device, add):
    """Each sum of n terms in fp32 is off by at most n roundings of the sum of absolute terms."""
    tokens, outs, ins = 300, 40, 56
    dy, x = drawn((tokens, outs), "dy", torch.bfloat16), drawn((tokens, ins), "x", torch.bfloat16)
    start = drawn((outs, ins), "start")
    found = []
    for _ in range(2):
        view = start.to(device, copy=True)
        with without_waits(device):
            split.add_product(view, there(dy, device), there(x, device), add)
        found.append(view)
    have_bits(found[:1], found[1:])
    exact = dy.double().t() @ x.double() + (start.double() if add else 0)
    bound = (tokens + 2) * 2.0**-24 * (dy.double().abs().t() @ x.double().abs() + start.abs())
    assert ((found[0].cpu().double() - exact).abs() <= bound).all()


def there(tensor, device):
    """The tensor on a device, sent from page-locked memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_an_embedding_by_sorted_rows(device, dtype):
    """A sum of its own for each place, whatever lay there: so bits repeat."""
    places = torch.randint(0, 37, (500,), generator=Address(0, 0, 0, 0).generator("places"))
    rows = drawn((500, 48), "rows", dtype)
    before = drawn((37, 48), "table").abs()
    found = []
    for start in (torch.zeros_like(before), torch.zeros_like(before), before):
        table, at, values = start.to(device, copy=True), places.to(device), rows.to(device)
        with without_waits(device):
            split.add_rows(table, at, values)
        found.append(table.cpu())
    have_bits(found[:1], found[1:2])
    assert torch.equal(found[2], before + found[0])
    exact = torch.zeros(37, 48, dtype=torch.float64).index_add_(0, places, rows.double())
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-5)


def test_sorted_rows_have_the_bits_of_the_host(device):
    """Rows of a place are added from the first to the last, here and there."""
    places = torch.randint(0, 11, (400,), generator=Address(0, 0, 0, 0).generator("places"))
    rows, tables = drawn((400, 64), "rows"), []
    for where in ("cpu", device):
        tables.append(torch.zeros(11, 64, device=where))
        split.add_rows(tables[-1], places.to(where), rows.to(where))
    assert torch.equal(tables[0], tables[1].cpu())


def loss_of(device, chunk_elements, dtype):
    logits = drawn((60, 33), "logits", dtype).to(device).requires_grad_()
    targets = torch.randint(0, 33, (60,), generator=Address(0, 0, 0, 0).generator("t"))
    targets[::7] = losses.IGNORED_TARGET
    at = targets.to(device)
    with without_waits(torch.device(device)):
        loss = losses.cross_entropy_sum(logits, at, chunk_elements)
        (dx,) = torch.autograd.grad(loss, logits)
    return loss.detach(), dx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_elements", [33 * 7, 1 << 24])
def test_the_loss_repeats_its_bits_and_waits_for_nothing(device, chunk_elements, dtype):
    first, second = (loss_of(device, chunk_elements, dtype) for _ in "ab")
    have_bits(first, second)
    for found, want in zip(first, loss_of("cpu", chunk_elements, dtype), strict=True):
        torch.testing.assert_close(found.cpu().float(), want.float(), rtol=1e-2, atol=1e-4)


MODELS = {
    "llama": (LLAMA, SMALL),
    "llama bf16": (LLAMA, SMALL | {"dtype": "bfloat16"}),
    "llama dropout": (LLAMA, SMALL | {"dropout": 0.1}),
    "moe": (MOE, EXPERTS),
    "moe bf16": (MOE, EXPERTS | {"dtype": "bfloat16"}),
    "moe sigmoid": (
        MOE,
        EXPERTS | {"router": "sigmoid", "balanceLoss": "sequence", "balanceWeight": 0.1},
    ),
}


def loaded(name):
    entrypoint, config = MODELS[name]
    return workload.load(entrypoint, config)


def run_blocks(model, device, compiles=False):
    """Output, input gradient and weight gradients of each kind of block, twice."""
    batch = model.dataset.batch(trial.ADDRESS)
    x = trial.activation(model, device)
    for number, spec, _ in trial.kinds(model):
        given = batch.tokens.to(device) if number == 0 else x
        targets = batch.targets.to(device) if spec.is_last else None
        (block,) = model.build([number], device, compiles=compiles)
        block.initialize(0)
        yield spec.name, [trial.run_once(block, given, targets) for _ in range(2)]


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_block_repeats_its_bits_and_is_near_the_hosts(device, name):
    model = loaded(name)
    here = dict(run_blocks(model, torch.device("cpu")))
    for block, (first, second) in run_blocks(model, device):
        for key, value in first.items():
            assert trial.has_bits_of(value, second[key]), (block, key)
            if "moe" not in name:  # a token may reach another expert there
                want = here[block][0][key].float()
                near = 2e-4 if "bf16" not in name else 8e-2
                size = want.abs().max().clamp(min=1e-3)
                off = (value.cpu().float() - want).abs().max() / size
                assert off <= near, (block, key)


def test_frozen_units_move_no_bit_of_others(device):
    for name in ("llama", "moe"):
        assert trial.find_unskippable(loaded(name), device) == {}


def test_the_fingerprint_names_the_device(device):
    from mainstay_train.comm.mesh import SINGLE
    from mainstay_train.exact import fingerprint

    model = loaded("llama bf16")
    extra = model.identify(device, SINGLE, "gloo")
    told = fingerprint.fingerprint(device, dtype=model.dtype, extra=extra)
    assert told["attention"] == "flash"
    assert told["device"].startswith(device.type)
    assert told["deterministic"] == "True"
    assert told["env.CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_equal_scores_go_to_the_lower_expert(device):
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]], device=device)
    assert experts.choose(scores, 2).tolist() == [[1, 2], [0, 1]]
    bias = torch.zeros(4, device=device)
    experts.shift_bias(bias, [4, 0, 2, 2], 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(2))
def test_a_mixture_has_the_way_of_the_host(device, seed):
    chosen = torch.randint(0, 5, (64, 3), generator=Address(seed, 0, 0, 0).generator("e"))
    here, there_ = (experts.Way.of(chosen.to(where), 5) for where in ("cpu", device))
    for mine, theirs in zip(here, there_, strict=True):
        assert torch.equal(mine, theirs.cpu())
