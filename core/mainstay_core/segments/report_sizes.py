"""Bounds how many bytes it takes to tell what a store holds.

A report is the JSON head of one frame (:data:`mainstay_core.base.frames.MAX_HEAD_BYTES`). Names are
bounded, so what it takes can be computed without encoding it.
"""

from __future__ import annotations

from mainstay_core.wire.segments import LogsHeld, StoreReport, UnitHeld
from mainstay_core.wire.votes import CommitRecord

MAX_REPORT_BYTES = 48 * 1024 * 1024
"""Of one store's report. The frame has room for another quarter."""
_NUMBER_BYTES = 18
"""Digits of the largest count, and what stands between two."""
_RUN_BYTES = 2 * _NUMBER_BYTES + 20
_NAME_BYTES = 6
"""JSON writes a character as that many at most."""


def record_bytes(record: CommitRecord) -> int:
    """Return how many bytes a record has in a report, a little less than half a kilobyte more."""
    digests = sum(len(digest) + 4 for digest in (*record.gradients, *record.states))
    return 512 + digests + sum(len(str(n)) + 2 for n in record.commit.statistics)


def report_bytes(report: StoreReport) -> int:
    """Return a bound on the bytes of a report as JSON."""
    return (
        1024
        + _NAME_BYTES * (len(report.pod) + len(report.address) + len(report.problem))
        + sum(map(_unit_bytes, report.units))
        + sum(map(record_bytes, report.records))
        + sum(map(_log_bytes, report.logs))
    )


def _unit_bytes(held: UnitHeld) -> int:
    return (
        192
        + _NAME_BYTES * len(held.unit_name)
        + _NUMBER_BYTES * len(held.states)
        + _RUN_BYTES * (len(held.gradients) + len(held.computes))
    )


def _log_bytes(log: LogsHeld) -> int:
    return 288 + _NAME_BYTES * len(log.voted_in)
