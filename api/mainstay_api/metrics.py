"""Prometheus metrics of one api process; a registry per app, so that tests may have several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mainstay_api.snapshot_metrics import JOB_LABELS as _JOB
from mainstay_api.snapshot_metrics import JobLabels, SnapshotMetrics
from mainstay_core.base.release import VERSION
from mainstay_core.coordinator.progress import find_ettr
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.wire.findings import ToldFinding
from mainstay_core.wire.plan import Method
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.stores import SnapshotSummary

_RECOVERY_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
"""Up to a quarter of an hour: that a trainer hangs is found after ``detection.hangSeconds``."""
_RECOVERIES = (
    *(Method.MASK, Method.REFORM, Method.JOIN, Method.REPLAY, Method.RESTART),
    *(Method.APPROXIMATE, Method.HAND_OVER),
)
"""Methods of plans that are recoveries."""
_REQUEST_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


M = TypeVar("M", Counter, Gauge, Histogram)


class Metrics:
    """The metrics of this process. Counters of a replicated api add up over its replicas."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._series: dict[str, set[tuple[Counter | Gauge | Histogram, tuple[str, ...]]]] = {}
        """By job, with all their labels, the job's uid among them."""
        self.steps = Counter(
            "mainstay_steps_committed",
            "Steps committed for the first time; each counts in one replica",
            _JOB,
            registry=self.registry,
        )
        self.recoveries = Counter(
            "mainstay_recoveries",
            "Finished recoveries",
            [*_JOB, "method"],
            registry=self.registry,
        )
        self.recovery_seconds = Histogram(
            "mainstay_recovery_seconds",
            "The five times of recoveries",
            [*_JOB, "stage"],
            buckets=_RECOVERY_BUCKETS,
            registry=self.registry,
        )
        self.lost_steps = Counter(
            "mainstay_steps_lost",
            "Committed steps that a restart undid",
            _JOB,
            registry=self.registry,
        )
        self.copy_waits = Counter(
            "mainstay_checkpoint_wait_seconds",
            "Seconds for which ranks waited, before they applied a step, for the copy of a "
            "checkpoint; more of checkpoint.copyMebibytes lowers it",
            _JOB,
            registry=self.registry,
        )
        self.findings = Counter(
            "mainstay_check_findings",
            "Executions of an operator that differed, by verdict; each counts in one replica",
            [*_JOB, "verdict"],
            registry=self.registry,
        )
        self.heartbeats = Counter(
            "mainstay_heartbeats", "Heartbeats accepted", _JOB, registry=self.registry
        )
        self.conflicts = Counter(
            "mainstay_conflicts", "Decisions taken again after a lost race", registry=self.registry
        )
        self.unshown = Counter(
            "mainstay_unshown_jobs",
            "Looks at a job, for these metrics, that failed: its series may be old; the log names "
            "it",
            registry=self.registry,
        )
        self.requests = Histogram(
            "mainstay_api_request_seconds",
            "Latency of requests, streams left out",
            ["method", "route", "status"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._show_build()
        self._make_gauges()
        self.snapshots = SnapshotMetrics(self.registry)

    def _make_gauges(self) -> None:
        """Make those that show how a job is."""
        self.step = Gauge("mainstay_job_step", "Steps committed", _JOB, registry=self.registry)
        loss = "Loss of the last step"
        self.loss = Gauge("mainstay_job_loss", loss, _JOB, registry=self.registry)
        self.replicas = Gauge(
            "mainstay_job_replicas", "Whole replicas", _JOB, registry=self.registry
        )
        self.ettr = Gauge(
            "mainstay_job_ettr",
            "Effective training time ratio as of the newest commit",
            _JOB,
            registry=self.registry,
        )
        self.approximate_since = Gauge(
            "mainstay_job_approximate_since_step",
            "First step of another course than without failures: a stage was made anew from others "
            "there; there is no series of an exact job",
            _JOB,
            registry=self.registry,
        )

    def _show_build(self) -> None:
        build = Gauge(
            "mainstay_build_info",
            "1: which part of Mainstay this is, and of which version",
            ["name", "version"],
            registry=self.registry,
        )
        build.labels("mainstay-api", VERSION).set(1)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    @property
    def jobs(self) -> frozenset[str]:
        """Uids of the jobs that this replica has heard of."""
        return frozenset(self._series)

    def note_job(self, job: str) -> None:
        """Remember that this replica has heard of a job: it shows how the job is from now on."""
        self._series.setdefault(job, set())

    def drop_job(self, job: str) -> None:
        """Forget a job: series of one that is gone are shown, and stored, for nothing."""
        for metric, labels in self._series.pop(job, ()):
            metric.remove(*labels)

    def _of(self, metric: M, job: JobLabels, *labels: str) -> M:
        """Return one of a job's series."""
        self._series.setdefault(job.job, set()).add((metric, (*job, *labels)))
        return metric.labels(*job, *labels)

    def _drop(self, metric: Gauge, job: JobLabels) -> None:
        """Show one of a job's series no more."""
        shown, one = self._series.get(job.job, set()), (metric, tuple(job))
        if one in shown:
            shown.discard(one)
            metric.remove(*job)

    def count_heartbeats(self, job: JobLabels, number: int) -> None:
        """Count those that were accepted."""
        self._of(self.heartbeats, job).inc(number)

    def count_recoveries(self, job: JobLabels, recoveries: Sequence[Recovery]) -> None:
        """Count those that have just finished."""
        for recovery in recoveries:
            if not recovery.done:
                continue
            self._of(self.recoveries, job, recovery.method.value).inc()
            self._of(self.lost_steps, job).inc(recovery.lost_steps)
            for replay in recovery.replays:
                self._of(self.snapshots.replayed, job, replay.kind).inc(replay.steps)
                self._of(self.snapshots.replay_seconds, job, replay.kind).inc(replay.seconds)
                self._of(self.snapshots.damaged, job).inc(replay.num_damaged)
            for stage, seconds in recovery.times.by_stage.items():
                if seconds is not None:
                    self._of(self.recovery_seconds, job, stage).observe(seconds)

    def count_copy_waits(self, job: JobLabels, seconds: float) -> None:
        """Count for how long ranks waited for copies of checkpoints; 0 is no wait."""
        if seconds > 0:
            self._of(self.copy_waits, job).inc(seconds)

    def count_findings(self, job: JobLabels, fresh: Sequence[ToldFinding]) -> None:
        """Count findings that were not known."""
        for told in fresh:
            self._of(self.findings, job, told.finding.verdict.value).inc()

    def count_steps(self, job: JobLabels, number: int) -> None:
        """Count steps that were committed for the first time; a number below 1 is none."""
        if number > 0:
            self._of(self.steps, job).inc(number)

    def show_job(self, state: CoordinatorState) -> None:
        """Show how far a job is, as its record in the store says: every replica shows the same."""
        job = JobLabels(state.config.job, state.config.namespace, state.config.name)
        self._of(self.step, job).set(state.step)
        self._of(self.replicas, job).set(len(state.in_force.chains) if state.in_force else 0)
        self._begin_counters(job, state)
        if state.approximate_since is not None:
            self._of(self.approximate_since, job).set(state.approximate_since)
        else:
            self._drop(self.approximate_since, job)
        ettr = find_ettr(state)
        if ettr is not None:
            self._of(self.ettr, job).set(ettr)
        if state.last_commit is not None and state.last_commit.loss is not None:
            self._of(self.loss, job).set(state.last_commit.loss)

    def _begin_counters(self, job: JobLabels, state: CoordinatorState) -> None:
        """Show counters from 0 on: a series that begins with 12 lost steps is no increase, so no
        alert would see it.
        """
        self._of(self.lost_steps, job)
        for method in _RECOVERIES:
            self._of(self.recoveries, job, method.value)
        if state.config.snapshots is not None:
            self._of(self.snapshots.damaged, job)
            self._of(self.snapshots.replayed, job, state.config.snapshots.log.value)
        if state.config.dmr is not Mode.OFF or state.config.witness_every_steps:
            for verdict in Verdict:
                self._of(self.findings, job, verdict.value)

    def show_snapshots(self, name: JobLabels, summary: SnapshotSummary) -> None:
        """Show what the stores of a job's pods hold, and which losses are survived."""
        window = summary.in_flight or summary.window
        self._of(self.snapshots.lag, name).set(summary.lag)
        self._of(self.snapshots.window, name).set(window.length if window else 0)
        self._of(self.snapshots.replay_steps, name).set(summary.replay_steps)
        self._of(self.snapshots.refused, name).set(summary.num_refused)
        self._of(self.snapshots.still_damaged, name).set(summary.num_damaged)
        for kind in summary.kinds:
            self._of(self.snapshots.size_bytes, name, kind.kind).set(kind.size_bytes)
        free = summary.fullest_memory_bytes - summary.fullest_used_bytes
        memory = {"limit": summary.memory_bytes, "used": summary.used_bytes, "least_free": free}
        for state, size in memory.items():
            self._of(self.snapshots.memory_bytes, name, state).set(size)
        positions = {
            "all": summary.num_positions,
            "covered": summary.num_covered,
            "survive_pod": summary.num_survive_pod,
            "survive_domain": summary.num_survive_domain,
        }
        for state, number in positions.items():
            self._of(self.snapshots.positions, name, state).set(number)


class LatencyMiddleware:
    """Measures requests by route. Plain ASGI: it does not buffer streams."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, is_stream = time.perf_counter(), 500, False

        async def watch(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message.get("headers", []))
                is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            if not is_stream:
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.requests.labels(scope["method"], route, str(status)).observe(
                    time.perf_counter() - started_s
                )
