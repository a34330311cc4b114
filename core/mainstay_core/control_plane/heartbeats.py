"""Counts how long each pod has been silent while other pods are heard (protocol section 8).

All times come from one clock, the store's. After an outage of the api, of Redis or of the network
every pod looks expired, but no pod counts as silent.
"""

from __future__ import annotations

from mainstay_core.base.ids import PodUid

MAX_GAP_BEATS = 2.0
"""Bound on a gap between the job's newest heartbeats: it counts as at most so many intervals."""


class HeartbeatLag:
    """Measures how far the pods of one job are behind its newest heartbeat."""

    def __init__(self) -> None:
        self._seen: dict[PodUid, int] = {}
        self._behind_s: dict[str, float] = {}
        self._newest = 0
        self.heard: set[PodUid] = set()
        """Pods that were heard since the call before."""

    def update(self, seen_us: dict[PodUid, int], heartbeat_s: float) -> dict[str, float]:
        """Return for each pod how many seconds it has been silent.

        Args:
            seen_us: when each pod was last heard, in microseconds of one clock.
            heartbeat_s: the interval of heartbeats.
        """
        # Times only go forward: a store that fell back shows older ones.
        self.heard = {pod for pod, at in seen_us.items() if at > self._seen.get(pod, at)}
        newest = max(seen_us.values(), default=0)
        passed_s = (newest - self._newest) / 1e6 if self._newest else 0.0
        passed_s = min(max(passed_s, 0.0), MAX_GAP_BEATS * heartbeat_s)
        behind: dict[str, float] = {
            pod: self._behind_s.get(pod, 0.0) + passed_s if self._seen.get(pod) == at else 0.0
            for pod, at in seen_us.items()
        }
        self._seen, self._behind_s, self._newest = dict(seen_us), behind, newest
        return behind
