"""Measures how fast this trainer copies, and over how many versions it would spread a snapshot.

A window is to be so long that an instalment is copied and at its holders within a step (MoEvement,
section 3.5, algorithm 1). The bandwidth is that of the slowest leg of a copy's way.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Sequence

from mainstay_core.job.config import MAX_AUTO_WINDOW
from mainstay_core.snapshots.measures import MICROSECONDS, round_measure
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.windows import plan_length

REMEMBERED = 32
"""Steps and copies of which the median counts. One that was held up changes nothing."""


class Pace:
    """The last steps and copies of this trainer. Any thread may note one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps_us: deque[int] = deque(maxlen=REMEMBERED)
        self._rates: dict[str, deque[int]] = {}
        """Bytes a second, by leg."""

    def note_step(self, step_s: float) -> None:
        """Note the time from one vote to the next."""
        with self._lock:
            self._steps_us.append(round_measure(max(1, int(step_s * MICROSECONDS))))

    def note_copy(self, leg: str, size_bytes: int, elapsed_s: float) -> None:
        """Note that so many bytes have taken a leg of their way in a time."""
        if size_bytes <= 0 or elapsed_s <= 0:
            return
        with self._lock:
            rates = self._rates.setdefault(leg, deque(maxlen=REMEMBERED))
            rates.append(round_measure(max(1, int(size_bytes / elapsed_s))))

    def wanted_instalments(self, units: Sequence[UnitPrice]) -> int:
        """Return over how many versions to spread a snapshot of some units.

        As many as there are units while nothing was measured; at most ``MAX_AUTO_WINDOW``.
        """
        most = max(1, min(MAX_AUTO_WINDOW, len(units)))
        with self._lock:
            if not self._steps_us or not self._rates:
                return most
            step_us = int(statistics.median_low(self._steps_us))
            slowest = min(int(statistics.median_low(rates)) for rates in self._rates.values())
        budget = max(1, slowest * step_us // MICROSECONDS)
        return min(most, plan_length([units], budget).length)
