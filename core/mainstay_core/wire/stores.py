"""Defines what a pod's store of segments tells the api: what it holds, in short, and of a check.

A store tells this every few seconds, whatever the length of a step. It is for people: no plan
depends on it. What a settle is decided by is :class:`mainstay_core.wire.segments.StoreReport`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import (
    Address,
    Count,
    Index,
    Longest,
    Name,
    Seconds,
    Sentence,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import PodUid
from mainstay_core.wire.segments import (
    MAX_BAD,
    MAX_HELD_STATES,
    MAX_HELD_UNITS,
    MAX_RECORDS,
    MAX_RUNS,
    LogsHeld,
    Run,
    SegmentKey,
)

MAX_GROUPS = 4096
"""Groups of units that one store tells of; what is beyond is not told."""
MAX_TOLD_LOGS = 4096
"""Runs of boundary logs that one store tells of; the newest are told."""
MAX_WINDOWS = 64
"""Windows of which a store has states: that in flight, the complete one, and what settles left."""
MAX_KINDS = 16
"""Kinds of segments."""
MAX_CHECKED = 65_536
"""Lines of a check: segments whose keys differ in nothing but the version."""
MAX_LOSSES = 64
"""Pods or domains that are named; how many there are is told beside them."""
SUM_DIGITS = 8
"""Hexadecimal digits of one checksum."""
MAX_SUMS = 8 * 65_536
"""Characters of one line's checksums."""
STORE_STATUS_S = 5.0
"""Seconds from one status of a store to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBytes:
    """The segments of one kind, added up."""

    kind: Name
    num_segments: Count
    size_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowHeld:
    """A window of which a store has states."""

    first: Count
    length: Count
    """Versions."""

    @property
    def last(self) -> int:
        """Return the window's last version."""
        return self.first + self.length - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsHeld:
    """Units of one position of which a store holds the same versions."""

    position: Index
    num_units: Index
    """Units of the position."""
    units: Annotated[tuple[Run, ...], Longest(MAX_HELD_UNITS)]
    """Their numbers, in unbroken runs."""
    states: Annotated[tuple[Count, ...], Longest(MAX_HELD_STATES)] = ()
    """Versions of which it holds the state, ascending."""
    gradients: Annotated[tuple[Run, ...], Longest(MAX_RUNS)] = ()
    """Steps of which it holds the gradient, ascending."""
    computes: Annotated[tuple[Run, ...], Longest(MAX_RUNS)] = field(default=(), metadata=OMITTED)
    """Versions of which it holds the compute weights, ascending."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the units' numbers, ascending."""
        return tuple(n for run in self.units for n in range(run.first, run.last + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps:
    """Consecutive steps that one quorum has committed."""

    quorum: Name
    """As text."""
    first: Count
    last: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSegments:
    """The checksums of segments whose keys differ in nothing but the version."""

    key: SegmentKey
    """Of the first of them."""
    unit_name: Name
    versions: Annotated[tuple[Run, ...], Longest(MAX_RUNS)]
    """Ascending."""
    sums: Annotated[str, Longest(MAX_SUMS)]
    """Checksum (CRC-32) of each version's bytes, 8 hexadecimal digits each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCheck:
    """The outcome of reading every segment of a store once."""

    number: Count
    """Which check was asked for."""
    num_segments: Count
    size_bytes: Count
    """Bytes that were read."""
    seconds: Seconds = 0.0
    lineage: Count
    segments: Annotated[tuple[CheckedSegments, ...], Longest(MAX_CHECKED)] = ()
    changed: Annotated[tuple[SegmentKey, ...], Longest(MAX_BAD)] = ()
    """Segments whose bytes are not those that an earlier check has read."""
    doubted: Annotated[tuple[SegmentKey, ...], Longest(MAX_BAD)] = field(
        default=(), metadata=OMITTED
    )
    """Segments that a reader or an earlier check has found damaged, and nobody has written anew."""
    lost: Annotated[tuple[SegmentKey, ...], Longest(MAX_BAD)] = field(default=(), metadata=OMITTED)
    """Segments that no key found any more, as which the store had them. It has dropped them."""
    num_records: Count = field(default=0, metadata=OMITTED)
    """Commits that were checked."""
    bad_records: Annotated[tuple[Count, ...], Longest(MAX_RECORDS)] = field(
        default=(), metadata=OMITTED
    )
    """Steps whose commits do not have the seal with which they were written, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """The content of a pod's store of segments, in short."""

    pod: PodUid
    address: Address = field(default="", metadata=OMITTED)
    """Where it listens. A supervisor that starts again in its pod has another store."""
    memory_bytes: Count
    """That it may use."""
    used_bytes: Count
    """Taken of it, what is being written included."""
    kinds: Annotated[tuple[SegmentBytes, ...], Longest(MAX_KINDS)] = ()
    lineage: Count = 0
    keep_from: Count = 0
    """Version before which everything has gone."""
    windows: Annotated[tuple[WindowHeld, ...], Longest(MAX_WINDOWS)] = ()
    """Ascending."""
    units: Annotated[tuple[UnitsHeld, ...], Longest(MAX_GROUPS)] = ()
    judged: Annotated[tuple[Run, ...], Longest(MAX_RUNS)] = ()
    """Steps of which it has the commit, and what the votes said of each position."""
    num_refused: Count = 0
    """Segments that found no room, or went to give room to others, since the store began."""
    short_of: Sentence = ""
    """Why the newest of them is not kept; empty once all of a later window found room."""
    num_discarded: Count = 0
    """Segments and commits that a trainer, a settle or a check has found damaged here, since the
    store began."""
    num_damaged: Count = field(default=0, metadata=OMITTED)
    """Those of them that are here still: nothing else in this status counts them as held, but for
    the bytes that they take. They go when they are written again."""
    checked: StoreCheck | None = field(default=None, metadata=OMITTED)
    """A check that was asked for and is done, told once."""
    logs: Annotated[tuple[LogsHeld, ...], Longest(MAX_TOLD_LOGS)] = field(
        default=(), metadata=OMITTED
    )
    """Boundary logs on which votes rest."""
    certified: Annotated[tuple[CommittedSteps, ...], Longest(MAX_RUNS)] = field(
        default=(), metadata=OMITTED
    )
    """Quorums that have committed the steps of which it has commits, ascending by step; told where
    it holds logs of boundaries or compute weights, since a log counts by its quorum."""

    def __post_init__(self) -> None:
        cut_fields(self, "short_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubts:
    """The copies of one store that a check of all stores has found damaged."""

    check: Count
    """Number of the check."""
    keys: Annotated[tuple[SegmentKey, ...], Longest(MAX_BAD)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply:
    """The api's answer to a store's status."""

    check: Count = 0
    """Number of the newest check that was asked for; 0: none."""
    doubts: Doubts | None = field(default=None, metadata=OMITTED)
    """What the newest check that is judged has found damaged here; None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCoverage:
    """The losses after which the state of one position is still there, or can be made anew."""

    position: Index
    stage: Index
    inner: Index
    is_covered: bool
    """Whether stores can make its state anew if all its trainers are lost and no pod is."""
    why_not: Sentence = ""
    """Why they cannot: which unit lacks what; empty if they can."""
    num_members: Count = 0
    """Living pods with a member that has its state."""
    num_copies: Count = 0
    """Pods whose stores can do so alone; boundary logs, which lie with their sender, are taken from
    all pods."""
    replay_steps: Count = 0
    """Steps that would be replayed now, if it is covered."""
    pods: Annotated[tuple[Name, ...], Longest(MAX_LOSSES)] = ()
    """Names of the pods whose loss, alone, it does not survive."""
    domains: Annotated[tuple[Name, ...], Longest(MAX_LOSSES)] = ()
    """Names of the failure domains whose loss, alone, it does not survive."""
    stretch: Run | None = field(default=None, metadata=OMITTED)
    """Positions that are made anew together once all its trainers are lost, itself among them: it
    joins those that are being made anew beside it. None: it is made anew by itself."""

    def __post_init__(self) -> None:
        cut_fields(self, "why_not")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSummary:
    """The snapshots of a job on one line each: nothing in it grows with the job."""

    window: WindowHeld | None = None
    """The newest complete one; None before the first."""
    in_flight: WindowHeld | None = None
    """The one that is being copied; None where none is."""
    lag: Count = 0
    """Versions from the newest complete window's last one to the newest that stores know of."""
    kinds: Annotated[tuple[SegmentBytes, ...], Longest(MAX_KINDS)] = ()
    """Segments in all stores together, by kind."""
    memory_bytes: Count = 0
    """That all stores together may use."""
    used_bytes: Count = 0
    """Taken of it."""
    fullest: Name = ""
    """Name of the pod whose store has the least room left."""
    fullest_used_bytes: Count = 0
    fullest_memory_bytes: Count = 0
    num_stores: Count = 0
    """Living pods that have told of their store."""
    num_positions: Count = 0
    num_covered: Count = 0
    """Positions that stores can make anew."""
    num_survive_pod: Count = 0
    """Positions that survive the loss of any one pod."""
    num_survive_domain: Count = 0
    """Positions that survive the loss of any one failure domain."""
    replay_steps: Count = 0
    """The most steps that a position would replay now."""
    num_discarded: Count = 0
    """Segments and commits that were found damaged in the living pods' stores."""
    num_damaged: Count = field(default=0, metadata=OMITTED)
    """Those of them that are there still. They cover nothing."""
    num_refused: Count = 0
    """Segments that found no room in the living pods' stores."""
    short_of: Sentence = ""
    """Which store lacks room, and for what; empty where none does."""
    coverage: Sentence = ""
    """What is survived and what is not, in one sentence."""
    log: Name = field(default="", metadata=OMITTED)
    """Kind of log from which a replay is made, of
    :class:`mainstay_core.job.config.LogKind`; empty where it is not told."""
    ordering: Name = field(default="", metadata=OMITTED)
    """Order in which a window copies the units."""
    log_reason: Sentence = field(default="", metadata=OMITTED)
    """Why the job has this kind of log."""
    expected_bytes: Count = field(default=0, metadata=OMITTED)
    """What a pod's store holds at most while nobody is lost; 0: that is not known."""
    bound_bytes: Count = field(default=0, metadata=OMITTED)
    """What a pod's store must have room for; 0: that is not known."""
    is_auto: bool = field(default=False, metadata=OMITTED)
    """Whether both are for the longest window that trainers choose, and theirs may be shorter."""

    def __post_init__(self) -> None:
        cut_fields(self, "short_of", "coverage", "log_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedCopy:
    """A copy of a segment that is not like the others, or not as it was."""

    pod: Name
    """Name of the pod whose store has it."""
    key: SegmentKey
    unit_name: Name = ""
    why: Sentence
