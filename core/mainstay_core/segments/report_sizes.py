"""Bounds how many bytes it takes to tell what stores hold.

A report is the JSON head of one frame (:data:`mainstay_core.base.frames.MAX_HEAD_BYTES`), and those
of all stores are the body of another one when a quorum settles. Names are bounded, so what they
take can be computed without encoding them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.base.bounds import cut
from mainstay_core.base.frames import MAX_BODY_BYTES
from mainstay_core.base.words import show_bytes
from mainstay_core.wire.segments import BadSegment, LogsHeld, StoreReport, UnitHeld
from mainstay_core.wire.votes import CommitRecord

MAX_REPORT_BYTES = 48 * 1024 * 1024
"""Of one store's report. The frame has room for another quarter."""
MAX_TOLD_BYTES = MAX_BODY_BYTES // 4 * 3
"""Of the reports of all stores in a settle together. Every member gets them in one frame, which has
room for another third: for what members tell that speak for no store."""
MAX_WHY = 256
"""Characters of why a store is not told of, where there is little room."""
_NUMBER_BYTES = 18
"""Digits of the largest count, and what stands between two."""
_FLOAT_BYTES = 26
"""Digits, sign and exponent of the longest number in fp64, and what stands between two."""
_RUN_BYTES = 2 * _NUMBER_BYTES + 20
_NAME_BYTES = 6
"""JSON writes a character as that many at most."""


def record_bytes(record: CommitRecord) -> int:
    """Return how many bytes a record has in a report, a little less than half a kilobyte more."""
    digests = sum(len(digest) + 4 for digest in (*record.gradients, *record.states))
    norms = _FLOAT_BYTES * len(record.commit.norms_sq)
    return 576 + digests + norms + sum(len(str(n)) + 2 for n in record.commit.statistics)


def report_bytes(report: StoreReport) -> int:
    """Return a bound on the bytes of a report as JSON."""
    return (
        1024
        + _NAME_BYTES * (len(report.pod) + len(report.address) + len(report.problem))
        + sum(map(_unit_bytes, report.units))
        + sum(map(record_bytes, report.records))
        + sum(map(_log_bytes, report.logs))
        + sum(map(_bad_bytes, report.bad))
    )


def bounded(report: StoreReport) -> StoreReport:
    """Return a report; one that no message could carry counts as empty, and says why."""
    size = report_bytes(report)
    if size <= MAX_REPORT_BYTES:
        return report
    problem = (
        f"what it holds takes {show_bytes(size)} to tell, and a report has at most "
        f"{show_bytes(MAX_REPORT_BYTES)} (fewer units to a pod take less)"
    )
    return StoreReport(
        pod=report.pod, address=report.address, lineage=report.lineage, problem=problem
    )


def fit_reports(reports: Sequence[StoreReport], max_bytes: int) -> tuple[StoreReport, ...]:
    """Return what of some reports fits into a message, and says what does not.

    The newest commits of all are told first: those before a step are left out of each report. From
    there nothing can be made anew that needs them. If units and logs alone are too much, the
    largest reports count as empty, one by one. So what is not told is never taken to be there.

    Args:
        reports: what one member tells.
        max_bytes: of all of them as JSON; a few kilobytes for each are enough for what is left of
            an empty one, but for the names of damaged segments, of which the newest are told.
    """
    if sum(map(report_bytes, reports)) <= max_bytes:
        return tuple(reports)
    told = [*reports]
    by_size = sorted(range(len(told)), key=lambda at: _content_bytes(told[at]))
    while (left := max_bytes - sum(map(_bytes_without_commits, told))) < 0 and by_size:
        largest = by_size.pop()
        told[largest] = _emptied(told[largest])
    if left >= 0:
        return _with_newest(told, left)
    each = max_bytes // len(reports)
    return tuple(_without_old_bad(report, each) for report in told)


def _with_newest(reports: Sequence[StoreReport], left: int) -> tuple[StoreReport, ...]:
    """Return reports with the newest commits, as many as fit into the bytes that are left."""
    sizes: dict[int, int] = {}
    for report in reports:
        for record in report.records:
            step = record.commit.step
            sizes[step] = sizes.get(step, 0) + record_bytes(record)
    first = max(sizes, default=-1) + 1
    for step in sorted(sizes, reverse=True):
        left -= sizes[step]
        if left < 0:
            break
        first = step
    return tuple(_from_step(report, first) for report in reports)


def _from_step(report: StoreReport, first: int) -> StoreReport:
    kept = tuple(record for record in report.records if record.commit.step >= first)
    if len(kept) == len(report.records):
        return _with_why(report, report.problem)
    why = f"its commits before step {first} are not told: those of all pods take too many bytes"
    return _with_why(replace(report, records=kept), why)


def _bytes_without_commits(report: StoreReport) -> int:
    """Return what a report takes at least, and what it takes to say that there were more."""
    return report_bytes(replace(report, records=(), problem="")) + _NAME_BYTES * MAX_WHY


def _emptied(report: StoreReport) -> StoreReport:
    size = show_bytes(report_bytes(report))
    why = f"what it holds takes {size} to tell, which is too much beside what other pods hold"
    return _with_why(replace(report, units=(), records=(), logs=(), address=""), why)


def _with_why(report: StoreReport, why: str) -> StoreReport:
    return replace(report, problem=cut(why, MAX_WHY))


def _content_bytes(report: StoreReport) -> int:
    """Return what would go if a report counted as empty."""
    return sum(map(_unit_bytes, report.units)) + sum(map(_log_bytes, report.logs))


def _without_old_bad(report: StoreReport, max_bytes: int) -> StoreReport:
    """Return a report without content and with as many damaged segments as fit."""
    empty = _with_why(replace(report, records=(), bad=()), report.problem)
    left, kept = max_bytes - report_bytes(empty), list[BadSegment]()
    for bad in reversed(report.bad):
        left -= _bad_bytes(bad)
        if left < 0:
            break
        kept.insert(0, bad)
    return replace(empty, bad=tuple(kept))


def _unit_bytes(held: UnitHeld) -> int:
    return (
        192
        + _NAME_BYTES * len(held.unit_name)
        + _NUMBER_BYTES * len(held.states)
        + _RUN_BYTES * (len(held.gradients) + len(held.computes))
    )


def _log_bytes(log: LogsHeld) -> int:
    return 288 + _NAME_BYTES * len(log.voted_in)


def _bad_bytes(bad: BadSegment) -> int:
    return 288 + _NAME_BYTES * len(bad.pod)
