"""The api's page about a job for the operator, and its page of the pods that the job wants.

Each says its format; a reader that does not know it refuses the answer by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.job.phase import JobPhase
from mainstay_core.job.protections import Protection
from mainstay_core.wire.formats import format_of

PAGE_FORMAT = 1
"""Format of both. An answer that names none has format 1, as those of the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Replicas of the plan in force, and what the job asks for."""

    whole: int
    wanted: int
    min: int = 1
    lanes: int = 1
    followers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNumbers:
    """The numbers of a job's pods, by what they do."""

    wanted: int = 0
    living: int = 0
    serving: int = 0
    leaving: int = 0
    spares_wanted: int = 0
    spares_free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The progress of the training; None for what is not known yet."""

    step: int
    """Number of committed steps."""
    steps: int
    loss: float | None = None
    step_seconds: float | None = None
    """Median of the newest steps."""
    committed_at_s: float | None = None
    goodput: float | None = None
    ettr: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryLine:
    """A recovery in short; the five times, in seconds, are None until they are known."""

    quorum: str
    method: str
    """A ``Method``, as text: it is only shown, and a newer api may know more of them."""
    exact: bool
    fault: str
    reason: str
    from_step: int
    lost_steps: int = 0
    started_at_s: float
    first_commit_after_s: float | None = None
    slots: tuple[str, ...] = ()
    done: bool = False
    detect_s: float | None = None
    decide_s: float | None = None
    fence_s: float | None = None
    load_s: float | None = None
    resume_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOverview:
    """The job's recoveries."""

    active: tuple[RecoveryLine, ...] = ()
    last: RecoveryLine | None = None
    """The newest that is over."""
    counts: dict[str, int] = field(default_factory=dict)
    """By method."""
    lost_steps: int = 0
    approximate: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The job's durable checkpoints."""

    every_steps: int = 0
    step: int = 0
    """Newest durable version."""
    problem: str = ""
    """Why the last one is late or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """A job on one page: nothing in it grows with the number of ranks or of steps."""

    format: int = PAGE_FORMAT
    uid: str = ""
    name: str = ""
    namespace: str = ""
    state: JobPhase
    reason: str = ""
    suspend: bool = False
    recovering: bool = False
    quorum: QuorumId | None = None
    """Of the plan in force."""
    all_reduce_stack: int = 0
    replicas: ReplicaCounts
    pods: PodNumbers = PodNumbers()
    training: Training
    recovery: RecoveryOverview
    checkpoint: CheckpointState
    held_back: int = 0
    """Slots that get no place for a while."""
    created_at_s: float = 0.0
    entry: str | None = None
    """How the user's code comes in; None while no trainer has said it."""
    protections: tuple[Protection, ...] = ()

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
    name: str
    address: str = ""
    domain: str = ""
    serving: bool
    """Whether it has a rank."""
    leaving: str = ""
    """Why it will end; empty if it will not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsPage:
    """The pods that a job needs now, and those to end."""

    format: int = PAGE_FORMAT
    state: JobPhase
    num_pods: int
    """Pods that should live and not leave, spares included."""
    leaving: tuple[PodUid, ...]
    ending: tuple[PodUid, ...]
    pods: tuple[PodLine, ...] = ()

    @staticmethod
    def modernized(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON as the newest format has it.

        Raises:
            UnknownFormatError: its format is newer than this program.
        """
        format_of(data, PAGE_FORMAT, "PodsPage")
        return data
