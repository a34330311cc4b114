"""Sums of short runs of a CPU's memory, in compiled code: imprints are made of them.

A word of 32 bits is multiplied by a key of 32 bits, which is not zero, and the products of a run of
words are added up modulo 2^64; twice, with other keys. No product comes to 2^64. So a change of one
word changes both sums of its run. For a change of several words a key of theirs must have one value
of 2^32 for a sum to stay (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing
is fast", 2014, section 3): 2^-64 for both, as of the ledger's digest. That has keys of 64 bits,
whose products take a processor several instructions.

Sums of more than a few runs are summed up likewise, with other keys, level by level until few are
left: of up to 32 KiB there is one level, up to 16 MiB there are two, up to 8 GiB three. The
probabilities of all levels add up, as those of the ledger's two do.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstay_core.base import digest
from mainstay_train.sums import compiled, digests
from mainstay_train.sums.run_assembly import RUN

MAX_RUNS = 4
"""Sums of so many runs are kept as they are."""
_NUM_MIXERS = len(digest.MIXER_SEEDS)
_SUMS_BYTES = 8 * _NUM_MIXERS
"""Of a run."""
_WORD_BYTES = 4


def memory_sums(address: int, size: int) -> bytes | None:
    """Return what is left of a CPU's memory: a few sums, and the bytes behind its last whole word.

    Args:
        address: where it begins.
        size: its bytes.

    Returns:
        None where no compiled code is: by batches of torch it would take long.
    """
    loops = compiled.load()
    if loops is None:
        return None
    count = size // _WORD_BYTES
    known = _levels_of(-(-count // RUN))
    sums = known.kind()
    into = ctypes.addressof(sums)
    loops.run_sums(address, count, known.first, into)
    for source, words, keys, offset in known.further:
        loops.run_sums(into + source, words, keys, into + offset)
    rest = size % _WORD_BYTES
    found = bytes(sums)[known.last :]
    return found + ctypes.string_at(address + size - rest, rest) if rest else found


class _Levels(NamedTuple):
    """The steps in which the sums of some words are made."""

    first: int
    """The address of the first level's keys; its sums begin the memory."""
    further: tuple[tuple[int, int, int, int], ...]
    """Of each further level where its words begin, how many they are, the address of its keys, and
    where its sums are written."""
    keys: tuple[NDArray[np.uint32], ...]
    """Of all levels: as long as they are here, what lies at those addresses is theirs."""
    kind: type[ctypes.Array[Any]]
    """Makes memory for all sums."""
    last: int
    """Where those of the last level begin."""


@lru_cache(maxsize=1024)
def _levels_of(runs: int) -> _Levels:
    """Return the levels for the words of so many runs: only the first one's number differs."""
    keys, further = [keys_of(0)], list[tuple[int, int, int, int]]()
    last, end = 0, _SUMS_BYTES * runs
    while runs > MAX_RUNS:
        words = _SUMS_BYTES * runs // _WORD_BYTES
        keys.append(keys_of(len(keys)))
        further.append((last, words, keys[-1].ctypes.data, end))
        runs = -(-words // RUN)
        last, end = end, end + _SUMS_BYTES * runs
    kind = ctypes.c_char * end
    return _Levels(keys[0].ctypes.data, tuple(further), tuple(keys), kind, last)


@lru_cache(maxsize=32)
def keys_of(level: int) -> NDArray[np.uint32]:
    """Return the keys of a level, [mixers, words of a run]: upper halves of the ledger's.

    Two threads that ask at the same time may each get memory of its own: whoever keeps an address
    keeps the array.
    """
    drawn = digests.element_keys()[:, level * RUN : (level + 1) * RUN].numpy().view(np.uint64)
    upper = (drawn >> np.uint64(32)).astype(np.uint32)
    return np.ascontiguousarray(np.maximum(upper, 1))
