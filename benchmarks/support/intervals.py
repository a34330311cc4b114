"""Means with 95 % intervals, and what they say of a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and half the width of its interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def interval_of(values: Sequence[float]) -> Interval | None:
    """Return the mean with its 95 % interval by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Interval(
        statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
    )


def shown(values: Sequence[float]) -> str:
    """Return the mean and its interval as text."""
    if not values:
        return "none"
    found = interval_of(values)
    return f"{values[0]:+.4f} (one)" if found is None else str(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of the paper, as differences that are below 0 where it holds."""

    says: str
    section: str
    differences: Sequence[float]
    unit: str = "nats"

    def verdict(self) -> str:
        """Return whether the measured differences confirm it."""
        found = interval_of(self.differences)
        if found is None:
            return "not measured"
        if found.mean + found.half < 0:
            return "confirmed"
        if found.mean - found.half > 0:
            return "not so at this scale"
        return "not shown at this scale"

    def row(self) -> str:
        """Return its row of a table."""
        measured = f"{shown(self.differences)} {self.unit}, n = {len(self.differences)}"
        if not self.differences:
            measured = "-"
        return f"| {self.section} | {self.says} | {measured} | {self.verdict()} |"
