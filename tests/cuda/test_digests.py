"""Digests of what lies on a device are those of the same bits on the host."""

import random
from importlib.util import find_spec

import pytest
import torch
from tests.train.sums.test_digests import DTYPES, _bits

from mainstay_core.base.digest import CHUNK
from mainstay_train.kernels import imprints
from mainstay_train.sums import digests
from mainstay_train.sums.rows import Piece

SIZES = [1, 31, 500, 9000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 40, 70 * CHUNK + 100]


def drawn(seed):
    """A flat buffer of pieces of many sizes with gaps between them, and the pieces."""
    rng, pieces, end = random.Random(seed), [], 0
    for number, numel in enumerate([*SIZES, *rng.choices(SIZES[:-1], k=8)]):
        start = end + 32 * rng.randrange(3)
        position = rng.choice([0, 64, CHUNK - 32])
        pieces.append(Piece(f"w{number}", start, numel, rng.randrange(3), position))
        end = start + -(-numel // 32) * 32
    words = torch.arange(end, dtype=torch.int64) * 2654435761 % 2**32
    return (words - 2**31).to(torch.int32).view(torch.float32), pieces


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_type_has_the_digest_that_it_has_on_the_host(device, dtype):
    rng = random.Random(1)
    for case, count in enumerate((1, 77, 400, CHUNK + 3, 2 * CHUNK + 77)):
        offset = rng.choice([0, 5, CHUNK - 100, 3 * CHUNK - 1, CHUNK // 2 - 50])
        tensor = _bits(dtype, count, case)
        there = digests.tensor_digest("w", tensor.to(device), offset)
        assert there == digests.tensor_digest("w", tensor, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_imprint_of_a_tensor_tells_one_wrong_bit(device, dtype):
    tensor = _bits(dtype, 3000, 7).to(device)
    before = imprints.imprint(tensor)
    assert imprints.imprint(tensor.clone()) == before
    raw = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = raw.view(torch.uint8).view(-1)
    raw[1234] ^= 1
    assert imprints.imprint(tensor) != before


def test_strided_and_empty_tensors(device):
    matrix = _bits(torch.float32, 600, 5).view(20, 30)
    for tensor in (matrix.t(), matrix[:, 3:9], matrix[:0], matrix[3, 4]):
        there = digests.tensor_digest("w", tensor.to(device))
        assert there == digests.tensor_digest("w", tensor)
    assert digests.tensor_digest("w", matrix.to(device).t()) == digests.tensor_digest(
        "w", matrix.t()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_columns_of_a_matrix(device, dtype):
    for rows, columns, length, start in ((5, 7, 7, 0), (40, 3, 9000, 17), (900, 64, 300, 5)):
        part = _bits(dtype, rows * columns, rows).view(rows, columns)
        here = digests.rows_sums("w", part, start, length)
        there = digests.rows_sums("w", part.to(device), start, length)
        assert there.tolist() == here.tolist()


@pytest.fixture(params=["torch", "triton"])
def form(request, monkeypatch, device):
    """The form of digests of flat buffers on a device."""
    if request.param == "torch":
        monkeypatch.setattr(digests, "_of_triton", lambda _: None)
    elif device.type != "cuda" or find_spec("triton") is None:
        pytest.skip("there is no Triton")
    elif digests._of_triton(device) is None:
        pytest.skip("Triton does not work here: see the log")
    return request.param


@pytest.mark.parametrize("seed", range(3))
def test_digests_of_flat_buffers_in_both_forms(device, form, seed):
    flat, pieces = drawn(seed)
    here = digests.FlatDigest(pieces)
    there = digests.FlatDigest(pieces, device)
    assert (there._fused is not None) == (form == "triton" or device.type == "cpu")
    on_device = flat.to(device)
    assert there.digest(on_device) == here.digest(flat)
    found = digests.of_pieces(there.sums_of_pieces(on_device))
    assert found == digests.of_pieces(here.sums_of_pieces(flat))
    assert torch.equal(on_device.cpu().view(torch.int32), flat.view(torch.int32))


def test_triton_works_where_it_is_installed(needs_cuda):
    """It needs a C compiler; without one digests are right, and slower."""
    if find_spec("triton") is None:
        pytest.skip("there is no Triton")
    assert digests._of_triton(needs_cuda) is not None


def test_a_flat_digest_does_not_wait_for_the_device(needs_cuda):
    flat, pieces = drawn(1)
    there, on_device = digests.FlatDigest(pieces, needs_cuda), flat.to(needs_cuda)
    there.sums(on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there.sums(on_device)
        there.sums_of_pieces(on_device)
        digests.tensor_sums("w", on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
