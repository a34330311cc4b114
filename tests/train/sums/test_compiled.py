"""Compiled sums have the bits of their definitions, and are not used where they have not."""

import logging
import math
import mmap
import random
import sys

import numpy as np
import pytest
import torch
from tests.train.sums.test_norms import twin

from mainstay_core.base.digest import CHUNK
from mainstay_train.exact import numerics
from mainstay_train.sums import assembly, compiled

pytest.importorskip("llvmlite")


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def rows_within(rng, count):
    """Starts, positions and lengths of some rows: often alike, and of every kind."""
    rows = []
    for _ in range(rng.randrange(0, 14)):
        position = rng.choice([0, 0, 0, 0, 1, CHUNK - 20, rng.randrange(CHUNK)])
        length = rng.choice([0, 1, 7, 8, 9, 500, 40_000, CHUNK - 1, CHUNK])
        length = min(length, CHUNK - position, count)
        rows.append((rng.randrange(count - length + 1), position, length))
    return rows


def columns(rows):
    return [torch.tensor(column, dtype=torch.int64) for column in (zip(*rows, strict=True))] or [
        torch.zeros(0, dtype=torch.int64)
    ] * 3


@pytest.mark.parametrize("size", assembly.WORD_BYTES)
@pytest.mark.parametrize("seed", range(12))
def test_sums_of_words_are_those_of_numpy(size, seed):
    rng = random.Random(seed)
    count = rng.choice([1, 9, 1000, 3 * CHUNK])
    words = np.frombuffer(rng.randbytes(count * size), dtype=f"u{size}")
    keys = np.frombuffer(rng.randbytes(2 * 8 * CHUNK), dtype=np.uint64).reshape(2, CHUNK)
    rows = rows_within(rng, count)
    expected = [
        [int((words[s : s + n].astype(np.uint64) * key[p : p + n]).sum()) for s, p, n in rows]
        for key in keys
    ]

    found = compiled.row_sums(
        torch.from_numpy(words.copy()), *columns(rows), torch.from_numpy(keys.copy())
    )

    assert found.numpy().view(np.uint64).tolist() == expected


@pytest.mark.parametrize("bit", [17, 30, 44, 50, 59, 60, 62, 63])
@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("row", [0, 3, 4])
def test_a_row_that_leaves_its_memory_is_refused_and_nothing_is_read(row, column, bit):
    """A wrong bit of where it lies would have other memory read, or end the process."""
    words, keys = torch.ones(CHUNK + 8), torch.ones(2, CHUNK, dtype=torch.int64)
    rows = columns([(5, 0, CHUNK), *[(8, 0, CHUNK)] * 2, (7, 0, CHUNK), (6, 3, CHUNK - 3)])
    rows[column][row] ^= -(1 << 63) if bit == 63 else 1 << bit
    of = f"{CHUNK} positions of a chunk" if column == 1 else f"{CHUNK + 8} words"

    with pytest.raises(IndexError, match=rf"^row {row} begins at -?\d+ and has -?\d+, of {of}$"):
        compiled.row_sums(words, *rows, keys)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1003, CHUNK + 5])
def test_blends_round_each_product_and_the_sum(count, in_place):
    generator = torch.Generator().manual_seed(count)
    first, second = (torch.randn(count, generator=generator) for _ in range(2))
    first[::5] *= 1e30
    second[::7] = -first[::7]
    second[::11] = -0.0
    for weights in ((0.3, 0.3), (0.3, 1 - 0.3), (1.0, 0.0), (1e-9, 1 - 1e-9)):
        wide = [w * t.numpy().astype("f8") for w, t in zip(weights, (first, second), strict=True)]
        expected = (wide[0] + wide[1]).astype("f4")
        own = first.clone()
        into = own if in_place else torch.full((count,), 7.0)

        compiled.blend(into, (own, second), weights)

        assert np.array_equal(into.numpy().view("u4"), expected.view("u4")), weights


@pytest.mark.parametrize("seed", range(8))
def test_squares_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    count = rng.choice([1, 9, 1000, 3 * CHUNK])
    # What is added to one of the few large squares is rounded each time: another order shows.
    values = torch.randn(count, generator=generator)
    values[rng.randrange(count) :: 30_011] = 2.0**27
    values[rng.randrange(count)] = rng.choice([-0.0, 1e-45, 3e38, math.inf, math.nan])
    rows = rows_within(rng, count)
    starts, _, lengths = columns(rows)
    widths = torch.tensor([compiled.columns_of(n) for _, _, n in rows], dtype=torch.int64)

    found = compiled.squares(values, starts, lengths, widths).tolist()

    expected = [twin(values[s : s + n].tolist()) for s, _, n in rows]
    assert list(map(repr, found)) == list(map(repr, expected))


MUTANTS = {
    "a sum is a difference": ("add <8 x i64> %sum.0.1", "sub <8 x i64> %sum.0.1"),
    "the rest of a row is left out": (
        "%whole, i64 %length, ptr %keys",
        "%whole, i64 %whole, ptr %keys",
    ),
    "words have a sign": ("zext <8 x i8>", "sext <8 x i8>"),
    "rows may begin behind the end": ("ule i64 %start, %size", "ule i64 %start, %start"),
    "rows may end behind the end": ("ule i64 %length, %room", "ule i64 %length, %length"),
    "rows may begin below zero": ("ule i64 %start, %size", "sle i64 %start, %size"),
    "keys begin with the chunk": ("i64, ptr %keys, i64 %position", "i64, ptr %keys, i64 0"),
    "a sum of a run is a difference": ("add <8 x i64> %half.0.1", "sub <8 x i64> %half.0.1"),
    "both sums of a run have the same keys": (
        "ptr %keys, i64 2048\n",
        "ptr %keys, i64 0\n",
    ),
    "the last words of a run are left out": (
        "ptr %words.at, i64 %in.vectors, i64 %length",
        "ptr %words.at, i64 %length, i64 %length",
    ),
    "runs side by side are the same one": (
        "%run.1 = getelementptr i32, ptr %words, i64 2048",
        "%run.1 = getelementptr i32, ptr %words, i64 0",
    ),
    "rows are added from the last": (
        "%sum.1 = fadd <8 x double> %square.0, %square.1",
        "%sum.1 = fadd <8 x double> %square.3, %square.1",
    ),
    "neighbours are added": (
        "fadd <4 x double> %low.4, %high.4",
        "fadd <4 x double> %low.4, %low.4",
    ),
    "rows are added in another order": (
        "double> %sum.1, %square.2\n  %sum.3 = fadd <8 x double> %sum.2, %square.3",
        "double> %sum.1, %square.3\n  %sum.3 = fadd <8 x double> %sum.2, %square.2",
    ),
    "halves are added otherwise": ("%half = lshr i64 %width, 1", "%half = lshr i64 %width, 2"),
    "columns go on behind the first row": (
        f"and i64 %p, {CHUNK // 4 - 1}",
        f"and i64 %p, {CHUNK // 8 - 1}",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_code_is_not_used(mutant, monkeypatch, caplog):
    before, after = MUTANTS[mutant]
    text = assembly.text()
    assert before in text
    monkeypatch.setattr(assembly, "text", lambda: text.replace(before, after))

    assert compiled.load.__wrapped__() is None

    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "by batches of torch" in caplog.text
    assert "wrong" in caplog.text


def test_code_that_does_not_compile_is_not_used(monkeypatch, caplog):
    monkeypatch.setattr(assembly, "text", lambda: "define i64 @row_sums_1(")

    assert compiled.load.__wrapped__() is None

    assert "by batches of torch" in caplog.text


def test_without_the_library_sums_go_by_batches(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "llvmlite", None)

    assert compiled.load.__wrapped__() is None

    (message,) = caplog.messages
    assert message.endswith("by batches of torch: llvmlite is not installed (pip install llvmlite)")


def test_nothing_is_compiled_where_code_cannot_be_executed(monkeypatch, caplog):
    caplog.set_level(logging.INFO)

    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mmap, "mmap", refuse)

    assert compiled.load.__wrapped__() is None

    assert "lets no process execute what it has written" in caplog.text


def test_nothing_is_compiled_where_it_is_switched_off(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(compiled.SWITCH, "Off")

    assert compiled.load.__wrapped__() is None

    assert "MAINSTAY_COMPILED is Off" in caplog.text


def test_a_log_says_what_is_used(caplog):
    caplog.set_level(logging.INFO)

    assert compiled.load.__wrapped__() is not None

    (message,) = caplog.messages
    assert message.startswith("digests and norms on a CPU go in one pass: llvmlite ")
