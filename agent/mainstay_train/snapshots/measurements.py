"""Measures how fast this trainer copies, and how long its steps take.

Nothing is decided here. Votes tell what was measured, and from all votes of a commit every rank
plans the same window (MoEvement, section 3.5, algorithm 1).
"""

from __future__ import annotations

import enum
import statistics
import threading
from collections import deque

from mainstay_core.snapshots.measures import rate, round_measure
from mainstay_core.wire.windows import Measures

REMEMBERED = 32
"""Steps and copies of which the median counts. One that was held up changes nothing."""
_NANOSECONDS = 1000
"""In a microsecond."""


class Leg(enum.Enum):
    """The legs of a copy's way."""

    COPY = "copy"
    """From the device to the store's memory."""
    HOST = "host"
    """The digest of what lies there."""
    NETWORK = "network"
    """From the pod's store to other pods, all of them together."""


class Measurements:
    """The last steps and copies of this trainer. Any thread may note one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps_us: deque[int] = deque(maxlen=REMEMBERED)
        self._rates: dict[Leg, deque[int]] = {leg: deque(maxlen=REMEMBERED) for leg in Leg}
        """Bytes a second."""

    def note_step(self, elapsed_ns: int) -> None:
        """Note the time from one vote to the next."""
        with self._lock:
            self._steps_us.append(round_measure(max(1, elapsed_ns // _NANOSECONDS)))

    def note_copy(self, leg: Leg, size_bytes: int, elapsed_ns: int) -> None:
        """Note that so many bytes have taken a leg of their way in a time."""
        if size_bytes <= 0 or elapsed_ns <= 0:
            return
        with self._lock:
            self._rates[leg].append(max(1, rate(size_bytes, elapsed_ns)))

    def told(self) -> Measures:
        """Return the medians, as the next vote tells them."""
        with self._lock:
            rates = {leg: _median(known) for leg, known in self._rates.items()}
            return Measures(
                copy_bytes_per_s=rates[Leg.COPY],
                host_bytes_per_s=rates[Leg.HOST],
                network_bytes_per_s=rates[Leg.NETWORK],
                step_us=_median(self._steps_us),
            )


def _median(values: deque[int]) -> int:
    """Return the median, the lower one of two in the middle; 0 of nothing."""
    return int(statistics.median_low(values)) if values else 0
