"""Says which blocks of a stage run their forward again in the backward."""

from __future__ import annotations

import math


def num_recomputed(share: float, num_blocks: int) -> int:
    """Return how many of a stage's first blocks run their forward again.

    The first ones, since they wait longest for their backward. The last block of the model keeps
    what it saved all the same: its backward comes next.

    Args:
        share: of the stage's blocks, from 0 (none) to 1 (all); rounded up to whole blocks.
        num_blocks: of the stage.
    """
    return min(num_blocks, math.ceil(share * num_blocks))
