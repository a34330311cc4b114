"""Defines what ranks tell each other of windows of snapshots: measures, and what follows from them.

Votes carry what each rank has measured. What all votes of a commit say together is kept with the
state, and told in settle reports. So a rank that joins plans the same next window as the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_STATISTICS, Count, Longest

Scores = Annotated[tuple[Count, ...], Longest(MAX_STATISTICS)]
"""Popularities of a job's experts, by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The measurements of one rank, rounded to two digits, as its vote tells them."""

    copy_bytes_per_s: Count
    """From the device to the store of its pod; 0 is not measured, as of all of them."""
    host_bytes_per_s: Count
    """On the host: the digest of what the store is given."""
    network_bytes_per_s: Count
    """From the pod's store to other pods, all of them together."""
    step_us: Count
    """Median time of its steps in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """The scores of a job's experts, as they stand after a commit."""

    running: Scores = field(default=(), metadata=codec.OMITTED)
    """Of the window that runs; a decayed average goes on over all windows. Empty before a step."""
    ordered_by: Scores = field(default=(), metadata=codec.OMITTED)
    """Those by which the order in force was made; empty before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowBasis:
    """The rates, times and counts from which a job's next window is planned, after a commit."""

    version: Count = 0
    """Version that the commit led to."""
    bytes_per_s: Count = 0
    """Rate of the slowest leg of a copy's way, of any rank; 0 while nothing was measured."""
    step_us: Count = 0
    """Median of the ranks' step times in microseconds."""
    popularity: Popularity = field(default_factory=Popularity)
