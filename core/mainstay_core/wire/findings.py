"""Describes how findings travel: from a pod to the api, and from there to people.

A finding is what a check by re-execution has found (:mod:`mainstay_core.dmr.findings`). They are
told like facts, so that people hear of them; the operator's quarantine counts them
(:mod:`mainstay_core.pool.quarantine`), and no plan depends on one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import Count, Instant, Longest, Name, Range
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import Incarnation
from mainstay_core.base.words import count
from mainstay_core.dmr.findings import Finding

MAX_KEPT = 1000
"""Newest findings of a job that the api keeps and shows, about 1 KiB each."""
MAX_NEWEST = 5
"""Findings on a job's page."""
MAX_VERDICTS = 64
"""Verdicts of a newer api may be more than ours."""
MAX_WAITING = 256
"""Findings of a pod that wait until the api hears them, and as many that are held in case it has
lost them. A device that computes wrongly all the time finds more each step than anybody reads: the
others are counted."""
MAX_BATCH = 64
"""Findings in one request: 64 KiB, about."""
MAX_UNTOLD = 1_000_000
"""Findings beside one that are not told. The sum over a job stays a :data:`Count`, then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldFinding:
    """A finding as a pod tells it. Telling it twice changes nothing."""

    finding: Finding
    incarnation: Incarnation
    """The life of the trainer that has found it."""
    number: Count
    """Place among that trainer's findings, counted from 0."""
    at_s: Instant
    """When the supervisor heard of it, by its wall clock."""
    untold: Annotated[int, Range(0, MAX_UNTOLD)] = field(default=0, metadata=OMITTED)
    """Findings behind this one that are not told, as too many came at once: of the same trainer, or
    of another of its pod that has told none."""

    trainer: Name = field(default="", metadata=OMITTED)
    """Name of its pod and slot. The api adds it for people."""

    def describe(self) -> str:
        """Return the finding as one sentence for people."""
        return self.finding.describe(self.trainer)

    @property
    def id(self) -> str:
        """Return what tells it from all others of the job."""
        return f"{self.finding.slot}:{self.incarnation}:{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFinding:
    """A finding as the api keeps it."""

    place: Count
    """Place among all findings of the job, counted from 1."""
    told: ToldFinding


Counts = Annotated[dict[Name, Count], Longest(MAX_VERDICTS)]
"""Findings by verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsPage:
    """A job's findings: how many there were, and the newest."""

    counts: Counts = field(default_factory=dict)
    """All that were told, by verdict."""
    untold: Count = 0
    """Those of which only the number is known."""
    findings: Annotated[tuple[KeptFinding, ...], Longest(MAX_KEPT)] = ()
    """Oldest first."""


def describe_counts(page: FindingsPage) -> str:
    """Return how many findings there were, e.g. ``3 findings (primary 2, checker 1)``."""
    total = sum(page.counts.values())
    by_verdict = ", ".join(f"{verdict} {page.counts[verdict]}" for verdict in sorted(page.counts))
    told = count(total, "finding") + (f" ({by_verdict})" if by_verdict else "")
    return told + (f", and {page.untold} that were only counted" if page.untold else "")
