"""What surrounds a decision of an api replica: requests, answers, what gets visible.

As ``mainstay_api.transactions``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import QuorumId
from mainstay_core.coordinator.events import EndJob, PublishPlan, Transition
from mainstay_core.coordinator.state import CoordinatorState, pods_moved
from mainstay_core.sim.store import Change
from mainstay_core.wire.plan import Plan


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

    revision: int
    state: CoordinatorState
    server: str


class UnknownJobError(MainstayError):
    """The store has no such job (any more)."""


def change_of(before: CoordinatorState, outcome: Transition) -> Change:
    """Return what a transition makes visible (``mainstay_api.transactions.change_of``)."""
    arrived, gone = pods_moved(before, outcome.state)
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
        arrived=arrived,
        gone=gone,
    )
