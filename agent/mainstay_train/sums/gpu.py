"""Sums of a digest in one pass on a GPU: words are widened, multiplied by their keys and added.

Needs Triton, which comes with torch for CUDA, and a C compiler, which Triton calls once. torch's
form of the same, in ``digests``, needs neither; it writes every word three times, as int64.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, unused-ignore]

from mainstay_core.base.digest import CHUNK, MIXER_SEEDS

BLOCK = 2048
"""Words that a program adds: several programs share a row, and torch adds up what they find."""

_NUM_MIXERS = len(MIXER_SEEDS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows none of typing's
    words,
    starts,
    positions,
    lengths,
    keys,
    sums,
    num_rows,
    chunk: tl.constexpr,
    block: tl.constexpr,
    num_mixers: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    numbers = part * block + tl.arange(0, block)
    there = numbers < tl.load(lengths + row)
    at = words + tl.load(starts + row) + numbers
    first_key = keys + tl.load(positions + row)
    # The pattern as an unsigned number. int64 wraps modulo 2^64.
    word = tl.load(at, mask=there, other=0).to(tl.int64) & 0xFFFFFFFF
    for mixer in tl.static_range(num_mixers):
        key = tl.load(first_key + mixer * chunk + numbers, mask=there, other=0)
        into = sums + (mixer * num_rows + row) * (chunk // block) + part
        tl.store(into, tl.sum(word * key, 0))


def row_sums(
    words: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """The sum of key times word, by mixer and row, int64 [mixers, rows].

    Args:
        words: a buffer as int32, flat.
        starts: int64 [rows], where in the buffer a row begins.
        positions: int64 [rows], of its first word in its chunk.
        lengths: int64 [rows], its words, at most the rest of the chunk.
        keys: int64 [mixers, chunk], by position in the chunk.
    """
    num_rows = starts.numel()
    sums = torch.empty(
        _NUM_MIXERS, num_rows, CHUNK // BLOCK, dtype=torch.int64, device=words.device
    )
    grid = (num_rows, CHUNK // BLOCK)
    _add[grid](words, starts, positions, lengths, keys, sums, num_rows, CHUNK, BLOCK, _NUM_MIXERS)
    return sums.sum(2)
