"""Shows what the ranks of a job hold and send, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mainstay_core.base.words import count, show_bytes
from mainstay_core.job.sizes.rank_sizes import RankSizes, largest

MAX_ROWS = 40
"""Ranks that differ and are shown one by one; with more, the largest of each position is shown."""
_COLUMNS = {
    "copy": "parameters_bytes",
    "masters": "masters_bytes",
    "moments": "moments_bytes",
    "gradients": "gradients_bytes",
    "partials": "partials_bytes",
    "reduction": "reduction_bytes",
    "activations": "activations_bytes",
    "guarded": "guarded_bytes",
    "memory": "memory_bytes",
    "to be made": "making_bytes",
    "to stages": "sent_pipeline_bytes",
    "to cells": "sent_reduction_bytes",
    "in cell": "sent_inner_bytes",
    "to guard": "sent_guarded_bytes",
    "sent": "sent_bytes",
}
"""Heading, and the line of :class:`RankSizes` under it. Optional ones are left out where they are
0 for all ranks."""
_OPTIONAL = ("copy", "guarded", "to be made", "to stages", "to cells", "in cell", "to guard")


def describe_sizes(ranks: Sequence[RankSizes]) -> list[str]:
    """Return the lines of the table: ranks of a position that are alike share one.

    Args:
        ranks: of a job, at least one.
    """
    groups = _group(ranks)
    is_short = len(groups) > MAX_ROWS
    if is_short:
        groups = _largest(ranks)
    shown = {
        heading: line
        for heading, line in _COLUMNS.items()
        if heading not in _OPTIONAL or any(_value(rank, line) for rank, _ in groups)
    }
    rows = [["replica", "stage", "inner", "parameters", *shown]]
    for rank, replicas in groups:
        sizes = [show_bytes(_value(rank, line)) for line in shown.values()]
        rows.append(
            [replicas, str(rank.stage), str(rank.inner), f"{rank.num_parameters:,}", *sizes]
        )
    if not any(rank.inner for rank in ranks):
        rows = [[*row[:2], *row[3:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    if is_short:
        lines.append(
            f"{count(len(ranks), 'rank')}: for each position the largest, line by line; --json has "
            "all"
        )
    return lines


def _value(rank: RankSizes, line: str) -> int:
    return int(getattr(rank, line))


def _group(ranks: Sequence[RankSizes]) -> list[tuple[RankSizes, str]]:
    """Return ranks that differ, with the replicas of those that are like them."""

    def alike(rank: RankSizes) -> tuple[int, ...]:
        lines = [_value(rank, line) for line in _COLUMNS.values()]
        return (rank.stage, rank.inner, rank.num_parameters, *lines)

    ordered = sorted(ranks, key=lambda rank: (rank.stage, rank.inner, rank.replica))
    by_value: dict[tuple[int, ...], list[RankSizes]] = {}
    for rank in ordered:
        by_value.setdefault(alike(rank), []).append(rank)
    return [(group[0], _ranges([r.replica for r in group])) for group in by_value.values()]


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers in short, e.g. 0-3,7."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(parts)


def _largest(ranks: Sequence[RankSizes]) -> list[tuple[RankSizes, str]]:
    """Return, for each position, the most that a rank of it has, line by line."""
    positions: dict[tuple[int, int], list[RankSizes]] = {}
    for rank in ranks:
        positions.setdefault((rank.stage, rank.inner), []).append(rank)
    return [(largest(group), "most") for _, group in sorted(positions.items())]
