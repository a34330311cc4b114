"""The status of a TrainingJob, as the operator writes it: summaries only.

Nothing here is read back for a decision of recovery; per-rank data stays in the api.
Numbers with a fraction are strings, as the conventions of Kubernetes ask for.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from mainstay_core.job.sections import Section

Int = Annotated[int, pydantic.Field(ge=0)]
Frame = Annotated[str, pydantic.Field(max_length=512)]
Short = Annotated[str, pydantic.Field(max_length=256)]
Sentence = Annotated[str, pydantic.Field(max_length=4096)]
Timestamp = Annotated[str, pydantic.Field(json_schema_extra={"format": "date-time"})]


def _map_by(key: str) -> dict[str, pydantic.JsonValue]:
    """Return what makes a list a map for those who write it together."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


class Condition(Section):
    """One observation of the job's state."""

    type: Annotated[str, pydantic.Field(max_length=316)]
    """What is observed: Initialized, Ready, Degraded, Recovering, Protected, Exact,
    SparesAvailable, Suspended, Complete or Failed."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, pydantic.Field(max_length=1024)]
    """Why, in one CamelCase word for machines."""
    message: Annotated[str, pydantic.Field(max_length=32_768)]
    """Why, in a sentence for people."""
    last_transition_time: Timestamp
    """When status last changed."""
    observed_generation: Int | None = None
    """Generation of the spec that it was observed for."""


class PodCounts(Section):
    """The job's pods, spares included."""

    wanted: Int = 0
    """Pods that should live."""
    ready: Int = 0
    """Pods whose supervisor runs and whose slots are placed."""
    pending: Int = 0
    """Pods that do not run yet."""
    leaving: Int = 0
    """Pods that are about to end: drained, preempted or not needed any more."""
    made: Int = 0
    """Pods made since the job began."""


class TrainingStatus(Section):
    """How far the training is."""

    step: Int | None = None
    """Steps that are committed."""
    steps: Int | None = None
    """Steps of the whole job."""
    loss: Short | None = None
    """Loss of the newest committed step."""
    step_seconds: Short | None = None
    """Median duration of a step."""
    approximate_since: Int | None = None
    """First step of another course than the job would have had without failures, as a stage was
    made anew from others there. Absent: the job is exact."""
    ettr: Short | None = None
    """Effective training time ratio, as of the newest commit: steps committed for the first time x
    median step / time since the first plan."""


class QuorumStatus(Section):
    """The membership in force."""

    id: Short | None = None
    """Counts up with every plan."""
    replicas: Int | None = None
    """Whole replicas that compute."""
    replicas_wanted: Int | None = None
    """Replicas that should compute."""
    followers: Int | None = None
    """Living cells without a chain: they apply every step and succeed at once."""
    all_reduce_stack: Int | None = None
    """Shard types that the busiest replica computes before the reduction."""


class RecoverySeconds(Section):
    """Where the time of a recovery went."""

    detect: Short | None = None
    """From the fault to the first word of it at the api."""
    decide: Short | None = None
    """From there until the plan was stored."""
    fence: Short | None = None
    """From there until all survivors were in the new quorum."""
    load: Short | None = None
    """From there until state and work were there."""
    resume: Short | None = None
    """From there to the next commit."""


class ActiveRecovery(Section):
    """A recovery under way."""

    fault: Sentence | None = None
    """What happened, with rank and pod."""
    method: Short | None = None
    """What is done about it: the ladder's row."""
    reason: Sentence | None = None
    """Why this and not something else."""
    quorum: Short | None = None
    """The quorum that it makes."""
    started_at: Timestamp | None = None
    """When the fault was learnt."""


class LastRecovery(Section):
    """The newest recovery that ended."""

    fault: Sentence | None = None
    """What had happened, with rank and pod."""
    method: Short | None = None
    """What was done about it: the ladder's row."""
    exact: bool | None = None
    """Whether the bits are those of the undisturbed job."""
    approximate_since: Int | None = None
    """First step of another course, if it made a stage anew from others."""
    reason: Sentence | None = None
    """Why this and not something else."""
    quorum: Short | None = None
    """The quorum that it made."""
    from_step: Int | None = None
    """Step that was interrupted."""
    finished_at: Timestamp | None = None
    """When the next step was committed."""
    seconds: RecoverySeconds | None = None


class RecoveryCount(Section):
    """Recoveries of one method."""

    method: Annotated[str, pydantic.Field(max_length=64)]
    """The ladder's row."""
    count: Int
    """How many there were."""


class RecoverySummary(Section):
    """What happened, and what was done about it."""

    total: Int = 0
    """Recoveries so far."""
    active: Annotated[tuple[ActiveRecovery, ...], pydantic.Field(max_length=16)] = ()
    """The recoveries under way."""
    last: LastRecovery | None = None
    counts: Annotated[
        tuple[RecoveryCount, ...],
        pydantic.Field(max_length=32, json_schema_extra=_map_by("method")),
    ] = ()
    """Recoveries by method."""


class CrashStatus(Section):
    """The newest exception that ended a trainer's program."""

    type: Short
    """Name of its class."""
    message: Sentence | None = None
    """Its text."""
    frames: Annotated[tuple[Frame, ...], pydantic.Field(max_length=16)] = ()
    """Last lines of your code that it passed through, innermost last: file:line in function."""
    rank: Short | None = None
    """Rank of the trainer, if it had one."""
    step: Int | None = None
    """The step that was tried, counted from 0."""
    trainer: Short | None = None
    """Pod and slot of the trainer."""
    time: Timestamp | None = None
    """When it ended."""
    times: Int | None = None
    """Tries of the step that ended like this. When they are more than recovery.maxRestarts, the
    job fails."""


class ProtectionItem(Section):
    """One protection."""

    name: Annotated[str, pydantic.Field(max_length=64)]
    """Its name."""
    on: bool
    """Whether the job has it."""
    reason: Sentence | None = None
    """What it is, or why the job does not have it."""


class SegmentKindStatus(Section):
    """Bytes of one kind of segments, in the memory of all pods."""

    kind: Annotated[str, pydantic.Field(max_length=64)]
    """What they hold, e.g. state or gradient."""
    size: Short | None = None
    """How much, for people."""


class SnapshotsStatus(Section):
    """What the pods' memory holds of the job's state, and which losses are survived by it."""

    window: Short | None = None
    """Versions of the newest complete window."""
    in_flight: Short | None = None
    """Versions of the window that is being copied."""
    ordering: Short | None = None
    """Order in which a window copies the parts of the state."""
    log: Short | None = None
    """From which logs a lost state is made anew: gradients, or boundary."""
    memory: Short | None = None
    """Memory used, of what all pods give."""
    kinds: Annotated[
        tuple[SegmentKindStatus, ...],
        pydantic.Field(max_length=16, json_schema_extra=_map_by("kind")),
    ] = ()
    """Bytes by kind."""
    positions: Int | None = None
    """Parts of the model's state that are held by themselves: stages, by their inner ranks."""
    covered: Int | None = None
    """Positions that pods' memory can make anew if all their trainers are lost."""
    survive_pod: Int | None = None
    """Positions that survive the loss of any one pod."""
    survive_domain: Int | None = None
    """Positions that survive the loss of any one failure domain."""
    replay_steps: Int | None = None
    """Steps that a replay would take now, of the position that needs most."""
    coverage: Sentence | None = None
    """What is survived and what is not."""
    short_of: Sentence | None = None
    """Which pod's memory is too short, and for what."""


class ProtectionStatus(Section):
    """What the job is protected from."""

    entry: Short | None = None
    """How the user's code comes in, blocks or loop: it decides which protections there are."""
    snapshot_lag_steps: Int | None = None
    """Steps since the newest complete snapshot."""
    snapshots: SnapshotsStatus | None = None
    dmr_coverage: Sentence | None = None
    """Share of operator time that is executed twice, by method, e.g. naive 100 %; of each stage
    where its trainers plan; what the shares are of; how often a witness computes again, and with
    how many devices it has agreed in the last round; and what is not covered, by name. Absent:
    nothing is checked."""
    items: Annotated[
        tuple[ProtectionItem, ...], pydantic.Field(max_length=32, json_schema_extra=_map_by("name"))
    ] = ()
    """The protections one by one."""


class Repair(Section):
    """One pod that was made again."""

    time: Timestamp
    """When."""
    pod: Short
    """Name of the pod that was lost."""
    node: Short | None = None
    """Where it ran."""
    reason: Short | None = None
    """Why it was lost, in one CamelCase word."""
    counts: bool = True
    """Whether it counts against recovery.window: not one that was preempted, drained or deleted."""


class RepairStatus(Section):
    """Pods that were made again."""

    counted: Int = 0
    """Those that counted against recovery.window when they were made."""
    uncounted: Int = 0
    """The others: pods that were preempted, drained or deleted on purpose."""
    recent: Annotated[tuple[Repair, ...], pydantic.Field(max_length=1024)] = ()
    """The newest ones, oldest first: what the window is measured by."""


class QuarantinedNode(Section):
    """A node that computed wrongly again and again."""

    name: Annotated[str, pydantic.Field(max_length=253)]
    """Name of the node."""
    reason: Sentence | None = None
    """What it did."""
    since: Timestamp | None = None
    """When it was quarantined."""
    dry_run: bool = False
    """Nothing was done, as recovery.quarantine.mode is DryRun."""


class MismatchStatus(Section):
    """One result of a node that differed from the others'."""

    time: Timestamp
    """When."""
    node: Annotated[str, pydantic.Field(max_length=253)]
    """Where it was computed."""
    pod: Short
    """Name of the pod that held it."""
    quorum: Short = ""
    """The recovery that it caused, if one followed."""
    step: Int | None = None
    """The step in which two executions of an operator differed, if a check found it."""


class QuarantineStatus(Section):
    """Nodes whose results differed from the others'."""

    nodes: Annotated[
        tuple[QuarantinedNode, ...],
        pydantic.Field(max_length=256, json_schema_extra=_map_by("name")),
    ] = ()
    """Nodes in quarantine."""
    mismatches: Annotated[tuple[MismatchStatus, ...], pydantic.Field(max_length=256)] = ()
    """The newest ones, oldest first: what recovery.quarantine judges by."""


class TrainingJobStatus(Section):
    """What the operator observed. Written once per reconciliation, by the operator alone."""

    observed_generation: Int | None = None
    """Generation of the spec that this status is about."""
    state: Annotated[str, pydantic.Field(max_length=32)] | None = None
    """The conditions in one word, for people: Pending, Running, Recovering, Waiting, Suspended,
    Complete or Failed."""
    reason: Sentence | None = None
    """Why it is in that state."""
    ready: Annotated[str, pydantic.Field(max_length=32)] | None = None
    """Ready pods with a rank, of those that the job needs, e.g. 7/8."""
    spares: Annotated[str, pydantic.Field(max_length=32)] | None = None
    """Ready standby pods, of those that are wanted, e.g. 1/1."""
    selector: Short | None = None
    """Labels of the job's pods, for whoever reads the scale subresource."""
    start_time: Timestamp | None = None
    """When its pods were first asked for; again when it was resumed. Its deadline counts from
    here."""
    completion_time: Timestamp | None = None
    """When it was complete or had failed."""
    conditions: Annotated[
        tuple[Condition, ...], pydantic.Field(max_length=32, json_schema_extra=_map_by("type"))
    ] = ()
    """Observations, one per type."""
    pods: PodCounts | None = None
    training: TrainingStatus | None = None
    quorum: QuorumStatus | None = None
    recovery: RecoverySummary | None = None
    crash: CrashStatus | None = None
    protection: ProtectionStatus | None = None
    repair: RepairStatus | None = None
    quarantine: QuarantineStatus | None = None
