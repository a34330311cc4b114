"""Cuts a model into pipeline stages, and says where these may change places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from mainstay_core.base.shape import Cut
from mainstay_core.base.words import count


def cut_blocks(costs: Sequence[float], stages: int, cut: Cut) -> list[range]:
    """Cut the blocks into contiguous stages by a rule.

    Args:
        costs: relative cost of each block, in model order.
        stages: number of stages.
        cut: the rule.

    Raises:
        ValueError: There are more stages than blocks, or none.
    """
    if cut is Cut.EQUAL:
        return equal_blocks(len(costs), stages)
    return stage_blocks(costs, stages)


def equal_blocks(num_blocks: int, stages: int) -> list[range]:
    """Cut the blocks so that numbers of layers are equal, or differ by one.

    Layers are all blocks but the first and the last one, which belong to the first and the last
    stage. Where the layers do not divide evenly, twins have equal numbers as far as that can be.

    Args:
        num_blocks: of the model.
        stages: number of stages.

    Raises:
        ValueError: There are more stages than blocks, or none.
    """
    _check(num_blocks, stages)
    least, more = divmod(max(0, num_blocks - 2), stages)
    counts = [least] * stages
    alike = _alike(stages)
    free = [stage for stage in range(stages) if not any(stage in group for group in alike)]
    # What the free stages cannot take goes to whole groups, so that these stay alike.
    for group in alike:
        if len(free) < more >= len(group):
            more -= len(group)
            for stage in group:
                counts[stage] += 1
    rest = [stage for stage in range(stages) if stage not in free and counts[stage] == least]
    for stage in [*free, *rest][:more]:
        counts[stage] += 1
    stops = [*accumulate(counts, initial=1)]
    stops[0], stops[-1] = 0, num_blocks
    if any(stop <= start for start, stop in pairwise(stops)):
        return stage_blocks([1.0] * num_blocks, stages)  # a stage without a layer has another block
    return [range(a, b) for a, b in pairwise(stops)]


def twins_of(stages: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of stages that change places in a swapped pipeline: ends and their twins."""
    return () if stages < 2 else ((0, 1),) if stages == 2 else ((0, 1), (stages - 1, stages - 2))


def _alike(stages: int) -> list[tuple[int, ...]]:
    """Return the groups of stages that must have equal layers where the pipeline is swapped."""
    return [(0, 1, 2)] if stages == 3 else [*twins_of(stages)]


def tell_unlike_twins(kinds: Sequence[object], cuts: Sequence[range]) -> str:
    """Return what is wrong with the cut of a swapped pipeline, and what would be right; or nothing.

    Args:
        kinds: of every block: equal for blocks that could take each other's place.
        cuts: the blocks of each stage.
    """
    layers = _layers(kinds, cuts)
    for end, twin in twins_of(len(cuts)):
        if _are_alike(layers, end, twin):
            continue
        sizes = [sum(layers[stage].values()) for stage in (end, twin)]
        found = (
            f"stage {end} has {count(sizes[0], 'layer')} and its twin, stage {twin}, {sizes[1]}"
            if sizes[0] != sizes[1] or not sizes[0]
            else f"stage {end} and its twin, stage {twin}, have layers of other kinds"
        )
        fitting = " or ".join(map(str, _fitting(len(kinds) - 2, len(cuts))))
        return (
            f"{found}; with pipeline.cut Equal, {len(cuts)} stages can swap with {fitting} layers "
            "of one kind"
        )
    return ""


def _layers(kinds: Sequence[object], cuts: Sequence[range]) -> list[Counter[object]]:
    """Return how many layers of each kind each stage has."""
    layers = range(1, len(kinds) - 1)
    return [Counter(kinds[i] for i in cut if i in layers) for cut in cuts]


def _are_alike(layers: Sequence[Counter[object]], end: int, twin: int) -> bool:
    return bool(layers[end]) and layers[end] == layers[twin]


def _fitting(num_layers: int, stages: int) -> list[int]:
    """Return the numbers of layers nearest to a number that an equal cut gives to twins alike."""

    def fits(number: int) -> bool:
        kinds = [0] * (number + 2)
        layers = _layers(kinds, equal_blocks(len(kinds), stages))
        return all(_are_alike(layers, *pair) for pair in twins_of(stages))

    below = (n for n in range(num_layers, stages - 1, -1) if fits(n))
    above = (n for n in range(max(num_layers, stages), num_layers + 2 * stages + 1) if fits(n))
    return sorted({n for n in (next(below, None), next(above, None)) if n is not None})


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
    num_blocks = len(costs)
    _check(num_blocks, stages)
    prefix = list(accumulate(costs, initial=0.0))
    limit = _least_maximum(prefix, stages)
    # best[k][i]: least sum of squares of the first i blocks in k stages, and the last cut.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for k in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        for i in range(k, num_blocks - (stages - k) + 1):
            options = [
                (value + (prefix[i] - prefix[j]) ** 2, j)
                for j, (value, _) in best[k - 1].items()
                if j < i and prefix[i] - prefix[j] <= limit
            ]
            if options:
                row[i] = min(options)
        best.append(row)
    stops = [num_blocks]
    for k in range(stages, 0, -1):
        stops.append(best[k][stops[-1]][1])
    stops.reverse()
    return [range(a, b) for a, b in pairwise(stops)]


def _check(num_blocks: int, stages: int) -> None:
    if stages < 1:
        raise ValueError(f"stages must be at least 1, got {stages}")
    if stages > num_blocks:
        raise ValueError(
            f"stages is {stages} but the model has {num_blocks} blocks: each stage needs at least "
            "one"
        )


def _least_maximum(prefix: Sequence[float], stages: int) -> float:
    """Return the least possible cost of the dearest stage."""
    num_blocks = len(prefix) - 1
    row = {i: prefix[i] for i in range(num_blocks + 1)}
    for k in range(2, stages + 1):
        row = {
            i: min(max(row[j], prefix[i] - prefix[j]) for j in range(k - 1, i))
            for i in range(k, num_blocks + 1)
        }
    return row[num_blocks]
