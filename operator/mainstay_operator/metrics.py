"""Prometheus metrics of the operator, in a registry of their own.

Counters are by reason and resource, never by pod or node. A gauge that names a job is removed
with the job.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mainstay_core.base.release import VERSION
from mainstay_core.pool.losses import Loss
from mainstay_operator.liveness import Liveness

_PASS_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
POD_STATES = ("wanted", "ready", "pending", "leaving")


class Metrics:
    """Counts what this process has seen and done, and tells its liveness when it did so.

    Counters begin anew with the process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.liveness = Liveness(time.monotonic())
        self.reconciles = Counter(
            "mainstay_operator_reconciles",
            "Passes over a job: done, refused (by the Kubernetes API), stopped or crashed",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "mainstay_operator_reconcile_seconds",
            "Time of a pass over a job, with all that it does",
            buckets=_PASS_BUCKETS,
            registry=self.registry,
        )
        self.repairs = Counter(
            "mainstay_operator_repairs",
            "Pods lost, by the reason; each is replaced if the job still wants it",
            ["reason"],
            registry=self.registry,
        )
        self.pods_made = Counter("mainstay_operator_pods_made", "Pods made", registry=self.registry)
        self.pods_ended = Counter(
            "mainstay_operator_pods_ended",
            "Pods deleted, or removed by force",
            ["force"],
            registry=self.registry,
        )
        self.kube_requests = Counter(
            "mainstay_operator_kube_requests",
            "Requests to the Kubernetes API, watches left out; code 0: no answer",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.api_requests = Counter(
            "mainstay_operator_api_requests",
            "Requests to the Mainstay api; code 0: no answer",
            ["verb", "code"],
            registry=self.registry,
        )
        self.watch_events = Counter(
            "mainstay_operator_watch_events",
            "What watches have shown",
            ["resource", "type"],
            registry=self.registry,
        )
        self.watch_missed = Counter(
            "mainstay_operator_watch_missed",
            "Resyncs that found what no watch had shown",
            ["resource"],
            registry=self.registry,
        )
        self.recoveries_unread = Counter(
            "mainstay_operator_recoveries_unread",
            "Recoveries that the api shows and this operator cannot read",
            registry=self.registry,
        )
        self._add_gauges()

    def _add_gauges(self) -> None:
        build = Gauge(
            "mainstay_build_info",
            "1: which part of Mainstay this is, and of which version",
            ["name", "version"],
            registry=self.registry,
        )
        build.labels("mainstay-operator", VERSION).set(1)
        self.jobs = Gauge("mainstay_operator_jobs", "Jobs that are kept", registry=self.registry)
        self.resync_age = Gauge(
            "mainstay_operator_resync_age_seconds",
            "Since jobs and nodes were listed with success, or since the start",
            registry=self.registry,
        )
        self.resync_age.set_function(self.resync_age_s)
        self.leader = Gauge(
            "mainstay_operator_leader",
            "1: this replica acts; 0: another one does, or none",
            registry=self.registry,
        )
        self.job_pods = Gauge(
            "mainstay_operator_job_pods",
            "Pods of a job by what is so of them",
            ["job", "namespace", "name", "state"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def note_watched(self, resource: str, kind: str | None) -> None:
        """Count an event of a watch; without a kind, the watch first listed what there is."""
        self.watch_events.labels(resource, kind or "LISTED").inc()
        self.liveness.note_watched(resource)

    def note_missed(self, resource: str) -> None:
        """Count a list that has shown what the watch of the resource has not."""
        self.watch_missed.labels(resource).inc()
        self.liveness.note_missed(resource, time.monotonic())

    def note_answer(self, *, complete: bool) -> None:
        """Note that a resync was answered; with ``complete``, every request of it was."""
        self.liveness.note_answer(time.monotonic(), complete=complete)

    def note_pass(self, result: str, began_s: float) -> None:
        """Count a pass over a job that has ended: done, refused, stopped or crashed."""
        self.reconciles.labels(result).inc()
        self.reconcile_seconds.observe(time.monotonic() - began_s)

    def note_losses(self, losses: Iterable[Loss]) -> None:
        """Count lost pods by cause."""
        for loss in losses:
            self.repairs.labels(loss.cause.value).inc()

    def show_pods(self, job: str, namespace: str, name: str, counts: Mapping[str, int]) -> None:
        """Set how many pods a job has, by state."""
        for state in POD_STATES:
            self.job_pods.labels(job, namespace, name, state).set(counts[state])

    def drop_job(self, job: str, namespace: str, name: str) -> None:
        """Drop the series of a job that is no more."""
        for state in POD_STATES:
            with contextlib.suppress(KeyError):
                self.job_pods.remove(job, namespace, name, state)

    def note_standby(self) -> None:
        """Note that the Kubernetes API has answered while another replica leads.

        A replica that waits lists nothing, so it has missed nothing either.
        """
        self.note_answer(complete=True)

    def resync_age_s(self) -> float:
        """Return the seconds since everything was listed, or since the start."""
        return self.liveness.resync_age_s(time.monotonic())
