"""Sums of short runs of a CPU's memory, in compiled code: imprints are made of them.

A word of 32 bits is multiplied by a key of 32 bits, which is not zero, and the products of a run of
words are added up modulo 2^64; twice, with other keys. No product comes to 2^64. So a change of one
word changes both sums of its run. For a change of several words a key of theirs must have one value
of 2^32 for a sum to stay (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing
is fast", 2014, section 3): 2^-64 for both, as of the ledger's digest. That has keys of 64 bits,
whose products take a processor several instructions.

Sums of more than a few runs are summed up likewise, with other keys. As of the ledger's, whose
sums of chunks are summed up, the probabilities of both levels add up.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mainstay_core.base import digest
from mainstay_train.exact import compiled, digests
from mainstay_train.exact.run_assembly import RUN

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
    levels, kind, last = _levels_of(size // _WORD_BYTES)
    sums = kind()
    into, source = ctypes.addressof(sums), address
    for count, keys, offset in levels:
        loops.run_sums(source, count, keys, into + offset)
        source = into + offset
    rest = size % _WORD_BYTES
    found = bytes(sums)[last:]
    return found + ctypes.string_at(address + size - rest, rest) if rest else found


class _Levels(NamedTuple):
    """The steps in which the sums of some words are made."""

    levels: tuple[tuple[int, int, int], ...]
    """Of each its words, the address of its keys, and where its sums are written."""
    kind: type[ctypes.Array[Any]]
    """Makes memory for all sums."""
    last: int
    """Where those of the last level begin."""


@lru_cache(maxsize=256)
def _levels_of(count: int) -> _Levels:
    """Return the levels for so many words."""
    levels, offset = list[tuple[int, int, int]](), 0
    while True:
        levels.append((count, keys_of(len(levels)).ctypes.data, offset))
        runs = -(-count // RUN)
        end = offset + _SUMS_BYTES * runs
        if runs <= MAX_RUNS:
            return _Levels(tuple(levels), ctypes.c_char * end, offset)
        offset, count = end, _SUMS_BYTES * runs // _WORD_BYTES


@lru_cache(maxsize=32)
def keys_of(level: int) -> NDArray[np.uint32]:
    """Return the keys of a level, [mixers, words of a run]: upper halves of the ledger's."""
    drawn = digests.element_keys()[:, level * RUN : (level + 1) * RUN].numpy().view(np.uint64)
    upper = (drawn >> np.uint64(32)).astype(np.uint32)
    return np.ascontiguousarray(np.maximum(upper, 1))
