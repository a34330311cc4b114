"""The one digest of Mainstay: of parameters, gradients, partials and data.

A digest must answer two questions that a cryptographic hash of a file cannot:
does a slice held here agree with the whole held there, and do pieces cut in
another way (other chunk owners, other stages, other shards) still describe the
same tensor? So it is a sum. Every element contributes

    mix_m(tensor, i, bits) = A_m(tensor, i // 65536) * K_m[i % 65536] * (bits + 1)   mod 2^64

for two mixers m, where i is the element's index in the whole tensor and bits its
pattern read as an unsigned integer. Digests of slices therefore add up to the
digest of the whole, whatever the cut, in any order.

A and K are odd, hence invertible modulo 2^64: a change of one element always
changes the sum. Changes of several elements cancel with a probability near
2^-64 over both mixers. The +1 makes zeros count, so lengths matter.

Elements of 8 bytes are read as two words of 4 bytes (low word first, indices 2i
and 2i + 1): two flipped top bits of 64-bit patterns would cancel for certain
modulo 2^64. This is no defence against an adversary; it finds faults.

Source: design.md section 8. The construction is multilinear hashing over the
integers modulo 2^64 (Lemire and Kaser, "Strongly universal string hashing is
fast", 2014, section 3) with keys from splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014, figure 16).

This module is the reference, in the standard library alone because it also runs
in the supervisor and in the user's image; ``mainstay_train.sums.digests`` is the same
arithmetic in torch, tested equal.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mainstay_core.base.words import quote

CHUNK = 65_536
"""Elements per chunk key; also the size of the table of element keys."""

MIXER_SEEDS = (0x6D61696E73746179, 0x9E3779B97F4A7C15)
"""Seeds of the two mixers' element keys: "mainstay" in ASCII, the golden ratio."""

_MASK = (1 << 64) - 1
_WORD_CODES = {1: "B", 2: "H", 4: "I"}


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest: two sums modulo 2^64.

    Digests add element-wise, so those of slices make up the whole.
    """

    first: int
    second: int

    @classmethod
    def zero(cls) -> Digest:
        """Return the digest of nothing, neutral in addition."""
        return cls(0, 0)

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Return the digest that :meth:`hex` wrote.

        Raises:
            ValueError: ``text`` is not 32 hexadecimal digits.
        """
        if len(text) != 32 or not set(text) <= set("0123456789abcdefABCDEF"):
            raise ValueError(f"a digest is 32 hexadecimal digits, got {quote(text)}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.first + other.first) & _MASK, (self.second + other.second) & _MASK)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.first - other.first) & _MASK, (self.second - other.second) & _MASK)

    def hex(self) -> str:
        """Return 32 hexadecimal digits, the first mixer's sum first."""
        return f"{self.first:016x}{self.second:016x}"

    def __str__(self) -> str:
        return self.hex()


def total(digests: Iterable[Digest]) -> Digest:
    """Return the sum of ``digests``; :meth:`Digest.zero` for none."""
    result = Digest.zero()
    for digest in digests:
        result += digest
    return result


def splitmix64(state: int) -> int:
    """Return the splitmix64 output for ``state``. The state is not advanced."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@lru_cache(maxsize=len(MIXER_SEEDS))
def element_keys(mixer: int) -> array[int]:
    """Return K of ``mixer``: 65,536 odd 64-bit numbers, splitmix64 of a counter from its seed."""
    seed = MIXER_SEEDS[mixer]
    step = 0x9E3779B97F4A7C15
    return array("Q", (splitmix64((seed + i * step) & _MASK) | 1 for i in range(CHUNK)))


@lru_cache(maxsize=4096)
def tensor_key(tensor: str) -> int:
    """Return the 64-bit BLAKE2b hash of a tensor's model-wide name."""
    return int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8).digest(), "little")


def chunk_key(tensor: str, chunk: int, mixer: int) -> int:
    """Return A of ``mixer``: an odd 64-bit number for one chunk of one tensor."""
    return splitmix64(splitmix64(tensor_key(tensor) ^ MIXER_SEEDS[mixer]) + chunk & _MASK) | 1


def digest_words(tensor: str, words: Iterable[int], offset: int = 0) -> Digest:
    """Return the digest of words that start at word index ``offset`` of ``tensor``.

    Args:
        tensor: Model-wide name of the tensor, its identity in the sum.
        words: Unsigned bit patterns, at most 32 bits each.
        offset: Index of the first of them in the whole tensor.
    """
    tables = [element_keys(mixer) for mixer in range(len(MIXER_SEEDS))]
    sums = [0, 0]
    partial = [0, 0]
    chunk = offset // CHUNK
    for index, word in enumerate(words, start=offset):
        if index // CHUNK != chunk:
            sums = [s + chunk_key(tensor, chunk, m) * partial[m] for m, s in enumerate(sums)]
            partial, chunk = [0, 0], index // CHUNK
        position = index % CHUNK
        for mixer, table in enumerate(tables):
            partial[mixer] += table[position] * (word + 1)
    sums = [s + chunk_key(tensor, chunk, m) * partial[m] for m, s in enumerate(sums)]
    return Digest(sums[0] & _MASK, sums[1] & _MASK)


def digest_bytes(
    tensor: str, data: bytes | bytearray | memoryview, item_size: int = 1, offset: int = 0
) -> Digest:
    """Return the digest of raw little-endian elements.

    Args:
        tensor: Model-wide name of the tensor.
        data: The elements' bytes, a multiple of ``item_size``.
        item_size: Bytes per element: 1, 2, 4 or 8.
        offset: Index of the first element in the whole tensor.

    Raises:
        ValueError: The item size is none of these, or the data is torn.
    """
    if item_size not in (1, 2, 4, 8):
        raise ValueError(f"elements have 1, 2, 4 or 8 bytes, not {item_size}")
    raw = bytes(data)
    if len(raw) % item_size:
        raise ValueError(f"{len(raw)} bytes are no whole number of {item_size}-byte elements")
    words = array(_WORD_CODES[min(item_size, 4)])
    words.frombytes(raw)
    if sys.byteorder == "big":
        words.byteswap()
    return digest_words(tensor, words, offset * 2 if item_size == 8 else offset)
