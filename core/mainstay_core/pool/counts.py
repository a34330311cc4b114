"""Counts a job's pods of each sort, and names what keeps some of them from starting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mainstay_core.pool.losses import PodDemand
from mainstay_core.pool.observed import ObservedPod
from mainstay_core.pool.repair import Repair

PODS_REFUSED = "PodsRefused"
"""Reason of a condition: the cluster does not admit pods now (a quota, a policy)."""
NOT_AUTHORIZED = "NotAuthorized"
"""Reason of a condition: the operator has no right to make pods there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCounts:
    """The numbers of a job's pods: present and wanted."""

    wanted: int = 0
    ready: int = 0
    pending: int = 0
    leaving: int = 0
    serving: int = 0
    """Pods with a rank."""
    spares_wanted: int = 0

    @property
    def places(self) -> int:
        """Pods that have a rank once all is well."""
        return max(0, self.wanted - self.spares_wanted)

    @property
    def spares_ready(self) -> int:
        """Ready pods without a rank; while nobody has one, those beyond the places."""
        return max(0, self.ready - (self.serving or self.places))


def count_pods(
    pods: Iterable[ObservedPod], demand: PodDemand | None, wanted: int, spares_wanted: int
) -> PodCounts:
    """Return how many pods there are of each sort."""
    living = [p for p in pods if not p.ended]
    leaving = [
        p for p in living if p.terminating or (demand is not None and p.uid in demand.leaving)
    ]
    return PodCounts(
        wanted=wanted,
        ready=sum(p.ready and not p.terminating for p in living),
        pending=sum(not p.ready and not p.terminating for p in living),
        leaving=len(leaving),
        serving=demand.serving if demand is not None else 0,
        spares_wanted=spares_wanted,
    )


def find_problems(
    pods: Iterable[ObservedPod],
    repair: Repair | None,
    refused: tuple[str, str] | None = None,
    taken: str = "",
) -> tuple[tuple[str, str], ...]:
    """Return what keeps pods from starting, one entry per reason, the first pod named.

    Args:
        pods: that exist.
        repair: the newest one.
        refused: reason and message of pods that could not be made lately.
        taken: which names that the job needs belong to objects of others.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for pod in sorted(pods, key=lambda p: p.index):
        if pod.stuck and not pod.terminating:
            code = "ImagePullFailed" if pod.stuck_on_image else "ContainerCannotStart"
            found.setdefault(code, []).append((pod.name, pod.stuck))
        elif pod.unscheduled and not pod.terminating:
            found.setdefault("Unschedulable", []).append((pod.name, pod.unscheduled))
    problems = [(code, _first_of(told)) for code, told in sorted(found.items())]
    if refused is not None:
        problems.insert(0, refused)
    if repair is not None and repair.counts.not_made:
        problems.insert(0, ("ReplacementsExhausted", repair.reason))
    if taken:
        problems.insert(0, ("NameTaken", taken))
    return tuple(problems)


def _first_of(told: list[tuple[str, str]]) -> str:
    name, why = told[0]
    others = f"{len(told)} pods, {name} among them" if len(told) > 1 else f"pod {name}"
    return f"{others}: {why}"[:1024]
