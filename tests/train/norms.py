"""Squared norms of gradients at once, block by block."""

from collections.abc import Iterable

import torch

from mainstay_train.sums.norms import FlatNorms, fold
from mainstay_train.sums.rows import Piece


def block_norms_sq(blocks: Iterable[torch.Tensor]) -> list[float]:
    """The squared norm of each flat gradient, which is a whole number of granules."""
    found = []
    for flat in blocks:
        norms = FlatNorms([Piece("", 0, flat.numel())])
        by_piece = norms.by_piece(norms.squares(flat).tolist())
        found.append(fold(value for _, values in by_piece for value in values))
    return found
