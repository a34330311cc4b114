"""Norms have one order, and it is written down here a second time."""

import math
import random

import pytest
import torch
from tests.train.norms import block_norms_sq

from mainstay_core.base.digest import CHUNK
from mainstay_train.exact import numerics
from mainstay_train.sums import norms
from mainstay_train.sums.rows import Piece


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


@pytest.fixture(autouse=True)
def _in_both_forms(form):
    """Each test runs with compiled code and without."""


def twin(values: list[float]) -> float:
    """A chunk's squared norm in Python, number by number."""
    squares = [value * value for value in values] + [0.0] * (CHUNK - len(values))
    left = squares[:16384]
    for start in range(16384, CHUNK, 16384):
        left = [a + b for a, b in zip(left, squares[start : start + 16384], strict=True)]
    while len(left) > 1:
        half = len(left) // 2
        left = [a + b for a, b in zip(left[:half], left[half:], strict=True)]
    return left[0]


def drawn(numel, seed):
    """Numbers of many magnitudes, so that any other order shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 2.0**exponents


@pytest.mark.parametrize("numel", [1, 32, 100, 16384, 16385, 20_000, 50_000, 65_535, CHUNK])
def test_a_chunk_is_added_in_the_order_that_is_written_down(numel):
    flat = torch.zeros(-(-numel // 32) * 32)
    flat[:numel] = drawn(numel, numel)
    found = norms.FlatNorms([Piece("", 0, numel)]).squares(flat)
    assert found.tolist() == [twin(flat[:numel].tolist())]


def test_the_order_is_the_one_that_there_ever_was():
    words = torch.arange(3 * CHUNK + 96, dtype=torch.int64) * 2654435761 % 2**32
    flat = (words % 2**24 - 2**23).to(torch.float32) * 2.0 ** (words // 2**24 % 7 - 3)
    assert [value.hex() for value in block_norms_sq([flat, flat[:96]])] == [
        "0x1.80450d045c8fdp+65",
        "0x1.40a8e0e391990p+54",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_bits_depend_neither_on_neighbours_nor_on_batches(seed):
    rng = random.Random(seed)
    pieces, end = [], 0
    for number in range(rng.randrange(2, 9)):
        numel = rng.choice([1, 31, 500, 9000, 17_000, CHUNK - 1, CHUNK, 2 * CHUNK, 3 * CHUNK + 40])
        start = end + 32 * rng.randrange(3)
        pieces.append(Piece(str(number), start, numel))
        end = start + -(-numel // 32) * 32
    flat = drawn(end, seed)
    flat[rng.randrange(end)] = math.inf  # of one piece at most: the others have their norms
    expected = []
    for piece in pieces:
        alone = torch.zeros(-(-piece.numel // 32) * 32)
        alone[: piece.numel] = flat[piece.start : piece.start + piece.numel]
        single = [
            norms.FlatNorms([Piece("", 0, len(part))]).squares(padded(part)).item()
            for part in alone[: piece.numel].split(CHUNK)
        ]
        expected.append((len(expected), single))
    for batch in (32, CHUNK, 3 * CHUNK, 64 * CHUNK, None):
        known = norms.FlatNorms(pieces, batch=batch)
        assert known.by_piece(known.squares(flat).tolist()) == expected


def padded(part):
    flat = torch.zeros(-(-len(part) // 32) * 32)
    flat[: len(part)] = part
    return flat


def test_the_number_of_threads_changes_nothing():
    flat = drawn(9 * CHUNK + 320, 5)
    expected = block_norms_sq([flat])
    torch.set_num_threads(2)
    try:
        assert block_norms_sq([flat]) == expected
    finally:
        numerics.setup("cpu")


def test_a_norm_is_near_the_exact_one_and_chunks_are_folded_in_order():
    flat = torch.randn(2 * CHUNK + 96, generator=torch.Generator().manual_seed(1))
    first, second, third = norms.FlatNorms([Piece("", 0, len(flat))]).squares(flat).tolist()
    (found,) = block_norms_sq([flat])
    exact = math.fsum(float(value) ** 2 for value in flat)
    assert abs(found - exact) < 1e-12 * exact
    assert found == (first + second) + third
    assert block_norms_sq([torch.empty(0)]) == [0.0]
    assert math.isnan(block_norms_sq([torch.full((32,), math.nan)])[0])
