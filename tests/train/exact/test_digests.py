import itertools
import random

import pytest
import torch

from mainstay_core.base import digest
from mainstay_core.base.digest import CHUNK, Digest
from mainstay_train.exact import digests, numerics

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float16, torch.int8, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def _bits(dtype, count, seed):
    raw = random.Random(seed).randbytes(count * dtype.itemsize)
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    return torch.frombuffer(bytearray(raw), dtype=dtype)


def _reference(name, tensor, offset=0):
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    size = tensor.element_size()
    if size == 16:  # four words of four bytes
        return digest.digest_bytes(name, raw, 8, offset * 2)
    return digest.digest_bytes(name, raw, size, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_equals_the_pure_reference_across_chunk_borders(dtype):
    rng = random.Random(1)
    for case in range(6):
        offset = rng.choice([0, 5, CHUNK - 100, 3 * CHUNK - 1, CHUNK // 2 - 50])
        tensor = _bits(dtype, rng.randrange(1, 400), case)
        assert digests.tensor_digest("w", tensor, offset) == _reference("w", tensor, offset)


def test_torch_equals_the_pure_reference_over_several_chunks():
    tensor = _bits(torch.float32, 2 * CHUNK + 77, 2)
    assert digests.tensor_digest("w", tensor, CHUNK - 3) == _reference("w", tensor, CHUNK - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_slices_add_up_whatever_the_cut(dtype):
    rng = random.Random(3)
    tensor = _bits(dtype, 3 * CHUNK + 1000, 3)
    whole = digests.tensor_digest("w", tensor)
    for _ in range(20):
        cuts = sorted(rng.randrange(tensor.numel()) for _ in range(rng.randrange(1, 9)))
        borders = [0, *cuts, tensor.numel()]
        parts = [digests.tensor_digest("w", tensor[a:b], a) for a, b in itertools.pairwise(borders)]
        rng.shuffle(parts)
        assert digest.total(parts) == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_single_flip_is_found(dtype):
    rng = random.Random(4)
    tensor = _bits(dtype, CHUNK + 500, 4)
    whole = digests.tensor_digest("w", tensor)
    raw = tensor.view(torch.uint8)
    for _ in range(300):
        place, bit = rng.randrange(raw.numel()), 1 << rng.randrange(8)
        raw[place] ^= bit
        found = digests.tensor_digest("w", tensor)
        assert found.first != whole.first
        assert found.second != whole.second
        raw[place] ^= bit
    assert digests.tensor_digest("w", tensor) == whole


def test_signs_of_zero_nan_payloads_and_swaps_count():
    zeros = digests.tensor_digest("w", torch.tensor([0.0, 1.0]))
    assert digests.tensor_digest("w", torch.tensor([-0.0, 1.0])) != zeros
    assert digests.tensor_digest("w", torch.tensor([1.0, 0.0])) != zeros
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digests.tensor_digest("w", quiet[:1]) != digests.tensor_digest("w", quiet[1:])


def test_shape_and_strides_do_not_matter_but_order_does():
    matrix = _bits(torch.float32, 600, 5).view(20, 30)
    assert digests.tensor_digest("w", matrix) == digests.tensor_digest("w", matrix.reshape(-1))
    assert digests.tensor_digest("w", matrix.t()) == _reference("w", matrix.t().contiguous())
    assert digests.tensor_digest("w", matrix.t()) != digests.tensor_digest("w", matrix)
    assert digests.tensor_digest("w", torch.empty(0)) == Digest.zero()
    assert digests.tensor_digest("w", torch.tensor(3.0)) == _reference("w", torch.tensor([3.0]))


def test_whole_tensors_sum():
    a, b = _bits(torch.float32, 10, 6), _bits(torch.bfloat16, 20, 7)
    both = digests.digest_tensors([("a", a), ("b", b)])
    assert both == digests.tensor_digest("a", a) + digests.tensor_digest("b", b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_cpu(dtype):
    tensor = _bits(dtype, 70 * CHUNK + 123, 8)
    for offset in (0, 17, 5 * CHUNK - 1):
        assert digests.tensor_digest("w", tensor.cuda(), offset) == digests.tensor_digest(
            "w", tensor, offset
        )
