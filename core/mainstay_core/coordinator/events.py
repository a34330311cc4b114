"""What the coordinator learns, and what it has its shell do.

A transition is the outcome of one event: the new state, actions in the order in
which they become visible, and a reason. Nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Fact, Location, PodRegistration
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.recoveries import Recovery

# Events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRegistered:
    """A pod's supervisor introduced itself, for the first time or again."""

    registration: PodRegistration


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsReported:
    """Facts told together are decided on together: a pod's loss is one plan."""

    facts: tuple[Fact, ...]
    supervisor: str = ""
    """Name of the supervisor's process that tells them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCommitted:
    """The ledger holds the entries of all stages of a step."""

    step: int
    """Highest complete step, counted from 0."""
    quorum: QuorumId
    """In which it was committed."""
    committed_at_s: float
    """Wall clock of the reporters."""
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFired:
    """A supervisor is about to carry out an injected fault, and asks whether it may."""

    fault: str
    pod: PodUid
    slot: int | None
    rank: str | None
    """Rank in the quorum in force, as text."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsRequested:
    """Somebody wants faults injected into the running job; they are checked already."""

    faults: tuple[FaultPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested:
    """Somebody wants the job to stand still, without pods, or to go on."""

    suspend: bool
    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """Whoever owns the job's definition has submitted it again."""

    config: JobConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyReported:
    """Whoever knows the nodes of the job's pods says where they are: all that is known."""

    nodes: dict[str, Location]
    """By failure domain of the pods' registrations: the node's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStored:
    """The store has taken a plan; only for the record of the recovery's times."""

    quorum: QuorumId
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReported:
    """A supervisor holds a plan that the store did not know (protocol section 9)."""

    pod: PodUid
    plan: Plan
    step: int = 0
    """Number of steps that its trainers have committed."""
    fingerprint: dict[str, str] | None = None
    """Numerics fingerprint of a member that lives there."""
    fired: tuple[str, ...] = ()
    """Injected faults that it has carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReopened:
    """The store is another process than the one that took the last decision."""

    server: str
    """Random name of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""

    behind_s: dict[str, float] = field(default_factory=dict)
    """By pod: how far its last heartbeat lies behind the job's newest one."""
    heard: tuple[PodUid, ...] = ()
    """Pods heard since the last tick, none of which holds a plan that the store does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Somebody asked for the end of the job."""

    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """Somebody wants another number of replicas, or of spares; None: as many as before."""

    replicas: int | None = None
    spares: int | None = None
    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Somebody wants a pod's work handed over, so that the pod can be ended."""

    pod: str
    """UID or name."""
    who: str = "a user"


Event = (
    PodRegistered
    | FactsReported
    | StepsCommitted
    | FaultFired
    | FaultsRequested
    | PlanStored
    | PlanReported
    | StoreReopened
    | Tick
    | StopRequested
    | ScaleRequested
    | DrainRequested
    | JobSubmitted
    | SuspendRequested
    | TopologyReported
)


# Actions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """Make the plan durable, then visible to every supervisor."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRecovery:
    """A recovery is new or has changed; its quorum is its key."""

    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """A line in the job's history."""

    reason: str
    """CamelCase, for machines."""
    message: str
    """One sentence, for people."""
    warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject:
    """Have a spare pod carry out an injected fault."""

    fault: FaultPoint
    pod: PodUid


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFaults:
    """Have every pod's trainers know of faults that the job is given while it runs."""

    faults: tuple[FaultPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFired:
    """Have every pod's trainers know that a fault fires: others wait for it."""

    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """The job is over, or suspended: every pod is told to stop."""

    state: JobPhase
    reason: str


Action = PublishPlan | RecordRecovery | Announce | Inject | AddFaults | AddFired | EndJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Outcome of one event."""

    state: CoordinatorState
    actions: tuple[Action, ...] = ()
    reason: str = ""
    stale: bool = False
    """Everything that was told concerns an older quorum: the teller needs the current plan."""

    @property
    def plan(self) -> Plan | None:
        """The plan that this transition publishes, if any."""
        return next((a.plan for a in self.actions if isinstance(a, PublishPlan)), None)

    def then(self, later: Transition) -> Transition:
        """Return this transition followed by ``later``."""
        return replace(
            later,
            actions=(*self.actions, *later.actions),
            reason="; ".join(r for r in (self.reason, later.reason) if r),
            stale=self.stale,
        )
