"""Conditions and state of a job, as people see them in a cluster.

Conditions are for programs and people, never for control flow: each is derived
from what the api says and what is seen of the pods, anew at every pass. All are
there from the beginning, Unknown until something is known. What the api has not
said lately is Unknown again: an old value would claim too much.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mainstay_core.job.phase import TERMINAL
from mainstay_core.pool.counts import PodCounts
from mainstay_core.wire.plan import Method
from mainstay_core.wire.reinitialisation import REINITIALISED, describe_course

INVALID_SPEC = "InvalidSpec"
"""For programs: the job has never begun, since its specification cannot be used."""


class ConditionType(enum.StrEnum):
    """The types of a job's conditions, in the order of the status."""

    INITIALIZED = "Initialized"
    """The job is known to the api and its objects are made."""
    READY = "Ready"
    """It trains."""
    DEGRADED = "Degraded"
    """It runs with less than was asked for, or something keeps it from getting it."""
    RECOVERING = "Recovering"
    PROTECTED = "Protected"
    """The next fault costs no step: every stage has another living cell."""
    EXACT = "Exact"
    """It is what it would have been without failures: no stage was made anew from others, and no
    device was named as wrong in steps that count."""
    SPARES_AVAILABLE = "SparesAvailable"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class State(enum.StrEnum):
    """The state of a job in one word, for a column of ``kubectl get``."""

    PENDING = "Pending"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    WAITING = "Waiting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition; times are added by :func:`with_times`."""

    type: ConditionType
    status: bool | None
    """None: unknown."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """The api's short summary of a job."""

    state: str
    """A ``JobPhase``, as text."""
    reason: str = ""
    steps: int = 0
    replicas: int = 0
    replicas_wanted: int = 0
    recovering: tuple[str, ...] = ()
    """Faults whose recovery goes on, in one sentence each."""
    method: Method | None = None
    """Of the first of them."""
    checkpoint_problem: str = ""
    durable: int = 0
    snapshots: bool = False
    """Whether its state is kept in the memory of pods."""
    approximate_since: int | None = None
    """First step of another course than without failures; None: it is exact."""
    tainted: str = ""
    """Which of its steps a device may have computed wrongly; empty: none that is known of."""
    made_anew: str = ""
    """How the newest stage was made anew from others."""
    coverage: str = ""
    """Which losses that memory survives, in one sentence; empty while nobody has told."""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """A job as its conditions see it: everything on which they depend."""

    initialized: bool = False
    invalid: str = ""
    """Why the specification cannot be used; the job has never begun."""
    refused: str = ""
    """Why the newest change of the specification was not taken."""
    api_problem: str = ""
    """Why the api has not said anything lately; empty if it has."""
    is_api_understood: bool = True
    """False if the problem is that its answer cannot be read."""
    summary: JobSummary | None = None
    """The newest that the api said; None before the first time."""
    pods: PodCounts = field(default_factory=PodCounts)
    suspend: bool = False
    suspended: bool = False
    """Nobody computes, and no pod is needed."""
    problems: tuple[tuple[str, str], ...] = ()
    """(reason, message) of what keeps pods from starting."""
    deadline: str = ""
    """Why the job's time is over; empty if it is not."""
    before: tuple[State, str] | None = None
    """State and reason that were shown last, by an operator before this one perhaps."""


def derive_state(seen: ObservedJob) -> tuple[State, str]:
    """Return the state in one word, and the reason in one sentence."""
    summary = seen.summary
    if seen.invalid:
        return State.FAILED, seen.invalid
    if seen.deadline and (summary is None or summary.state != "complete"):
        return State.FAILED, seen.deadline
    if summary is None:
        state, why = seen.before or (State.PENDING, "")
        if state in (State.COMPLETE, State.FAILED):
            return state, why
        return state, seen.api_problem or "the job is not known to the api yet"
    if summary.state == "complete":
        return State.COMPLETE, summary.reason or f"all {summary.steps} steps are committed"
    if summary.over:
        return State.FAILED, summary.reason or "it was stopped"
    if seen.suspended:
        return State.SUSPENDED, summary.reason or "spec.suspend is true"
    state = {
        "forming": State.PENDING,
        "running": State.RECOVERING if summary.recovering else State.RUNNING,
        "recovering": State.RECOVERING,
        "waiting": State.WAITING,
    }.get(summary.state, State.PENDING)
    if state is State.PENDING and not summary.reason:
        return state, _waits_for_pods(seen)
    return state, summary.reason or next(iter(summary.recovering), "")


def _waits_for_pods(seen: ObservedJob) -> str:
    problem = f": {seen.problems[0][1]}" if seen.problems else ""
    return f"pods ready: {seen.pods.ready} of {seen.pods.wanted}{problem}"


def derive_conditions(seen: ObservedJob) -> tuple[Condition, ...]:
    """Return every condition of the job, in the order of the types."""
    return (
        _initialized(seen),
        _ready(seen),
        _degraded(seen),
        _recovering(seen),
        _protected(seen),
        _exact(seen),
        _spares(seen),
        _suspended(seen),
        *_ends(seen),
    )


def with_times(
    conditions: Iterable[Condition],
    old: Iterable[Mapping[str, object]],
    generation: int,
    now: str,
) -> list[dict[str, object]]:
    """Return conditions as Kubernetes writes them; a time changes with the status alone."""
    before = {c.get("type"): c for c in old}
    shown = []
    for condition in conditions:
        status = {True: "True", False: "False", None: "Unknown"}[condition.status]
        was = before.get(condition.type.value, {})
        since = was.get("lastTransitionTime") if was.get("status") == status else None
        shown.append(
            {
                "type": condition.type.value,
                "status": status,
                "reason": condition.reason,
                "message": condition.message[:1024],
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
            }
        )
    return shown


def code_of(told: Mapping[str, object]) -> str:
    """Return the word for programs that Kubernetes calls the reason of a condition or a state."""
    return str(told.get("reason") or "")


def _initialized(seen: ObservedJob) -> Condition:
    kind = ConditionType.INITIALIZED
    if seen.invalid:
        return Condition(type=kind, status=False, reason=INVALID_SPEC, message=seen.invalid)
    if seen.initialized:
        return Condition(
            type=kind, status=True, reason="ObjectsMade", message="the job is known to the api"
        )
    if seen.api_problem and seen.before and seen.before[0] is not State.PENDING:
        return _api_problem(seen, kind)
    why = seen.api_problem or "objects are being made"
    return Condition(type=kind, status=False, reason="Starting", message=why)


def _not_started(seen: ObservedJob, kind: ConditionType) -> Condition | None:
    """Of a job whose specification cannot be used, what is false since nothing of it runs."""
    if not seen.invalid:
        return None
    message = "nothing of the job runs: its specification is refused"
    return Condition(type=kind, status=False, reason="NotStarted", message=message)


def _unknown(seen: ObservedJob, kind: ConditionType) -> Condition | None:
    """Unknown while the api does not answer; an end stays known for ever."""
    if seen.summary is not None and seen.summary.over:
        return None
    if seen.api_problem:
        return _api_problem(seen, kind)
    if seen.summary is None:
        return Condition(type=kind, status=None, reason="Starting", message="nothing is known yet")
    return None


def _api_problem(seen: ObservedJob, kind: ConditionType) -> Condition:
    reason = "ApiUnreachable" if seen.is_api_understood else "ApiNotUnderstood"
    return Condition(type=kind, status=None, reason=reason, message=seen.api_problem)


def _ready(seen: ObservedJob) -> Condition:
    kind = ConditionType.READY
    if seen.invalid:
        return Condition(type=kind, status=False, reason=INVALID_SPEC, message=seen.invalid)
    unknown = _unknown(seen, kind)
    if unknown is not None:
        return unknown
    summary = seen.summary
    assert summary is not None
    if summary.state == "running" and summary.replicas:
        message = f"replicas that train: {summary.replicas} of {summary.replicas_wanted}"
        return Condition(type=kind, status=True, reason="Training", message=message)
    reason = {
        "forming": "WaitingForPods",
        "recovering": "Recovering",
        "waiting": "Waiting",
        "suspended": "Suspended",
        "complete": "Complete",
    }.get(summary.state, "Ended" if summary.over else "NotTraining")
    state, why = derive_state(seen)
    return Condition(type=kind, status=False, reason=reason, message=why or f"it is {state}")


def _degraded(seen: ObservedJob) -> Condition:
    kind = ConditionType.DEGRADED
    summary = seen.summary
    over = summary is not None and summary.over
    not_started = _not_started(seen, kind)
    if not_started is not None:
        return not_started
    if seen.problems and not over:
        reason, message = seen.problems[0]
        return Condition(type=kind, status=True, reason=reason, message=message)
    if seen.refused and not over:
        return Condition(type=kind, status=True, reason="ChangeRefused", message=seen.refused)
    unknown = _unknown(seen, kind)
    if unknown is not None:
        return unknown
    assert summary is not None
    idle = over or seen.suspended or summary.state == "forming"
    if not idle and summary.replicas < summary.replicas_wanted:
        message = f"replicas that run: {summary.replicas} of {summary.replicas_wanted}"
        return Condition(type=kind, status=True, reason="ReplicasLost", message=message)
    if not idle and summary.checkpoint_problem:
        return Condition(
            type=kind,
            status=True,
            reason="CheckpointFailing",
            message=summary.checkpoint_problem,
        )
    return Condition(
        type=kind, status=False, reason="AsAsked", message="nothing is missing of what was asked"
    )


def _recovering(seen: ObservedJob) -> Condition:
    kind = ConditionType.RECOVERING
    unknown = _not_started(seen, kind) or _unknown(seen, kind)
    if unknown is not None:
        return unknown
    summary = seen.summary
    assert summary is not None
    if summary.over or not (summary.recovering or summary.state in ("recovering", "waiting")):
        return Condition(type=kind, status=False, reason="NoFault", message="no fault is open")
    method = summary.method.code if summary.method is not None else "Recovery"
    if summary.state == "waiting":
        method = "Waiting"
    message = "; ".join(summary.recovering) or summary.reason or "a fault is being recovered"
    return Condition(type=kind, status=True, reason=method, message=message)


def _protected(seen: ObservedJob) -> Condition:
    kind = ConditionType.PROTECTED
    unknown = _not_started(seen, kind) or _unknown(seen, kind)
    if unknown is not None:
        return unknown
    summary = seen.summary
    assert summary is not None
    if summary.over:
        return Condition(type=kind, status=False, reason="Ended", message="the job has ended")
    if summary.replicas >= 2:
        message = f"{summary.replicas} cells of every stage hold its state"
        return Condition(type=kind, status=True, reason="Replicated", message=message)
    checkpoint = f"the checkpoint of step {summary.durable}"
    if summary.snapshots and summary.state != "forming":
        other = checkpoint if summary.durable else "the seed's initial state"
        made = summary.coverage or "what the memory of pods survives is not told yet"
        message = f"{made}; what it does not restarts from {other}"
        return Condition(type=kind, status=False, reason="SnapshotsOnly", message=message)
    if summary.durable:
        message = f"a lost stage restarts from {checkpoint}"
        return Condition(type=kind, status=False, reason="CheckpointOnly", message=message)
    if summary.state == "forming":
        message = "there is no state yet that could be lost"
        return Condition(type=kind, status=False, reason="NotStarted", message=message)
    message = "a stage's state is held once, and there is no checkpoint"
    return Condition(type=kind, status=False, reason="Unprotected", message=message)


def _exact(seen: ObservedJob) -> Condition:
    kind = ConditionType.EXACT
    if seen.invalid:
        message = "nothing of the job runs: its specification is refused"
        return Condition(type=kind, status=None, reason="NotStarted", message=message)
    unknown = _unknown(seen, kind)
    if unknown is not None:
        return unknown
    assert seen.summary is not None
    since = seen.summary.approximate_since
    if since is None and seen.summary.state == "forming":
        message = "there is no state yet"
        return Condition(type=kind, status=None, reason="NotStarted", message=message)
    course = describe_course(since)
    if since is None and seen.summary.tainted:
        return Condition(type=kind, status=False, reason="Tainted", message=seen.summary.tainted)
    if since is None:
        message = f"{course}: no stage was made anew from others"
        return Condition(type=kind, status=True, reason="AsUndisturbed", message=message)
    how = f": {seen.summary.made_anew}" if seen.summary.made_anew else ""
    return Condition(type=kind, status=False, reason=REINITIALISED, message=f"{course}{how}")


def _spares(seen: ObservedJob) -> Condition:
    kind = ConditionType.SPARES_AVAILABLE
    if not seen.pods.spares_wanted:
        return Condition(
            type=kind, status=False, reason="NoneWanted", message="spec.spares.replicas is 0"
        )
    unknown = _not_started(seen, kind) or _unknown(seen, kind)
    if unknown is not None:
        return unknown
    ready = seen.pods.spares_ready
    message = f"spares ready: {ready} of {seen.pods.spares_wanted}"
    if ready and not (seen.summary is not None and seen.summary.over):
        return Condition(type=kind, status=True, reason="SparesReady", message=message)
    return Condition(type=kind, status=False, reason="NoSpareReady", message=message)


def _suspended(seen: ObservedJob) -> Condition:
    kind = ConditionType.SUSPENDED
    not_started = _not_started(seen, kind)
    if not_started is not None:
        return not_started
    if seen.suspended:
        return Condition(
            type=kind,
            status=True,
            reason="Suspended",
            message="nobody computes, and no pod is needed",
        )
    if seen.suspend:
        return Condition(
            type=kind,
            status=False,
            reason="Suspending",
            message="a checkpoint is being written; then the pods are ended",
        )
    return Condition(type=kind, status=False, reason="NotAsked", message="spec.suspend is false")


def _ends(seen: ObservedJob) -> tuple[Condition, Condition]:
    state, why = derive_state(seen)
    summary = seen.summary
    complete = Condition(
        type=ConditionType.COMPLETE,
        status=state is State.COMPLETE,
        reason="AllStepsCommitted" if state is State.COMPLETE else "NotEnded",
        message=why if state is State.COMPLETE else "steps are left",
    )
    if state is not State.FAILED:
        failed = Condition(
            type=ConditionType.FAILED, status=False, reason="NotFailed", message="it has not failed"
        )
        return complete, failed
    code = INVALID_SPEC if seen.invalid else "DeadlineExceeded" if seen.deadline else "Failed"
    if code == "Failed" and summary is not None and summary.state == "stopped":
        code = "Stopped"
    return complete, Condition(type=ConditionType.FAILED, status=True, reason=code, message=why)
