"""Shows several measured times as one short text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median_and_p90(seconds: Sequence[float]) -> str:
    """Return the median and the 90th percentile in milliseconds."""
    if not seconds:
        return "-"
    if len(seconds) == 1:
        return f"{seconds[0] * 1e3:.0f}"
    high = statistics.quantiles(seconds, n=10, method="inclusive")[-1]
    return f"{statistics.median(seconds) * 1e3:.0f} ({high * 1e3:.0f})"


def median_and_most(seconds: Sequence[float]) -> str:
    """Return the median and the largest in milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.0f} ({max(seconds) * 1e3:.0f})"


def p10_to_p90(seconds: Sequence[float]) -> str:
    """Return the 10th and the 90th percentile in seconds: what else the machine did shows here."""
    low, *_, high = statistics.quantiles(seconds, n=10, method="inclusive")
    return f"{low:.2f}-{high:.2f}"
