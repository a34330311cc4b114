"""Holds what a trainer and a supervisor need to know of a job, in plain values.

:mod:`mainstay_core.job.spec` derives it once from the TrainingJob, and needs pydantic to do so. The
user's image only needs this module and the standard library.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Annotated

from mainstay_core.base.bounds import (
    MAX_BUCKET_BYTES,
    MAX_COPY_BYTES,
    MAX_FAULTS,
    MIN_COPY_BYTES,
    Count,
    Document,
    Index,
    Longest,
    Name,
    Range,
    Seconds,
    Sentence,
    Text,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count
from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
from mainstay_core.faults.points import FaultPoint

BUCKET_BYTES = 4 * 1024 * 1024
"""What is summed stays in a last-level cache, and an exchange is worth its start."""

COPY_BYTES = 4 * 1024 * 1024 * 1024
"""A state of up to 358 million parameters with AdamW is copied at once. Eight ranks of a node take
32 GiB, which nodes with as many GPUs have to spare."""


SNAPSHOT_PEERS = 2
"""Other pods that keep a copy of each segment (MoEvement, section 4)."""
MAX_SNAPSHOT_PEERS = 16
MAX_AUTO_WINDOW = 16
"""Steps of a window that nobody has set. A slower store makes steps wait for it."""
MAX_SNAPSHOT_WINDOW = 1024
"""Steps of a window. Pods keep the gradients of two of them, and a replay applies as many."""
LAG_STEPS = 2
"""Versions from a window's last instalment to the commit that completes it, for which stores have
room: copies travel in the background, and later votes say that they are there."""
MAX_LAG_STEPS = 64
"""Versions after its last one for which a window may wait for its holders. One that never becomes
complete, as some store has no room, must not keep all later ones from beginning. Stores have room
for :data:`LAG_STEPS` alone: a window that waits longer uses the spare room that a store has, and
once there is none the votes say of each gradient that it is not kept."""
ORDERINGS = ("Popularity", "SoftCount", "TimeDecayed", "CapacityAware", "BackToFront")
"""Orders in which units are copied (:class:`mainstay_core.snapshots.orderings.Ordering`)."""
DECAY_ONE = 1 << 16
"""The number 1 of ``decay``, which is in fixed point."""
SNAPSHOT_DOMAINS = 2
MAX_SNAPSHOT_DOMAINS = 64


class LogKind(enum.StrEnum):
    """The kinds of logs from which a lost state is made anew."""

    GRADIENTS = "gradients"
    """Reduced gradients: the optimizer alone applies the steps again."""
    BOUNDARY = "boundary"
    """What crossed the boundaries of stages: the lost stages compute the steps again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """Says how the state is kept in the memory of pods."""

    memory_bytes: Annotated[int, Range(1, MAX_COPY_BYTES)]
    """Memory of each pod's store of segments."""
    num_instalments: Annotated[int, Range(0, MAX_SNAPSHOT_WINDOW)] = 0
    """Versions over which one snapshot of the state is spread; 0: as few as fit into a step."""
    peers: Annotated[int, Range(0, MAX_SNAPSHOT_PEERS)] = SNAPSHOT_PEERS
    """Other pods that keep a copy of each segment."""
    domains: Annotated[int, Range(1, MAX_SNAPSHOT_DOMAINS)] = SNAPSHOT_DOMAINS
    """Failure domains over which the copies are spread, where there are as many."""
    ordering: Name = "BackToFront"
    """Order in which units are copied: one of :data:`ORDERINGS`. A job that was stored before there
    were others has this one."""
    decay: Annotated[int, Range(0, DECAY_ONE)] = DECAY_ONE // 2
    """Alpha of a decayed popularity in fixed point: how much of the average a step leaves."""
    ask_s: Seconds = 5.0
    """How long a settle waits for what the store of a pod without a member holds. One that does not
    answer counts as empty."""
    boundary: bool = field(default=False, metadata=OMITTED)
    """Whether what crosses the boundaries of stages is logged, instead of gradients."""
    log_reason: Sentence = field(default="", metadata=OMITTED)
    """Why the job has this kind of log."""
    auto_log: bool = field(default=False, metadata=OMITTED)
    """Whether the kind of log was left to us."""

    @property
    def log(self) -> LogKind:
        """The kind of log from which a lost state is made anew."""
        return LogKind.BOUNDARY if self.boundary else LogKind.GRADIENTS


def check_window(window: int, num_units: int) -> None:
    """Refuse a window of which some step would copy nothing in any stage.

    Args:
        window: steps of it; 0: as many as the trainers choose.
        num_units: units of the stage that has the most. Each is copied in one step.

    Raises:
        InvalidSpecError: the window is longer.
    """
    if window > num_units:
        raise InvalidSpecError(
            "spec.snapshots.window",
            f"is {window}, but no stage has more than {count(num_units, 'unit')} of which a step "
            f"could copy one; use at most {num_units}, or Auto",
        )


WEIGHTINGS = ("GradientNorm", "Uniform", "Copy")
"""How two neighbours are weighed (:class:`mainstay_core.reinitialisation.weights.Weighting`)."""
OPTIMIZER_STATES = ("Zero", "Average")
"""How the optimizer's state begins of what is made of other stages
(:class:`mainstay_core.wire.reinitialisation.OptimizerState`)."""
MAX_FORKS = 1024
"""Re-initialisations of one job."""
MAX_GUARDS = 16
"""Cells that keep what an end of a pipeline alone has. Each costs the end the bytes of its gradient
in every step."""
SWAPPED_GUARDS = 2
"""The same where nobody says how many, in a swapped pipeline."""
STALE_STEPS = 100
"""How old a checkpoint may be that a lost stage loads alone, where nobody says how old. Of this age
it costs next to nothing, where an average of neighbours costs much (docs/benchmarks.md)."""
MAX_LR_BOOST = 100.0
"""Factor of a learning rate. More than that trains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximateConfig:
    """Says how a stage that nobody holds may be made anew from its neighbours."""

    after_lost_steps: Count | None = None
    """A restart that loses more steps than this is not worth it; None: one from a checkpoint is."""
    weights: Name = WEIGHTINGS[0]
    lr_boost: Annotated[float, Range(1, MAX_LR_BOOST)] = 1.1
    """Factor of the learning rate of what was made anew."""
    boost_steps: Count | None = None
    """Steps for which it lasts; None: to the job's end."""
    stale_steps: Count = field(default=0, metadata=OMITTED)
    """A durable version of the lost stage that is at most so many steps old is loaded alone, before
    other stages are looked at; 0: no stage goes back alone."""
    wait_s: Seconds = field(default=0.0, metadata=OMITTED)
    """How long a holder that was only cut off is waited for before a stage is made anew."""
    optimizer_state: Name = field(default=OPTIMIZER_STATES[0], metadata=OMITTED)

    @property
    def loads_alone(self) -> bool:
        """Whether a lost stage ever loads a checkpoint of its own alone.

        It is to be no older than ``stale_steps``, and one that costs no more steps than the limit
        has all stages go back.
        """
        limit = self.after_lost_steps
        return limit is not None and limit < self.stale_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A job as its processes see it."""

    job: JobUid
    name: Name
    namespace: Name = ""
    """Namespace of the TrainingJob; empty in local mode."""
    shape: JobShape
    entrypoint: Text
    """``module:function`` that returns the workload."""
    args: Annotated[tuple[Text, ...], Longest(4096)] = ()
    workload: Document
    """``workload.config`` as the user wrote it."""
    device: Name = "auto"
    """``cpu``, ``cuda`` or ``auto`` (cuda when there is one)."""
    backend: Name = "auto"
    """``gloo``, ``nccl`` or ``auto`` (nccl on cuda with a device per rank, else gloo)."""
    compile: Name = "off"
    """``blocks`` runs each block as compiled code; ``off`` does not."""
    dmr: Mode = field(default=Mode.OFF, metadata=OMITTED)
    """Which operators are executed twice and compared."""
    witness_every_steps: Count = field(default=0, metadata=OMITTED)
    """In each step that is a multiple of it a second chain computes a type; 0: in none."""
    dmr_plan: PlanName = field(default=PlanName.NAIVE, metadata=OMITTED)
    """When the second executions run in mode Full."""
    dmr_plan_file: Text = field(default="", metadata=OMITTED)
    """Path of the plan; empty unless the plan is File."""
    dmr_profile_steps: Count = field(default=0, metadata=OMITTED)
    """Steps from which a plan is made, or verified."""
    dmr_memory_bytes: Count = field(default=0, metadata=OMITTED)
    """What checks that wait may retain in a rank."""
    recompute: bool = False
    """Run each block's forward again in the backward instead of keeping what it saved."""
    recompute_share: Annotated[float, Range(0, 1)] = field(default=1.0, metadata=OMITTED)
    """Share of a stage's blocks that this applies to, the first ones."""
    bucket_bytes: Annotated[int, Range(1, MAX_BUCKET_BYTES)] = BUCKET_BYTES
    """What of a stage's gradient is exchanged and summed at a time; one chunk at least."""
    redundancy: Index | None = None
    """Hosts per shard type; None chooses."""
    checkpoint_dir: Text = ""
    """Directory of durable checkpoints; empty switches them off."""
    checkpoint_keep: Count = 2
    """Complete versions that are kept; at least two."""
    checkpoint_copy_bytes: Annotated[int, Range(MIN_COPY_BYTES, MAX_COPY_BYTES)] = COPY_BYTES
    """Host memory of a rank for the copy of its state while it is written."""
    checkpoint_signed: bool = False
    """Whether checkpoints must carry a keyed digest: pods are given the key."""
    resume_from: Text = ""
    """Directory of an earlier run's checkpoints, only read; empty starts from the seed."""
    resume_version: Count = field(default=0, metadata=OMITTED)
    """The only version there that counts; 0: all do."""
    heartbeat_s: Seconds = 1.0
    """Interval of a supervisor's heartbeat. It is kept near 1 s: detection does not depend on
    it."""
    heartbeat_timeout_s: Seconds = 15.0
    """A pod that lies this far behind the job's newest heartbeat counts as gone. A trainer that
    tells its supervisor nothing for this long (it is stopped, say) is killed."""
    hang_s: Seconds = 300.0
    """A running (not waiting) rank without progress for this long has its trainer killed."""
    operation_timeout_s: Seconds = 1800.0
    """Back-stop of a single collective. It is larger than hang_s plus the longest step."""
    unblock_s: Seconds = field(default=5.0, metadata=OMITTED)
    """How long a trainer may take to come back from an operation of a group that has ended, as a
    rule milliseconds. gloo may lose a message for ever: then the trainer ends itself, as it could
    answer nobody, and its slot gets another one, which heals."""
    connect_s: Seconds = 10.0
    """Time to connect ranks that have all met (``runtime.connectSeconds``). A group that takes
    longer fails, and its members meet again under the next plan."""
    probe_s: Seconds = 0.3
    """Pause before a re-form after a failed collective without sure evidence."""
    handover_s: Seconds = 30.0
    """How long a pod that is told to end goes on serving until its work is handed over."""
    hold_back_s: Seconds = 1.0
    """How long a trainer gets no place after its second end in a row without a commit. Each further
    end doubles it."""
    hold_back_max_s: Seconds = 300.0
    spares: Index = 0
    """Standby pods beyond those that the wanted replicas need."""
    restart_grace_s: Seconds = 10.0
    """How long a lost rank's place waits for the same pod's restarted trainer before a spare."""
    startup_deadline_s: Seconds = 120.0
    """After so long the job starts with min_replicas, or fails."""
    max_restarts: Count = 10
    """Restarts of one slot's trainer until it works again; and tries of a step that may end with
    the same exception, beside the first."""
    escalate_after: Annotated[int, Range(1, 1_000_000)] = 10
    """Quorums that end for the same cause before more is done than to meet again."""
    snapshots: SnapshotConfig | None = None
    """None in a job without snapshots in memory."""
    approximate: ApproximateConfig | None = field(default=None, metadata=OMITTED)
    """None in a job whose every recovery is exact, unless a person allows one that is not."""
    permitted: ApproximateConfig | None = field(default=None, metadata=OMITTED)
    """The rules of such a recovery while ``approximate`` is None; None: the defaults."""
    repeats: Annotated[tuple[Document, ...], Longest(MAX_FORKS)] = field(
        default=(), metadata=OMITTED
    )
    """The forks of another run, as its report has them, that this one makes at the same versions
    (:mod:`mainstay_core.wire.repeated_lineage`). It then makes no others."""
    goes_back: bool = field(default=False, metadata=OMITTED)
    """Whether it goes back to before a device was wrong, once others have shown that it is."""
    guards: Annotated[int, Range(0, MAX_GUARDS)] = field(default=0, metadata=OMITTED)
    """Cells of the stage beside each end of the pipeline that keep what the end alone has."""
    suspend: bool = False
    """Whether the job's definition wants it to stand still."""
    faults: Annotated[tuple[FaultPoint, ...], Longest(MAX_FAULTS)] = ()

    @property
    def checks(self) -> CheckRules:
        """What is checked in the job."""
        return CheckRules(
            mode=self.dmr,
            plan=self.dmr_plan,
            plan_file=self.dmr_plan_file,
            profile_steps=self.dmr_profile_steps,
            memory_bytes=self.dmr_memory_bytes,
            witness_every_steps=self.witness_every_steps,
        )

    def with_checks(self, rules: CheckRules) -> JobConfig:
        """Return the job with other checks."""
        return replace(
            self,
            dmr=rules.mode,
            dmr_plan=rules.plan,
            dmr_plan_file=rules.plan_file,
            dmr_profile_steps=rules.profile_steps,
            dmr_memory_bytes=rules.memory_bytes,
            witness_every_steps=rules.witness_every_steps,
        )

    @property
    def approximate_rules(self) -> ApproximateConfig:
        """The rules by which stages are made anew, by the job's policy or a person's permission."""
        return self.approximate or self.permitted or ApproximateConfig()

    @property
    def recomputed(self) -> float:
        """Share of a stage's blocks that run their forward again; 0: none does."""
        return self.recompute_share if self.recompute else 0.0
