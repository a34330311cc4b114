"""Prometheus metrics of a job's snapshots: what stores hold, what is survived, and replays."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge


class JobLabels(NamedTuple):
    """The labels of a job's series: its uid, and what it is called where it was submitted."""

    job: str
    namespace: str
    """Empty in local mode."""
    name: str


JOB_LABELS = JobLabels._fields


class SnapshotMetrics:
    """The series of jobs with snapshots.

    Args:
        registry: in which they are scraped.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.replayed = Counter(
            "mainstay_steps_replayed",
            "Steps replayed to make lost states anew, of each position",
            [*JOB_LABELS, "kind"],
            registry=registry,
        )
        self.replay_seconds = Counter(
            "mainstay_replay_seconds",
            "Seconds of reading and replaying, of each position",
            [*JOB_LABELS, "kind"],
            registry=registry,
        )
        self.damaged = Counter(
            "mainstay_damaged_copies",
            "Copies of snapshots and logs that replays found damaged",
            JOB_LABELS,
            registry=registry,
        )
        self.lag = Gauge(
            "mainstay_job_snapshot_lag",
            "Committed steps since the newest complete window of snapshots",
            JOB_LABELS,
            registry=registry,
        )
        self.window = Gauge(
            "mainstay_job_snapshot_window",
            "Versions of the window that is copied, else of the newest complete one",
            JOB_LABELS,
            registry=registry,
        )
        self.size_bytes = Gauge(
            "mainstay_job_snapshot_bytes",
            "Bytes in the stores of all pods, by kind of segment",
            [*JOB_LABELS, "kind"],
            registry=registry,
        )
        self.memory_bytes = Gauge(
            "mainstay_job_snapshot_memory_bytes",
            "Memory of all pods' stores: limit, used, and the least that one of them has free",
            [*JOB_LABELS, "state"],
            registry=registry,
        )
        self.refused = Gauge(
            "mainstay_job_snapshot_refused",
            "Segments that found no room in the stores of the living pods",
            JOB_LABELS,
            registry=registry,
        )
        self.still_damaged = Gauge(
            "mainstay_job_snapshot_damaged",
            "Segments and commits in the living pods' stores that were found damaged, and were not "
            "written again: they cover nothing",
            JOB_LABELS,
            registry=registry,
        )
        self.positions = Gauge(
            "mainstay_job_positions",
            "Positions: all, those that stores can make anew (covered), and those that survive "
            "the loss of any one pod (survive_pod) or failure domain (survive_domain)",
            [*JOB_LABELS, "state"],
            registry=registry,
        )
        self.replay_steps = Gauge(
            "mainstay_job_replay_steps",
            "Steps that a replay would take now, of the position that needs most",
            JOB_LABELS,
            registry=registry,
        )
