"""Holds everything that the coordinator knows of one job: one frozen value, and questions to it.

The store compares and sets this state. Whatever can be derived from it is a function here, never a
second copy that may disagree. For example, the lost members are those of the plan whose trainers do
not live. So a repeated or late fact cannot cause a second recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.base.lookup import Lookup
from mainstay_core.base.names import natural
from mainstay_core.base.shape import JobShape
from mainstay_core.base.values import replace
from mainstay_core.coordinator.causes import RepeatedCrash, Repetition, Suspicion
from mainstay_core.coordinator.ladder import Lack
from mainstay_core.dmr.settings import CheckRules, StageChecks
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import TERMINAL, JobPhase
from mainstay_core.reinitialisation.guards import GuardingCell
from mainstay_core.wire.crashes import ToldCrash
from mainstay_core.wire.facts import Location, PodRegistration
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.recoveries import Recovery
from mainstay_core.wire.reinitialisation import (
    History,
    Outline,
    Permission,
    RefusedState,
    ToldHistory,
)
from mainstay_core.wire.taints import Taint

MAX_ENDED = 8
"""Ended incarnations remembered per slot. A late report of one of them must not revive it."""
COMMITS_THAT_SETTLE = 3
"""Commits after which every member counts as settled. A commit proves it, as it needs every
member's vote; but only the members' own reports carry the times, so these get that long to come."""
MAX_STEP_SECONDS = 33
"""Recent step durations kept for the median that a recovery is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """A pod that registered."""

    registration: PodRegistration
    gone: bool = False
    """Whether the pod is surely gone. It has to register again before anything it says counts."""
    why: str = ""
    gone_at_s: float = 0.0
    """When it went, as far as anybody saw or heard of it."""
    silent_since_s: float = 0.0
    """When it was heard last, once it has missed heartbeats; 0: it is heard."""
    leaving: str = ""
    """Why the pod will end; empty if it stays. A leaving pod works on, gets no new place, and stays
    leaving."""
    leaving_at_s: float = 0.0
    """When the coordinator noted that."""
    leave_by_s: float = 0.0
    """When the pod ends at the latest; 0: no limit."""
    leave_waits: str = ""
    """Why its work cannot be handed over yet."""
    placeholder: bool = False
    """Whether only a recovered plan tells of the pod: its supervisor has not registered since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """One accelerator and the trainer that lives on it.

    Invariant: ``incarnation`` is not in ``ended``.
    """

    slot: Slot
    incarnation: Incarnation | None = None
    ended: tuple[Incarnation, ...] = ()
    down_at_s: float = 0.0
    """Wall clock of the reporter at the last end."""
    learnt_down_s: float = 0.0
    """When the coordinator noted the last end."""
    restarting: bool = False
    """Whether its launcher forks another trainer."""
    handed_over: bool = False
    """Whether the last trainer ended in good order, after its work was handed over."""
    failures: int = 0
    """Ends without a commit in between."""
    held_until_s: float = 0.0
    """Until when it gets no place: it was excluded on suspicion, or ended again and again."""
    stage: int | None = None
    """Stage that it served last. It is the first choice for a place there."""
    inner: int = 0
    """Inner rank that it served last."""
    why: str = ""
    """Evidence of the last end."""
    refused: str = ""
    """Why it can never be used; empty if it can."""
    clean_from: int | None = field(default=None, metadata=OMITTED)
    """First step in which no witness has agreed with its device yet, as its trainers told last."""
    witnessed_at: int | None = field(default=None, metadata=OMITTED)
    """Newest step in which a witness has agreed with its device; None: none is known."""
    accelerator: str = field(default="", metadata=OMITTED)
    """UUID of the accelerator, as its trainer said last; empty: it has none that tells one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainState:
    """Ends in a row, without a commit, on one failure domain.

    It is a pod where no domain is known.
    """

    failures: int
    last_s: float
    """When the last end was noted. Ends at the same moment count once."""
    held_until_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The condition and the deadline of a job that waits: row 6 of the ladder."""

    reason: str
    since_s: float
    deadline_s: float
    lack: Lack | None = None
    """The same as values; None where an api of the version before has stored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTeller:
    """The trainer that told of a checkpoint's problem, and how far it was: the same is no news."""

    slot: Slot
    incarnation: Incarnation
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FiredFault:
    """An injected fault that was carried out."""

    fault: str
    pod: PodUid
    slot: int | None
    rank: str | None
    """The rank in the quorum in force, as text."""
    at_s: float
    step: int = 0
    """Number of committed steps at that time."""
    matched: bool = False
    """Whether a recovery has taken its death time from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCommit:
    """The newest commit that the ledger has shown."""

    step: int
    quorum_id: int
    at_s: float
    """Wall clock of its reporters."""
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The training that was done since the first plan, or since the last suspension."""

    steps: int = 0
    """Steps that were committed for the first time."""
    useful_s: float = 0.0
    """Seconds that these steps took, each counted as a median step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRecovery:
    """A recovery whose five times are not all known. All times are wall clock, in seconds."""

    recovery: Recovery
    died_at_s: float
    first_fact_s: float
    durable_s: float
    """When the plan was stored."""
    fence_end_s: float | None = None
    """When the last survivor held all settle reports."""
    load_end_s: float | None = None
    """When the last survivor went on."""
    commit_at_s: float | None = None
    """The first commit of a step in its quorum or a later one."""
    reached: int | None = None
    """Newest version that a member of its settle held; None while nobody has told of one."""
    loads: bool | None = None
    """Of a fork: whether its members went on from a checkpoint after all; None: nobody has said."""
    settled_how: str = ""
    """Of a replay: how its members came to the version at which they go on, as they tell."""
    late_s: float | None = None
    """How much later that commit came than a step after the commit before it; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """Everything on which the coordinator's decisions depend.

    Invariants (checked by :func:`check_invariants`): a slot is in the plan at most once; each place
    of a chain has one member; every shard type has one supplier, which is a whole chain;
    ``last_id`` is the largest quorum id used.
    """

    config: JobConfig
    phase: JobPhase = JobPhase.FORMING
    created_at_s: float
    started_at_s: float = 0.0
    """When the first plan since the start, or the last suspension, was made. After the store was
    recovered, when the first step since then began. 0: not yet."""
    progress: Progress = Progress()
    last_commit: LastCommit | None = None
    """None before the first one since then."""
    approximate_since: int | None = None
    """First step of another course than the job would have had without failures; None: the newest
    state is exact."""
    num_forks: int = 0
    """Forks that the newest state contains."""
    history: History = ()
    """Those of them that are known in full, in order: the newest ones, after the store was lost or
    the job was taken over from an earlier run."""
    told_history: ToldHistory | None = None
    """What the first member of the plan has told of it; None: that all is exact, if it has told."""
    is_history_told: bool = False
    """Whether it has: that it has settled is known without its word where it pauses or commits."""
    permission: Permission | None = None
    """A person's permission for the recovery that the job waits for, or is in."""
    ahead: Permission | None = field(default=None, metadata=OMITTED)
    """One that is given ahead of a loss. The plan that uses it makes it that of its recovery."""
    refused_states: tuple[RefusedState, ...] = field(default=(), metadata=OMITTED)
    """States that came back after a fork and do not count, the newest last."""
    furthest: int = 0
    """Largest number of steps that were ever committed. A restart does not lower it."""
    last_id: int = 0
    restarted_id: int = 0
    """Quorum of the last restart: commits of older quorums don't count any more."""
    plan: Plan | None = None
    forming_since_s: float = 0.0
    """When the job began to form again after a suspension; 0: never."""
    suspend: bool = False
    """Whether a user wants the job to stand still, without pods."""
    paused: tuple[int, ...] = ()
    """Members of a pausing plan that have reported that they pause."""
    scaled_to: int | None = None
    """Replicas that a user asked for in the running job."""
    pods: tuple[PodState, ...] = ()
    """In natural order of their names."""
    slots: tuple[SlotState, ...] = ()
    """In order of (pod, index)."""
    domains: dict[str, DomainState] = field(default_factory=dict)
    """By failure domain: where trainers end again and again."""
    topology: dict[str, Location] = field(default_factory=dict)
    """Locations of nodes, by the failure domain in their pods' registrations."""
    fingerprint: dict[str, str] | None = None
    """Numerics fingerprint of the first plan's members; fixed from then on."""
    fingerprints: dict[str, dict[str, str]] = field(default_factory=dict)
    """Fingerprint by slot, as its living trainer reported it."""
    outline: Outline = ()
    """The blocks of every stage, as trainers told; empty if the job may not go on approximately."""
    guards: tuple[GuardingCell, ...] = field(default=(), metadata=OMITTED)
    """Who had copies of what ends of the pipeline alone have, when a quorum committed first."""
    adopted_at_s: dict[int, float] = field(default_factory=dict)
    """Member index to when it held all settle reports of the current plan."""
    settled_at_s: dict[int, float] = field(default_factory=dict)
    """Member index to when it went on in the current plan."""
    settled_step: int | None = None
    """Step at which the current plan settled."""
    commits: int = 0
    """Steps committed in the current plan's quorum."""
    step: int = 0
    """Number of committed steps."""
    durable: int = 0
    """Newest version that any pod reported as durable."""
    checks: tuple[StageChecks, ...] = field(default=(), metadata=OMITTED)
    """The checks of each stage that was planned, as its trainers told last; by stage."""
    checkpoint_problem: str = ""
    """Why the last checkpoint is late or failed; empty since one became durable."""
    checkpoint_teller: CheckpointTeller | None = None
    """Who told that, and when: what is told again is announced once."""
    step_seconds: tuple[float, ...] = ()
    waiting: Waiting | None = None
    suspicion: Suspicion | None = None
    unreached: bool = field(default=False, metadata=OMITTED)
    """Whether members have told since the last commit that no store brings back what is lost."""
    silent: tuple[Incarnation, ...] = field(default=(), metadata=OMITTED)
    """Trainers that alone had some state when they fell silent, in a plan whose members ask."""
    asked: int = field(default=0, metadata=OMITTED)
    """Times since the last commit that members met again as not all was known of pods' stores."""
    suspected_before: tuple[Slot, ...] = ()
    """Suspects of the re-forms since the last commit."""
    reforms: int = 0
    """Re-forms since the last commit."""
    repetitions: tuple[Repetition, ...] = ()
    """Causes for which quorums ended and that are not mended yet, the newest last."""
    recoveries: tuple[OpenRecovery, ...] = ()
    checks_at_start: CheckRules | None = field(default=None, metadata=OMITTED)
    """What was checked before that changed for the first time, for plans of older releases: these
    did not say what is checked before it changed. None: it has never changed."""
    taints: tuple[Taint, ...] = field(default=(), metadata=OMITTED)
    """Steps of devices that were named as wrong each time, in the order in which they were."""
    finals: tuple[FinalDigests, ...] = ()
    """Final digests of each position, from the first member that finished."""
    finished: tuple[Incarnation, ...] = ()
    fired: tuple[FiredFault, ...] = ()
    missed: tuple[tuple[str, str], ...] = field(default=(), metadata=OMITTED)
    """Injected flips of which nothing came that they name, each with what came in its place."""
    injected: tuple[str, ...] = ()
    """Faults on spares that were handed to their pod."""
    crashes: tuple[RepeatedCrash, ...] = ()
    """Exceptions at steps that are not committed yet, the newest last."""
    crash: ToldCrash | None = None
    """The newest exception that ended a trainer's program."""
    outcome: str = ""
    """Why the job ended, or has to end now."""
    server: str = ""
    """Name of the store's process that took the last decision."""
    restored: str = ""
    """The last quorum that was recovered from a supervisor's plan, as text."""
    restored_at_s: float = 0.0
    """When that was, the store was started again, or the job resumed: pods register again."""
    may_have_forgotten: bool = field(default=False, metadata=OMITTED)
    """Whether the store was ever recovered or started again: what pods had told may be missing."""
    rivals: tuple[str, ...] = ()
    """Nonces of quorums with the plan's id that supervisors hold beside it."""
    unheard: tuple[PodUid, ...] = ()
    """Pods that may hold a newer plan. No plan is made before they are heard or clearly silent."""

    @staticmethod
    def modernized(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON of a state as it is now, whatever the api that stored it."""
        if data.get("restored"):  # a version before did not say that something may be forgotten
            data = {**data, "may_have_forgotten": True}
        if "furthest" in data:
            return data
        # The version before kept the step of the start, and derived the rest from it.
        step = data.get("step", 0)
        steps = max(0, step - data.get("started_step", 0))
        progress = {"steps": steps, "useful_s": steps * median(data.get("step_seconds", ()))}
        return {**data, "furthest": step, "progress": progress}

    @property
    def shape(self) -> JobShape:
        """Degrees of the job."""
        return self.config.shape

    @property
    def wanted(self) -> int:
        """Replicas wanted now. Invariant: min_replicas <= wanted <= lanes."""
        return self.shape.replicas if self.scaled_to is None else self.scaled_to

    @property
    def wanted_checks(self) -> CheckRules:
        """What the next plan says of checks."""
        return self.config.checks

    @property
    def checks_in_force(self) -> CheckRules:
        """What is checked now: a change counts from the plan on that tells it."""
        told = self.plan.checks if self.plan is not None else self.config.checks
        return told or self.checks_at_start or self.config.checks

    @property
    def in_force(self) -> Plan | None:
        """The plan that trainers follow; None while there are none to follow it."""
        return None if self.phase in (JobPhase.FORMING, JobPhase.SUSPENDED) else self.plan

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.phase in TERMINAL

    def pod(self, uid: PodUid) -> PodState | None:
        """Return a registered pod."""
        return _by_uid(self.pods).get(uid)

    def slot(self, slot: Slot) -> SlotState | None:
        """Return a slot of a registered pod."""
        return _by_slot(self.slots).get(slot)


def pods_moved(
    before: CoordinatorState, after: CoordinatorState
) -> tuple[tuple[PodUid, ...], tuple[PodUid, ...]]:
    """Return the pods that have come since ``before``, and those that went, sorted."""
    if before.pods is after.pods:
        return (), ()
    was, now = ({uid_of(p): p.gone for p in state.pods} for state in (before, after))
    came = sorted(pod for pod, gone in now.items() if not gone and was.get(pod, True))
    went = sorted(pod for pod, gone in now.items() if gone and not was.get(pod, False))
    return tuple(came), tuple(went)


def with_pod(state: CoordinatorState, pod: PodState) -> CoordinatorState:
    """Return the state with ``pod`` added or replaced, in order."""
    others = [p for p in state.pods if uid_of(p) != uid_of(pod)]
    ordered = sorted([*others, pod], key=lambda p: (natural(p.registration.name), uid_of(p)))
    return replace(state, pods=tuple(ordered))


def uid_of(pod: PodState) -> PodUid:
    """Return the pod's UID."""
    return pod.registration.pod


def with_slot(state: CoordinatorState, slot: SlotState) -> CoordinatorState:
    """Return the state with ``slot`` added or replaced, in order."""
    return with_slots(state, [slot])


def with_slots(state: CoordinatorState, slots: Iterable[SlotState]) -> CoordinatorState:
    """Return the state with each of ``slots`` added or replaced, in order."""
    changed = {s.slot: s for s in slots}
    if not changed:
        return state
    kept = [changed.pop(s.slot, s) for s in state.slots]
    if changed:
        kept = sorted([*kept, *changed.values()], key=lambda s: (s.slot.pod, s.slot.index))
    return replace(state, slots=tuple(kept))


_by_uid: Lookup[PodUid, PodState] = Lookup(uid_of)
_by_slot: Lookup[Slot, SlotState] = Lookup(lambda s: s.slot)


def is_living(state: CoordinatorState, member: Member) -> bool:
    """Return whether this life of the member's trainer goes on, as far as the coordinator knows."""
    return _lives(_by_uid(state.pods), _by_slot(state.slots), member)


def _lives(
    pods: Mapping[PodUid, PodState], slots: Mapping[Slot, SlotState], member: Member
) -> bool:
    pod, slot = pods.get(member.slot.pod), slots.get(member.slot)
    is_there = pod is not None and not pod.gone
    return is_there and slot is not None and slot.incarnation == member.incarnation


def is_gone(state: CoordinatorState, uid: PodUid) -> bool:
    """Return whether a registered pod is surely gone."""
    pod = state.pod(uid)
    return pod is not None and pod.gone


def is_leaving(state: CoordinatorState, uid: PodUid) -> bool:
    """Return whether a pod will end and its work is to be handed over."""
    pod = state.pod(uid)
    return pod is not None and bool(pod.leaving)


def has_members(state: CoordinatorState, uid: PodUid) -> bool:
    """Return whether a pod serves in the newest plan."""
    return state.plan is not None and any(m.slot.pod == uid for m in state.plan.members)


def has_left(state: CoordinatorState, uid: PodUid) -> bool:
    """Return whether a leaving pod may end, as its work is handed over."""
    return is_leaving(state, uid) and not has_members(state, uid)


def lost_members(state: CoordinatorState) -> tuple[Member, ...]:
    """Return the members of the plan that are surely gone, in index order."""
    if state.plan is None:
        return ()
    pods, slots = _by_uid(state.pods), _by_slot(state.slots)
    return tuple(m for m in state.plan.members if not _lives(pods, slots, m))


def holds_state(state: CoordinatorState, member: Member) -> bool:
    """Return whether a living member holds its stage's state, or can have it at once."""
    return is_living(state, member) and not still_joining(state, member)


def still_joining(state: CoordinatorState, member: Member) -> bool:
    """Return whether a member has not received its state yet."""
    return member.joining and member.index not in state.settled_at_s


def all_settled(state: CoordinatorState) -> bool:
    """Return whether every member of the plan goes on in it."""
    return state.plan is not None and len(state.settled_at_s) == len(state.plan.members)


def median(values: Iterable[float]) -> float:
    """Return the lower median; 0 for no values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0
