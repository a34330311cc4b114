"""Defines the coordinator's events (what comes in) and actions (what its shell has to do).

A transition is the outcome of one event: the new state, the actions in the order in which they
become visible, and a reason. These are values: nothing here acts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.base.values import replace
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Fact, Location, PodRegistration
from mainstay_core.wire.ledger import CleanDevice
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.recoveries import Recovery

# Events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRegistered:
    """A pod's supervisor introduced itself, for the first time or again."""

    registration: PodRegistration


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsReported:
    """A supervisor, or the provider, reports facts. They are decided on together."""

    facts: tuple[Fact, ...]
    supervisor: str = ""
    """Name of the supervisor's process that reports them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCommitted:
    """The ledger holds the entries of all stages of a step."""

    step: int
    """Highest complete step, counted from 0."""
    quorum: QuorumId
    """The quorum in which the step was committed."""
    committed_at_s: float
    """Wall clock of the reporters, in seconds."""
    step_s: float = 0.0
    loss: float | None = None
    clean: tuple[CleanDevice, ...] = ()
    """Devices with which a witness has agreed since the step before."""
    approximate_since: int | None = None
    """Version of the first fork that its state contains; None: it is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFired:
    """A supervisor is about to carry out an injected fault, and asks whether it may."""

    fault: str
    pod: PodUid
    slot: int | None
    rank: str | None
    """The rank in the quorum in force, as text."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsRequested:
    """A user wants faults injected into the running job. They are already checked."""

    faults: tuple[FaultPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequested:
    """A user wants the job to stand still without pods, or to go on."""

    suspend: bool
    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """The owner of the job's definition has submitted it again."""

    config: JobConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyReported:
    """The cluster says where the nodes of the job's pods are. This replaces what it said before."""

    nodes: dict[str, Location]
    """The location of each node, by the failure domain in the pods' registrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStored:
    """The store has taken a plan. Only the record of the recovery's times needs this."""

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
    """Numerics fingerprint of a member on the supervisor's pod."""
    fired: tuple[str, ...] = ()
    """Injected faults that the supervisor has carried out."""
    approximate_since: int | None = None
    """Since which step the job is approximate, as the supervisor's newest ledger entry says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReopened:
    """The process of the store is another one than that which took the last decision."""

    server: str
    """Random name of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""

    behind_s: dict[str, float] = field(default_factory=dict)
    """For each pod, how many seconds its last heartbeat lies behind the job's newest one."""
    heard_at_s: dict[str, float] = field(default_factory=dict)
    """For each pod, when it was heard last, by the wall clock of who ticks. Only records of
    recoveries use it: while everything is away, nobody is at fault."""
    heard: tuple[PodUid, ...] = ()
    """Pods heard since the last tick, none of which holds a plan that the store does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """A user wants the job to end."""

    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """A user wants another number of replicas, or of spares. None keeps the number."""

    replicas: int | None = None
    spares: int | None = None
    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A user wants a pod's work handed over, so that the pod can be ended."""

    pod: str
    """UID or name of the pod."""
    who: str = "a user"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximationAllowed:
    """A person allows that stages which nobody holds are made anew from others, this once."""

    who: str
    stages: tuple[int, ...] | None = None
    """None: those that are lost; ahead of a loss, all."""
    after_lost_steps: int | None = None
    """Ahead of a loss: the most steps that are given up rather. None: it is for the recovery that
    the job waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximationWithdrawn:
    """A person takes back what was allowed and is not used yet."""

    who: str


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
    | ApproximationAllowed
    | ApproximationWithdrawn
)


# Actions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """Store the plan, then show it to every supervisor."""

    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRecovery:
    """Store a recovery that is new or has changed. Its quorum is its key."""

    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Add a line to the job's history."""

    code: str
    """What it is about, for programs: CamelCase, the ``reason`` of the history that people read."""
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
    """Send all trainers the faults that the job is given while it runs."""

    faults: tuple[FaultPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFired:
    """Tell all trainers that a fault fires. Other faults wait for it."""

    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Tell every pod to stop: the job is over, or suspended."""

    state: JobPhase
    reason: str


Action = PublishPlan | RecordRecovery | Announce | Inject | AddFaults | AddFired | EndJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The outcome of one event: the new state, the actions, and a reason."""

    state: CoordinatorState
    actions: tuple[Action, ...] = ()
    reason: str = ""
    stale: bool = False
    """Whether all reported facts concern an older quorum. The reporter then needs the current
    plan."""

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
