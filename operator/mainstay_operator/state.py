"""The state that a reconciler keeps between its passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.losses import PodDemand
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.repair import Repair
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.facts import Location
from mainstay_core.wire.page import JobPage
from mainstay_operator.ownership import TakenName
from mainstay_operator.resources import ObjectNames
from mainstay_operator.status import PodRecord

BUSY_S = 1.0
"""An api that wants to be asked less, and does not say how much less, is left alone for so long."""


@dataclass(slots=True)
class ReconcilerState:
    """A reconciler's memory between two passes. All of it can be found out again."""

    record: PodRecord
    memory: PoolMemory
    """What is remembered of pods between two passes."""
    demand: PodDemand | None = None
    demand_at_s: float = 0.0
    known: set[PodUid] = field(default_factory=set)
    """Pods that the api has ever taken for living; of those that ran before this operator came it
    is assumed."""
    page: JobPage | None = None
    """What the api said of the job last."""
    page_at_s: float = 0.0
    api_problem: str = "the api has not been asked yet"
    api_failure: Failure = Failure.UNREACHED
    """The kind of that problem; it says nothing while there is none."""
    ask_at_s: float = 0.0
    """The api is not asked before: it wants to be asked less."""
    submitted: int = -1
    """Generation that the api was given last."""
    sized: int = -1
    """Generation of which the sizes of ranks were told last."""
    refused: str = ""
    """Why the api did not take the job as it is now, or why it was not given to it."""
    tried: tuple[Any, ...] | None = None
    """What a pod was last made of on trial."""
    tried_at_s: float = 0.0
    template_problem: str = ""
    """Why no pod can be made of it."""
    unknown_since_s: float = 0.0
    names: ObjectNames | None = None
    """Names of what the job has beside its pods; None until it was looked."""
    objects_at_s: float = -math.inf
    objects_for: int = -1
    """Generation of the job for which they were kept last."""
    taken_names: tuple[TakenName, ...] = ()
    """Names of what pods need beside them that others have."""
    taken_budget: tuple[TakenName, ...] = ()
    """The name of the PodDisruptionBudget, if others have it."""
    min_available: int = -1
    reported_budget: int = -1
    taken: set[int] = field(default_factory=set)
    """Indexes whose names belong to pods of somebody else."""
    repair: Repair | None = None
    make_problem: tuple[str, str] | None = None
    """Why pods could not be made lately: a condition's reason and message."""
    make_failures: int = 0
    make_at_s: float = 0.0
    """No pod is made before."""
    action_problems: frozenset[tuple[int, str]] = frozenset()
    """Status and code of what the Kubernetes API has refused since pods were last as they should
    be, or could be made so."""
    status: Mapping[str, Any] = field(default_factory=dict)
    status_at_s: float = 0.0
    recoveries_reported: int = -1
    num_unread: int = 0
    """Recoveries that cannot be read, as far as they were told of."""
    resync_at_s: float = 0.0
    reported_ends: dict[tuple[PodUid, str], int] = field(default_factory=dict)
    """Restarts by pod and container that were told as Events."""
    topology: dict[str, Location] = field(default_factory=dict)
    """Locations of nodes that the api was told."""
    topology_at_s: float = 0.0
    told: set[tuple[str, str]] = field(default_factory=set)
    """Reason and key of what was told of recoveries and crashes."""
    deadline: str = ""

    def note_api_error(self, error: ApiError, now_s: float) -> None:
        """Remember why the api says nothing now, or that it wants to be asked less.

        An api that asks for fewer requests is no api that is away: what it said last holds.
        """
        if error.is_busy:
            self.ask_at_s = now_s + max(BUSY_S, error.retry_after_s)
        else:
            self.api_problem, self.api_failure = str(error), error.failure
