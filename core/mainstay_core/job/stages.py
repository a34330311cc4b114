"""Cuts a model into pipeline stages by the costs of its blocks, and by nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def stage_blocks(costs: Sequence[float], stages: int) -> list[range]:
    """Cut the blocks into contiguous stages, the dearest stage as cheap as possible.

    Among those cuts, the one with the least sum of squares (the most even), then
    the one whose earlier stages are shorter. Deterministic; O(stages * blocks^2).

    Args:
        costs: Relative cost of each block, in model order.
        stages: Number of stages.

    Returns:
        One non-empty range of block indices per stage.

    Raises:
        ValueError: There are more stages than blocks, or none.
    """
    count = len(costs)
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    if stages > count:
        raise ValueError(
            f"stages is {stages} but the model has {count} blocks: each stage needs at least one"
        )
    prefix = list(accumulate(costs, initial=0.0))
    limit = _least_maximum(prefix, stages)
    # best[k][i]: least sum of squares of the first i blocks in k stages, and the last cut.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for k in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        for i in range(k, count - (stages - k) + 1):
            options = [
                (value + (prefix[i] - prefix[j]) ** 2, j)
                for j, (value, _) in best[k - 1].items()
                if j < i and prefix[i] - prefix[j] <= limit
            ]
            if options:
                row[i] = min(options)
        best.append(row)
    stops = [count]
    for k in range(stages, 0, -1):
        stops.append(best[k][stops[-1]][1])
    stops.reverse()
    return [range(a, b) for a, b in pairwise(stops)]


def _least_maximum(prefix: Sequence[float], stages: int) -> float:
    """Return the least possible cost of the dearest stage."""
    count = len(prefix) - 1
    row = {i: prefix[i] for i in range(count + 1)}
    for k in range(2, stages + 1):
        row = {
            i: min(max(row[j], prefix[i] - prefix[j]) for j in range(k - 1, i))
            for i in range(k, count + 1)
        }
    return row[count]
