"""Defines the record of one recovery: what failed, what was done, and how long each stage took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from mainstay_core.base import codec
from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    Count,
    Finite,
    Index,
    Instant,
    Longest,
    Name,
    Seconds,
    Sentence,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.base.words import count
from mainstay_core.job.config import LogKind
from mainstay_core.wire.formats import format_of, recovery_of_format_1
from mainstay_core.wire.plan import Method

STAGES = ("detect", "decide", "fence", "load", "resume")
"""The five stages of a recovery, in order. The time of a stage is its name with ``_s``."""
RECOVERY_FORMAT = 2
"""Format of a recovery's record. In format 1 its sentence alone said whose state differed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The five times of a recovery, in seconds (design 13.9); None until known."""

    detect_s: Finite | None = None
    """Time from the death, or the last sign of life, to the first fact at the api."""
    decide_s: Finite | None = None
    """Time from the first fact until the plan is stored."""
    fence_s: Finite | None = None
    """Time from the plan until the last survivor holds all settle reports."""
    load_s: Finite | None = None
    """Time from then until every survivor has its state and its table."""
    resume_s: Finite | None = None
    """Time from then until the next commit."""

    @property
    def by_stage(self) -> dict[str, float | None]:
        """The times by the names of the stages, in order."""
        times = (self.detect_s, self.decide_s, self.fence_s, self.load_s, self.resume_s)
        return dict(zip(STAGES, times, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The record of one position whose state was made anew from snapshots and logs."""

    stage: Index
    inner: Index
    kind: Name
    """What was logged: ``gradients``, or ``boundary`` for what crossed the stage's borders."""
    first: Count
    """Oldest version of a state that it began with; a window's first one, or later."""
    last: Count
    """Newest version of a state that it began with."""
    version: Count
    """At which the state is now."""
    planned_steps: Count
    """Steps that were to be replayed when the replay began."""
    steps: Count
    """Steps that were replayed."""
    seconds: Seconds
    """How long reading and replaying took."""
    num_damaged: Count = 0
    """Copies that were found damaged, and for which others were read."""


Slots = Annotated[tuple[Slot, ...], Longest(MAX_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The record of what was done about one fault."""

    fault: Sentence
    """What happened, with rank and slot named."""
    method: Method
    exact: bool
    reason: Sentence
    quorum: QuorumId
    from_step: Count
    """The step that was interrupted."""
    slots: Slots = ()
    started_at_s: Instant = 0.0
    times: StageTimes = StageTimes()
    first_commit_after_s: Finite | None = None
    """How much later than normal the next step was committed, by the ledger's times."""
    lost_steps: Count = 0
    redone_steps: Count = 0
    done: bool = False
    differing: Slots = ()
    """Slots whose state differed from that of their stage's majority, if that was the fault:
    evidence against the devices that hold it."""
    replays: Annotated[tuple[Replayed, ...], Longest(MAX_MEMBERS)] = field(
        default=(), metadata=OMITTED
    )
    """Positions whose state was made anew, in order."""
    approximate_since: Count | None = field(default=None, metadata=OMITTED)
    """First step of another course than the job's own, once the fork that the recovery is has been
    made."""
    allowed_by: Name = field(default="", metadata=OMITTED)
    """Who has allowed it to be approximate, though the job's definition does not."""
    format: Count = RECOVERY_FORMAT

    def __post_init__(self) -> None:
        cut_fields(self, "fault", "reason")

    @staticmethod
    def modernized(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON of a record as the newest format has it.

        Raises:
            UnknownFormatError: its format is newer than this program.
        """
        told = format_of(data, RECOVERY_FORMAT, "Recovery")
        return recovery_of_format_1(data) if told == 1 else data


def name_log(kind: str) -> str:
    """Return a kind of log in words; one that only a newer peer knows as it is."""
    return "boundary logs" if kind == LogKind.BOUNDARY else kind


def describe_replays(replays: Sequence[Replayed]) -> str:
    """Return what replays came to, in one clause; empty without one."""
    if not replays:
        return ""
    places = [f"s{r.stage}.i{r.inner}" if r.inner else f"s{r.stage}" for r in replays]
    kinds = " and ".join(sorted({name_log(r.kind) for r in replays}))
    steps, planned = max(r.steps for r in replays), max(r.planned_steps for r in replays)
    damaged = sum(r.num_damaged for r in replays)
    worst = f"; {count(damaged, 'copy', 'copies')} found damaged" if damaged else ""
    return (
        f"{', '.join(places)} made anew from {kinds} and the states of versions "
        f"{min(r.first for r in replays)} to {max(r.last for r in replays)}: "
        f"{count(steps, 'step')} replayed ({planned} planned) in "
        f"{max(r.seconds for r in replays):.3f} s{worst}"
    )


def show_recovery(recovery: Recovery) -> dict[str, Any]:
    """Return the JSON of a record as the api shows it, with the five times beside the rest."""
    shown: dict[str, Any] = codec.encode(recovery)
    times = shown.pop("times")
    return {**shown, **times}


def read_recovery(data: Any) -> Recovery:
    """Return a record from the JSON that the api shows, in this format or an older one.

    Raises:
        RemoteProtocolError: it is no such record, or one of a newer format.
    """
    if not isinstance(data, Mapping):
        raise RemoteProtocolError(f"Recovery: expected an object, got {type(data).__name__}")
    return codec.decode(Recovery, {**data, "times": data})
