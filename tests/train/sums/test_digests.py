import itertools
import random

import numpy as np
import pytest
import torch
from tests.train.operations import Operations, without_memory

from mainstay_core.base import digest
from mainstay_core.base.digest import CHUNK, Digest
from mainstay_train.exact import numerics
from mainstay_train.sums import digests, rows

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float16, torch.int8, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


@pytest.fixture(autouse=True)
def _in_both_forms(form):
    """Each test runs with compiled code and without."""


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


def _by_chunks(name, tensor):
    """The definition in numpy, chunk by chunk: one name, one key at a time."""
    words = tensor.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
    totals = [0, 0]
    for mixer in range(2):
        keys = np.frombuffer(digest.element_keys(mixer), dtype=np.uint64)
        for chunk, start in enumerate(range(0, len(words), CHUNK)):
            piece = words[start : start + CHUNK]
            inner = int((keys[: len(piece)] * (piece + np.uint64(1))).sum())
            totals[mixer] += digest.chunk_key(name, chunk, mixer) * inner
    return Digest(totals[0] % 2**64, totals[1] % 2**64)


def _pattern(count):
    words = torch.arange(count, dtype=torch.int64) * 2654435761 % 2**32
    return (words - 2**31).to(torch.int32)


def test_digests_are_the_ones_that_were_ever_written():
    words = _pattern(40 * CHUNK + 1000)
    floats, halves = words.view(torch.float32), words.view(torch.bfloat16)
    doubles, raw = words[: 6 * CHUNK + 2].view(torch.float64), words.view(torch.uint8)
    columns = words[: 300 * 700].view(300, 700)[:, 350:]
    found = [
        digests.tensor_digest("master:w", floats),
        digests.FlatDigest([rows.Piece("master:w", 0, len(words))]).digest(
            torch.cat([floats, torch.ones(24)])  # up to the next granule
        ),
        digests.tensor_digest("param:w", halves[: 5 * CHUNK + 77], 3 * CHUNK - 5),
        digests.tensor_digest("x", doubles, CHUNK - 1),
        digests.tensor_digest("b", raw[: CHUNK + 3]),
        digests.added([digests.rows_sums("r", columns, 350, 700)]),
    ]
    assert [one.hex() for one in found] == [
        "ff2bbace2bd8cd1e5960f1179ccedebc",
        "ff2bbace2bd8cd1e5960f1179ccedebc",
        "29402ad536f7af1bbe89bf48e5084323",
        "d1dd3df02ef4c6a9e17293f9f5918aa9",
        "f53fb9cfa541d0a58d9785e10ed94bdf",
        "448aa611fe68db2c8e24bb907d98a6e6",
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_flat_buffer_has_the_digest_of_its_pieces_whatever_lies_between_them(seed):
    rng = random.Random(seed)
    pieces, end = [], 0
    for number in range(rng.randrange(1, 12)):
        numel = rng.choice([1, 31, 32, 500, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 40])
        start = end + 32 * rng.randrange(3)
        pieces.append(rows.Piece(f"layer.{number}", start, numel))
        end = start + -(-numel // 32) * 32
    flat = _bits(torch.float32, end, seed)
    rng.shuffle(pieces)
    batch = rng.choice([32, CHUNK, 3 * CHUNK, rows.BATCH, None])

    found = digests.FlatDigest(pieces, batch=batch)

    for _ in range(2):  # the second time in memory that the first has written to
        twin = [_by_chunks(p.name, flat[p.start : p.start + p.numel]) for p in pieces]
        assert found.digest(flat) == digest.total(twin)
        flat = flat.flip(0)
    assert digests.tensor_digest("all", flat) == _by_chunks("all", flat)


def test_nothing_has_the_digest_of_nothing():
    assert digests.FlatDigest([]).digest(torch.empty(0)) == Digest.zero()
    empty = digests.FlatDigest([rows.Piece("w", 0, 0)])
    assert empty.digest(torch.zeros(32)) == Digest.zero()
    assert digests.added([]) == Digest.zero()


@pytest.mark.parametrize("wrong", [(1,), (2,), (1, 2), (1, 3)])
def test_keys_that_are_kept_are_drawn_until_they_come_out_the_same_twice(wrong, monkeypatch):
    calls = itertools.count(1)
    drawn, pieces = digests._drawn, [rows.Piece("w", 0, 3 * CHUNK), rows.Piece("v", 3 * CHUNK, 70)]

    def drawn_wrongly(bases, chunks):
        keys, number = drawn(bases, chunks), next(calls)
        if number in wrong:
            keys[1, -1] ^= 1 << number
        return keys

    monkeypatch.setattr(digests, "_drawn", drawn_wrongly)
    known = digests.drawn_twice(pieces)
    monkeypatch.setattr(digests, "_drawn", drawn)

    flat = _bits(torch.float32, 3 * CHUNK + 96, 1)
    assert known.digest(flat) == digests.FlatDigest(pieces).digest(flat)
    assert next(calls) == max(wrong) + 3


def test_keys_that_never_come_out_the_same_are_drawn_so_often(monkeypatch):
    calls, drawn = itertools.count(1), digests._drawn
    monkeypatch.setattr(digests, "_drawn", lambda *to: drawn(*to) + 2 * next(calls))
    digests.drawn_twice([rows.Piece("w", 0, 64)])
    assert next(calls) == digests.MAX_REDRAWS + 2


@pytest.mark.parametrize("what", ["_keys", "_of_zeros", "_starts", "_lengths", "_positions"])
def test_one_bit_of_what_is_kept_is_seen(what):
    pieces = [rows.Piece("w", 0, 100)]
    first, second = digests.FlatDigest(pieces), digests.FlatDigest(pieces)
    assert first.is_like(second)
    getattr(second, what).view(-1)[0] ^= 1
    assert not first.is_like(second)
    assert not second.is_like(first)


def _operations(numel, names, batch, *, every=1, gap=0):
    """Operations of a digest of ``names`` pieces, of which only each ``every``th counts."""
    each = numel * every // names
    pieces = [rows.Piece(f"layer.{n}", n * each, each // every - gap) for n in range(names)]
    with without_memory() as device:
        known = digests.FlatDigest(pieces, device, batch)
        flat = torch.empty(numel * every, device=device)
        known.sums(flat)  # what is made once is there
        with Operations() as seen:
            known.sums(flat)
    return seen.count


@pytest.mark.parametrize(
    ("options", "small_pieces"),
    [({}, 2048), ({"every": 2}, 2048), ({"gap": 5}, 128)],
    ids=["side by side", "apart", "uneven"],
)
def test_operations_are_counted_by_batches_alone(options, small_pieces):
    few, names = 16 * CHUNK, 16
    one, four = (_operations(few, names, few // n, **options) for n in (1, 4))
    per_batch = (four - one) / 3
    for numel, pieces, batches in [(few, small_pieces, 4), (4 * few, 64, 1), (4 * few, 64, 4)]:
        found = _operations(numel, pieces, numel // batches, **options)
        assert found == one + (batches - 1) * per_batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_equals_cpu(dtype):
    tensor = _bits(dtype, 70 * CHUNK + 123, 8)
    for offset in (0, 17, 5 * CHUNK - 1):
        assert digests.tensor_digest("w", tensor.cuda(), offset) == digests.tensor_digest(
            "w", tensor, offset
        )
