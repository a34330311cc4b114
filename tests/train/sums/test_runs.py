"""Sums of short runs of memory are those of their definition, and every change shows in them."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mainstay_train.sums import digests, runs
from mainstay_train.sums.runs import MAX_RUNS, RUN, keys_of, memory_sums

pytest.importorskip("llvmlite")

WORDS = (0, 1, 15, 16, 17, 300, RUN, RUN + 1, MAX_RUNS * RUN, MAX_RUNS * RUN + 1, 9 * RUN + 21)
LARGE = (MAX_RUNS * RUN // 4 + 1) * RUN + 5
"""Words whose sums are summed up, and those once more."""


def sums_of(raw: bytes) -> bytes:
    """The definition, in whole numbers of any size."""
    rest = len(raw) % 4
    words, behind = np.frombuffer(raw[: len(raw) - rest], dtype=np.uint32), raw[len(raw) - rest :]
    level = 0
    while True:
        keys = keys_of(level)
        cut = [words[at : at + RUN].tolist() for at in range(0, len(words), RUN)]
        found = [
            sum(word * key for word, key in zip(run, mixer.tolist(), strict=False)) % 2**64
            for run in cut
            for mixer in keys
        ]
        packed = np.array(found, dtype=np.uint64).tobytes()
        if len(cut) <= MAX_RUNS:
            return packed + behind
        words, level = np.frombuffer(packed, dtype=np.uint32), level + 1


def found(raw: np.ndarray) -> bytes:
    sums = memory_sums(raw.ctypes.data, raw.nbytes)
    assert sums is not None
    return sums


@pytest.mark.parametrize("count", [*WORDS, LARGE])
@pytest.mark.parametrize("rest", [0, 3])
def test_sums_are_those_of_their_definition(count: int, rest: int) -> None:
    raw = np.frombuffer(random.Random(count).randbytes(4 * count + rest), dtype=np.uint8)

    assert found(raw) == sums_of(raw.tobytes())
    assert len(found(raw)) <= 16 * MAX_RUNS + rest


@pytest.mark.parametrize("count", WORDS[1:])
def test_a_change_of_any_bit_changes_all_sums_of_its_run(count: int) -> None:
    rng = random.Random(count)
    raw = np.frombuffer(bytearray(rng.randbytes(4 * count + 2)), dtype=np.uint8)
    before = found(raw)
    for _ in range(50):
        place, bit = rng.randrange(len(raw)), 1 << rng.randrange(8)
        raw[place] ^= bit
        assert found(raw) != before
        raw[place] ^= bit
    assert found(raw) == before


def test_several_changes_do_not_cancel() -> None:
    """Top bits, whole words and neighbours, which cancel where keys are even or alike."""
    rng = random.Random(3)
    words = np.zeros(5 * RUN, dtype=np.uint32)
    before = found(words)
    for change in (1 << 31, 0xFFFFFFFF, 1, 1 << 16):
        for _ in range(100):
            places = rng.sample(range(len(words)), rng.choice([2, 3, 64]))
            words[places] = change
            assert found(words) != before
            words[places] = 0


def test_keys_are_not_zero_and_other_ones_at_each_level_and_for_each_sum() -> None:
    levels = [keys_of(level) for level in range(4)]
    assert all(keys.all() for keys in levels)
    assert len({mixer.tobytes() for keys in levels for mixer in keys}) == 8
    assert runs.keys_of(0).dtype == np.uint32


@pytest.fixture
def _as_at_first():
    """Nothing is kept of keys and levels, before the test and after it."""
    for known in (runs.keys_of, runs._levels_of):
        known.cache_clear()
    yield
    for known in (runs.keys_of, runs._levels_of):
        known.cache_clear()


@pytest.mark.usefixtures("_as_at_first")
def test_threads_that_make_their_first_sums_together_keep_the_keys_that_they_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, drawn, calls = threading.Barrier(2), digests.element_keys, []

    def held() -> object:
        calls.append(None)
        both.wait(timeout=60)
        return drawn()

    monkeypatch.setattr(digests, "element_keys", held)
    raws = [np.arange(count, dtype=np.uint32) for count in (RUN - 5, RUN + 5)]
    with ThreadPoolExecutor(2) as threads:
        before = list(threads.map(found, raws))
    monkeypatch.setattr(digests, "element_keys", drawn)
    assert len(calls) == 2, "each thread has made the keys"

    for num_runs in (1, 2):
        known = runs._levels_of(num_runs)
        assert known.first == known.keys[0].ctypes.data
        assert np.array_equal(known.keys[0], keys_of(0))
    written = [np.full(2 * RUN, 7, dtype=np.uint32) for _ in range(100)]  # as a step does
    assert [found(raw) for raw in raws] == before == [sums_of(raw.tobytes()) for raw in raws]
    assert len(written) == 100


@pytest.mark.usefixtures("_as_at_first")
def test_sizes_of_as_many_runs_share_their_levels() -> None:
    raw = np.zeros(2 * RUN * 4, dtype=np.uint8)
    for size in range(RUN * 4 + 4, len(raw) + 1, 4):
        runs.memory_sums(raw.ctypes.data, size)
    assert runs._levels_of.cache_info().misses == 1
