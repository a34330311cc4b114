"""What surrounds a decision of an api replica: requests, refusals, silence, what gets visible.

As ``mainstay_api.service`` and ``mainstay_api.ticker``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mainstay_core.coordinator_events import EndJob, PublishPlan, Transition
from mainstay_core.errors import MainstayError
from mainstay_core.ids import QuorumId
from mainstay_core.jobstate import CoordinatorState, uid_of
from mainstay_core.messages import LedgerEntry, Plan
from mainstay_core.restoring import StoreBehindError, is_behind
from mainstay_core.sim.store import Change

MAX_GAP_BEATS = 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """What a supervisor or the provider asks."""

    route: str
    body: Any
    held: QuorumId | None = None
    """Of the newest plan that the asker holds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer: a status, and a plan where there is one."""

    status: int
    plan: Plan | None = None
    error: str = ""
    body: Any = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job's state, the version that a change of it must name, and who stores it."""

    version: int
    state: CoordinatorState
    server: str


class UnknownJobError(MainstayError):
    """The store has no such job (any more)."""


class Silence:
    """How far the pods are behind the job's newest heartbeat (``mainstay_api.ticker``)."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._behind_s: dict[str, float] = {}
        self._newest_s = 0.0
        self.heard: set[str] = set()
        """Pods that were heard since the look before."""

    def update(self, seen_s: dict[str, float], heartbeat_s: float) -> dict[str, float]:
        """Return the silence of each pod in seconds, after another look."""
        self.heard = {pod for pod, at_s in seen_s.items() if at_s > self._seen.get(pod, at_s)}
        newest_s = max(seen_s.values(), default=0.0)
        passed_s = newest_s - self._newest_s if self._newest_s else 0.0
        passed_s = min(max(passed_s, 0.0), MAX_GAP_BEATS * heartbeat_s)
        self._behind_s = {
            pod: self._behind_s.get(pod, 0.0) + passed_s if self._seen.get(pod) == at_s else 0.0
            for pod, at_s in seen_s.items()
        }
        self._seen, self._newest_s = dict(seen_s), newest_s
        return self._behind_s


def refuse_behind(state: CoordinatorState, held: QuorumId | None) -> None:
    """Let nobody tell anything to a store that does not know the plan he holds.

    Raises:
        StoreBehindError: it does not.
    """
    if is_behind(state, held):
        raise StoreBehindError(f"you hold {held}")


def same_commit(old: LedgerEntry, new: LedgerEntry) -> bool:
    """Return whether two members tell of the same commit."""
    return (old.quorum, old.masters) == (new.quorum, new.masters)


def change_of(before: CoordinatorState, outcome: Transition) -> Change:
    """Return what a transition makes visible (``mainstay_api.service.change_of``)."""
    was_gone = {uid_of(p) for p in before.pods if p.gone}
    was_there = {uid_of(p) for p in before.pods} - was_gone
    is_gone = {uid_of(p) for p in outcome.state.pods if p.gone}
    is_there = {uid_of(p) for p in outcome.state.pods} - is_gone
    items: list[tuple[str, object]] = []
    for action in outcome.actions:
        if isinstance(action, PublishPlan):
            items.append(("plan", action.plan))
        elif isinstance(action, EndJob):
            items.append(("stop", action.state))
    return Change(
        state=outcome.state,
        plan=outcome.plan,
        items=tuple(items),
        arrived=tuple(sorted(is_there - was_there)),
        gone=tuple(sorted(is_gone - was_gone)),
    )
