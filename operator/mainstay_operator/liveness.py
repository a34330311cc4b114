"""Decides whether the operator is alive, from what it has heard and done, and when.

Times are arguments. The operator is not alive when a restart may help: a pass over a job does
not end, the Kubernetes API answers nothing, or a watch does not show what a list shows. An api
or a Redis that is away is no reason, nor is one job that is refused again and again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPass:
    """A pass of a job's reconciler that has not ended."""

    job: str
    """Namespace and name."""
    since_s: float
    num_pods: int = 0


class Liveness:
    """Remembers when the operator last heard of the Kubernetes API, and finds what hangs.

    Args:
        now_s: monotonic clock of the start.
    """

    def __init__(self, now_s: float) -> None:
        self._answered_at_s = now_s
        self._resynced_at_s = now_s
        self._blind: dict[str, float] = {}

    def note_watched(self, resource: str) -> None:
        """A watch has shown something."""
        self._blind.pop(resource, None)

    def note_missed(self, resource: str, now_s: float) -> None:
        """A list has shown what the resource's watch has not."""
        self._blind.setdefault(resource, now_s)

    def note_answer(self, now_s: float, *, complete: bool) -> None:
        """A resync was answered; with ``complete``, by everything that was asked for."""
        self._answered_at_s = now_s
        if complete:
            self._resynced_at_s = now_s

    def resync_age_s(self, now_s: float) -> float:
        """Return how long ago everything was listed, or the start was."""
        return now_s - self._resynced_at_s

    def find_problem(
        self, passes: Iterable[RunningPass], *, max_idle_s: float, qps: float, now_s: float
    ) -> str:
        """Return why the operator is not alive; '' if it is.

        Args:
            passes: those under way.
            max_idle_s: what is given to each thing before it is a problem.
            qps: requests per second; a job of many pods is given what they take as well.
            now_s: monotonic clock.
        """
        silent_s = now_s - self._answered_at_s
        if silent_s > max_idle_s:
            return f"the Kubernetes API has answered no resync for {silent_s:.0f} s"
        for resource, since_s in sorted(self._blind.items()):
            if now_s - since_s > max_idle_s:
                return (
                    f"the watch of {resource} has shown nothing for {now_s - since_s:.0f} s, "
                    "though there was something to show"
                )
        for running in passes:
            lasts_s = now_s - running.since_s
            if lasts_s > max_idle_s + 2 * running.num_pods / qps:
                return f"a pass over {running.job} has not ended for {lasts_s:.0f} s"
        return ""
