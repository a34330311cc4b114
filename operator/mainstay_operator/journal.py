"""What is noted of the operator's own doings: for Prometheus, and for its liveness."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from mainstay_core.pool.losses import Loss
from mainstay_operator.liveness import Pulse, RunningLook
from mainstay_operator.metrics import Metrics


class Journal:
    """Notes what happens, when it happens.

    Args:
        metrics: where it is counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._pulse = Pulse(time.monotonic())
        metrics.show_resync_age(self.resync_age_s)

    def note_watched(self, resource: str, kind: str | None) -> None:
        """A watch has shown something; without a kind, when it first listed what there is."""
        self.metrics.watch_events.labels(resource, kind or "LISTED").inc()
        self._pulse.note_watched(resource)

    def note_missed(self, resource: str) -> None:
        """A list has shown what the watch of the resource has not."""
        self.metrics.watch_missed.labels(resource).inc()
        self._pulse.note_missed(resource, time.monotonic())

    def note_answer(self, *, complete: bool) -> None:
        """A resync was answered; with ``complete``, by everything that was asked for."""
        self._pulse.note_answer(time.monotonic(), complete=complete)

    def note_look(self, result: str, began_s: float) -> None:
        """A look at a job has ended: done, refused or crashed."""
        self.metrics.reconciles.labels(result).inc()
        self.metrics.reconcile_seconds.observe(time.monotonic() - began_s)

    def note_losses(self, losses: Iterable[Loss]) -> None:
        """Pods are no more."""
        for loss in losses:
            self.metrics.repairs.labels(loss.cause.value).inc()

    def show_job(self, job: str, namespace: str, name: str, counts: Mapping[str, int]) -> None:
        """A job has so many pods, by state."""
        self.metrics.show_pods(job, namespace, name, counts)

    def forget_job(self, job: str, namespace: str, name: str) -> None:
        """A job is no more."""
        self.metrics.forget_job(job, namespace, name)

    def resync_age_s(self) -> float:
        """Return how long ago everything was listed, or the start was."""
        return self._pulse.resync_age_s(time.monotonic())

    def find_problem(self, looks: Iterable[RunningLook], *, max_idle_s: float, qps: float) -> str:
        """Return why the operator does not get on; '' if it does."""
        now_s = time.monotonic()
        return self._pulse.find_problem(looks, max_idle_s=max_idle_s, qps=qps, now_s=now_s)
