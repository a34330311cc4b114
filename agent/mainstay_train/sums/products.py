"""Sums of keys times the words of rows, in torch's and numpy's operations.

What digests are made of where no code was compiled for it (:mod:`.compiled`, :mod:`.gpu`).
"""

import numpy as np
import torch

from mainstay_core.base.digest import CHUNK
from mainstay_train.sums.rows import scratch

_LONG_ON_CPU = 1024
"""A row of so many words that begins within a chunk is multiplied by itself: to pick out its keys,
which rows of a batch share otherwise, costs more than to start for it."""


def widened(words: torch.Tensor) -> torch.Tensor:
    """Unsigned words as int64, in memory that the thread's next call writes to again."""
    wide = scratch("wide", words.device, torch.int64, words.numel()).view(words.shape)
    return wide.copy_(words)


def multiply(wide: torch.Tensor, keys: torch.Tensor, into: torch.Tensor) -> None:
    """The sum of key times word, by mixer and row.

    Args:
        wide: [rows, width].
        keys: [mixers, width].
        into: [mixers, rows].
    """
    if wide.device.type == "cpu":
        # Two thirds of the time of torch's product of integers.
        unsigned = (tensor.numpy().view(np.uint64) for tensor in (wide, keys, into))
        wide_words, key_words, sums = unsigned
        np.einsum("rp,mp->mr", wide_words, key_words, out=sums)
        return
    # There is no product of integer matrices.
    torch.sum(wide * keys.unsqueeze(1), 2, out=into)


def multiply_at(
    wide: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, into: torch.Tensor
) -> None:
    """The same of rows that begin anywhere in a chunk; words beyond a row's end are zero.

    Args:
        wide: [rows, width].
        keys: [mixers, chunk].
        positions: [rows], of the first word of each in its chunk.
        into: [mixers, rows].
    """
    if wide.device.type == "cpu" and wide.shape[1] >= _LONG_ON_CPU:
        for row, position in enumerate(positions.tolist()):
            key = keys[:, position : position + wide.shape[1]]
            multiply(wide[row : row + 1, : key.shape[1]], key, into[:, row : row + 1])
        return
    at = positions.unsqueeze(1) + torch.arange(wide.shape[1], device=wide.device)
    at.clamp_(max=CHUNK - 1)
    for key, sums in zip(keys, into, strict=True):
        torch.sum(wide * key[at], 1, out=sums)
