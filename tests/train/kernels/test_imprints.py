"""Imprints: equal of equal bits, other after any change; small and large, of any strides."""

from __future__ import annotations

import random

import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.checks.recomputes import ForwardRecord
from mainstay_train.kernels import bits, imprints
from mainstay_train.kernels.imprints import (
    FEW_BYTES,
    FEW_BYTES_COMPILED,
    NUM_KEYS,
    ROW_BYTES,
    imprint,
)

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SIZES = (0, 1, 7, 300, FEW_BYTES_COMPILED + 3, FEW_BYTES // 4 + 1, 40_000)
"""Kept, digested as they are, by one product, and by two; or by one run, and by several."""


@pytest.fixture(autouse=True)
def _in_both_forms(form: str) -> None:
    """Each test runs with compiled code and without."""


def filled(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed))
    return raw.to(dtype) if dtype is torch.bool else (raw * 1.5 - 0.5).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_change_of_any_bit_changes_the_imprint(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for size in SIZES:
        tensor = filled(size, dtype)
        before = imprint(tensor)
        assert imprint(tensor.clone()) == before
        for _ in range(20 if size else 0):
            element, bit = rng.randrange(size), rng.randrange(128)
            bits.flip_bit(tensor, element, bit)
            assert imprint(tensor) != before
            bits.flip_bit(tensor, element, bit)
        assert imprint(tensor) == before


def test_shape_type_and_order_count() -> None:
    large = torch.arange(40_000, dtype=torch.float32)
    swapped = large.clone()
    swapped[[5, 39_000]] = swapped[[39_000, 5]]

    assert imprint(large) != imprint(swapped)
    assert imprint(large) != imprint(large.view(200, 200))
    assert imprint(large) != imprint(large.view(torch.int32))
    assert imprint(torch.zeros(1)) != imprint(-torch.zeros(1))


def test_gaps_and_repeats_do_not_count() -> None:
    wide = torch.randn(300, 200)

    assert imprint(wide[:, 3:150]) == imprint(wide[:, 3:150].contiguous())
    assert imprint(wide[:1].expand(40, 200)) == imprint(wide[:1].repeat(40, 1))
    assert imprint(wide[:, 3:150].t()) == imprint(wide[:, 3:150].t().contiguous())
    assert imprint(wide[::2, ::2]) == imprint(wide[::2, ::2].contiguous())


@pytest.mark.parametrize("shape", [(30, 40), (1, 4, 100, 64), (5, 1, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_what_lies_in_another_order_has_an_imprint_of_its_bits(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rng = random.Random(3)
    for _ in range(10):
        dims = rng.sample(range(len(shape)), len(shape))
        tensor = torch.randn(shape).to(dtype).permute(dims)
        before = imprint(tensor)
        assert imprint(tensor.clone(memory_format=torch.preserve_format)) == before
        if dtype is torch.complex64:
            conjugate = tensor.conj_physical().conj()
            assert conjugate.is_conj()
            told = imprint(conjugate)
            lying = conjugate.conj()  # the same memory, which is read as it lies
            bits.flip_bit(lying, rng.randrange(lying.numel()), rng.randrange(64))
            assert imprint(conjugate)[2] != told[2]
            assert imprint(tensor)[2] == before[2], "it has memory of its own"
        element, bit = rng.randrange(tensor.numel()), rng.randrange(64)
        bits.flip_bit(tensor, element, bit)
        assert imprint(tensor) != before
        bits.flip_bit(tensor, element, bit)
        assert imprint(tensor) == before


def test_the_order_in_memory_counts_or_is_made_alike(form: str) -> None:
    square = torch.randn(30, 30)
    other = square.t().contiguous()

    assert imprint(square) != imprint(other)
    assert imprint(square.t()) != imprint(square)
    assert (imprint(square.t()) == imprint(other)) == (form == "torch")


def test_top_bits_of_several_elements_do_not_cancel() -> None:
    """As they do in sums of whole words modulo a power of two."""
    tensor = torch.randn(20_000, dtype=torch.float64)
    before = imprint(tensor)
    rng = random.Random(2)
    for _ in range(50):
        places = rng.sample(range(len(tensor)), 2)
        for place in places:
            bits.flip_bit(tensor, place, 63)
        assert imprint(tensor) != before
        for place in places:
            bits.flip_bit(tensor, place, 63)


def test_memory_may_begin_anywhere() -> None:
    raw = torch.randint(0, 256, (5003,), dtype=torch.uint8)
    for start in range(1, 5):
        assert imprint(raw[start : start + 4001]) == imprint(raw[start : start + 4001].clone())


def test_products_are_those_of_whole_numbers_and_no_key_is_even() -> None:
    rows = torch.randint(-128, 128, (33, ROW_BYTES), dtype=torch.int8)
    rows[0] = -128
    for level in range(3):
        keys = imprints._keys(level)
        assert keys.shape == (ROW_BYTES, NUM_KEYS)
        assert bool((keys % 2 != 0).all())
        exact = (rows.double() @ keys.double()).to(torch.int32)
        assert torch.equal(torch._int_mm(rows, keys), exact)
    assert not torch.equal(imprints._keys(0), imprints._keys(1))


def test_a_block_that_calls_other_kernels_the_second_time_is_named() -> None:
    record = ForwardRecord("layers.3")
    record.note("aten.mm", [torch.ones(2)])
    record.note("aten.add", [torch.ones(2)])

    assert record.take("aten.mm") == imprints.imprints([torch.ones(2)])
    with pytest.raises(InvalidSpecError, match=r"layers.3.* calls nothing where .* aten.add"):
        record.end()
    with pytest.raises(InvalidSpecError, match=r"calls aten.mul where its forward called aten.add"):
        record.take("aten.mul")
    with pytest.raises(InvalidSpecError, match=r"calls aten.add where its forward called nothing"):
        record.take("aten.add")
