"""The api's page about a job for the operator, and its page of the pods that the job wants.

Each says its format; a reader that does not know it refuses the answer by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from mainstay_core.base.bounds import (
    MAX_FAULTS,
    MAX_MEMBERS,
    Count,
    Finite,
    Longest,
    Name,
    Sentence,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import JobUid, PodUid, QuorumId
from mainstay_core.job.phase import JobPhase
from mainstay_core.job.protections import Protection
from mainstay_core.wire.crashes import ToldCrash
from mainstay_core.wire.findings import FindingsPage
from mainstay_core.wire.formats import format_of
from mainstay_core.wire.stores import SnapshotSummary
from mainstay_core.wire.taints import MAX_TAINTS, Taint

PAGE_FORMAT = 1
"""Format of both. An answer that names none has format 1, as those of the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Replicas of the plan in force, and what the job asks for."""

    whole: Count
    wanted: Count
    min: Count = 1
    lanes: Count = 1
    followers: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNumbers:
    """The numbers of a job's pods, by what they do."""

    wanted: Count = 0
    living: Count = 0
    serving: Count = 0
    leaving: Count = 0
    spares_wanted: Count = 0
    spares_free: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The progress of the training; None for what is not known yet."""

    step: Count
    """Number of committed steps."""
    steps: Count
    loss: Finite | None = None
    step_seconds: Finite | None = None
    """Median of the newest steps."""
    committed_at_s: Finite | None = None
    goodput: Finite | None = None
    ettr: Finite | None = None
    approximate_since: Count | None = field(default=None, metadata=OMITTED)
    """First step of another course than the job would have had without failures; None: the newest
    step is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryLine:
    """A recovery in short; the five times, in seconds, are None until they are known."""

    quorum: Sentence
    method: Name
    """A ``Method``, as text: it is only shown, and a newer api may know more of them."""
    exact: bool
    approximate_since: Count | None = field(default=None, metadata=OMITTED)
    fault: Sentence
    reason: Sentence
    from_step: Count
    lost_steps: Count = 0
    started_at_s: Finite
    first_commit_after_s: Finite | None = None
    slots: Annotated[tuple[Sentence, ...], Longest(MAX_MEMBERS)] = ()
    done: bool = False
    detect_s: Finite | None = None
    decide_s: Finite | None = None
    fence_s: Finite | None = None
    load_s: Finite | None = None
    resume_s: Finite | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOverview:
    """The job's recoveries."""

    active: Annotated[tuple[RecoveryLine, ...], Longest(MAX_MEMBERS)] = ()
    last: RecoveryLine | None = None
    """The newest that is over."""
    counts: Annotated[dict[Name, Count], Longest(MAX_FAULTS)] = field(default_factory=dict)
    """By method."""
    lost_steps: Count = 0
    approximate: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The job's durable checkpoints."""

    every_steps: Count = 0
    step: Count = 0
    """Newest durable version."""
    problem: Sentence = ""
    """Why the last one is late or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """A job on one page: nothing in it grows with the number of ranks or of steps."""

    format: Count = PAGE_FORMAT
    uid: Sentence = ""
    name: Sentence = ""
    namespace: Sentence = ""
    state: JobPhase
    reason: Sentence = ""
    suspend: bool = False
    recovering: bool = False
    quorum: QuorumId | None = None
    """Of the plan in force."""
    all_reduce_stack: Count = 0
    replicas: ReplicaCounts
    pods: PodNumbers = PodNumbers()
    training: Training
    recovery: RecoveryOverview
    crash: ToldCrash | None = None
    """The newest exception that ended a trainer's program."""
    checkpoint: CheckpointState
    held_back: Count = 0
    """Slots that get no place for a while."""
    created_at_s: Finite = 0.0
    entry: Name | None = None
    """How the user's code comes in; None while no trainer has said it."""
    made_anew: Sentence = field(default="", metadata=OMITTED)
    """How the newest stage was made anew from others; empty in an exact job."""
    snapshots: bool = field(default=False, metadata=OMITTED)
    """Whether its state is kept in the memory of pods."""
    stores: SnapshotSummary | None = field(default=None, metadata=OMITTED)
    """What the pods' stores hold and which losses are survived; None in a job without snapshots."""
    dmr_coverage: Sentence = field(default="", metadata=OMITTED)
    """Which share of the work is checked, by method, how often and how widely by a witness, and
    what is not covered, by name; empty: nothing is checked."""
    taints: Annotated[tuple[Taint, ...], Longest(MAX_TAINTS)] = field(default=(), metadata=OMITTED)
    """Steps that devices may have computed wrongly which were named as wrong each time."""
    findings: FindingsPage | None = field(default=None, metadata=OMITTED)
    """What checks have found, with the newest; None where nothing is checked."""
    protections: Annotated[tuple[Protection, ...], Longest(MAX_MEMBERS)] = ()

    @staticmethod
    def modernized(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON of a page as the newest format has it.

        Raises:
            UnknownFormatError: its format is newer than this program.
        """
        format_of(data, PAGE_FORMAT, "JobPage")
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLine:
    """A living pod of a job."""

    uid: PodUid
    name: Sentence
    address: Sentence = ""
    domain: Sentence = ""
    serving: bool
    """Whether it has a rank."""
    leaving: Sentence = ""
    """Why it will end; empty if it will not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsPage:
    """The pods that a job needs now, and those to end."""

    format: Count = PAGE_FORMAT
    state: JobPhase
    num_pods: Count
    """Pods that should live and not leave, spares included."""
    leaving: Annotated[tuple[PodUid, ...], Longest(MAX_MEMBERS)]
    ending: Annotated[tuple[PodUid, ...], Longest(MAX_MEMBERS)]
    pods: Annotated[tuple[PodLine, ...], Longest(MAX_MEMBERS)] = ()

    @staticmethod
    def modernized(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON as the newest format has it.

        Raises:
            UnknownFormatError: its format is newer than this program.
        """
        format_of(data, PAGE_FORMAT, "PodsPage")
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A job of which the api has a record, by what names it in a cluster."""

    uid: JobUid
    namespace: Name = ""
    """Empty in local mode."""
