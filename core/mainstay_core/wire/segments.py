"""Defines segments: what pods keep in memory so that a state which nobody alive holds is made anew.

A *segment* holds the whole state of one unit at one version, or its compute weights, or the reduced
gradient of one unit in one step, or what one stage gave its neighbour for one micro-batch. The pod
of the trainer that wrote it keeps it, and so do other pods (its *holders*). From these a trainer
that has no state computes the state of its position again, bit for bit (protocol section 7).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

from mainstay_core.base.bounds import (
    MAX_COUNT,
    MAX_MEMBERS,
    MAX_TYPES,
    Address,
    Count,
    Digest,
    Index,
    Longest,
    Name,
    Range,
    Sentence,
    TypeIndex,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.wire.votes import CommitRecord

MAX_SEGMENT_BYTES = 1 << 40
"""Of one segment: more than the memory of a pod."""
MAX_HELD_UNITS = 65_536
"""Units of which one pod keeps something."""
MAX_HELD_STATES = 64
"""Versions of one unit's state that a pod keeps: of a complete window and of one in flight, and
what a former membership left."""
MAX_RUNS = 64
"""Unbroken runs of steps whose gradients of one unit a pod keeps."""
MAX_RECORDS = 4096
"""Commits that a pod keeps beside its segments: those of two windows, and their lag."""
MAX_RECORD_BYTES = 16 * 1024 * 1024
"""Of all these commits together, so that a store's report fits into a frame beside its units. Those
of a model with many experts have hundreds of kilobytes each."""
MAX_EMPTY_SEGMENTS = 65_536
"""Segments without bytes that a pod keeps: they take no room that would bound them."""
MAX_BAD = 4096
"""Segments that one member names as damaged."""
MAX_HELD_LOGS = 65_536
"""Runs of boundary logs that a pod tells of."""
MAX_MICRO_BATCHES = 65_536
"""Micro-batches of one shard type."""
SEAL_BYTES = 16
"""Of the digest of a unit's segment, as of all other digests."""
MAX_HOLDERS = 64
"""Pods to which one segment is sent."""


class SegmentKind(enum.StrEnum):
    """The kinds of segments."""

    STATE = "state"
    """Masters and optimizer state of a unit at a version."""
    GRADIENT = "gradient"
    """The reduced gradient of a unit in a step."""
    COMPUTE = "compute"
    """The weights with which a unit computes, at a version."""
    ACTIVATION = "activation"
    """What a position gave the next stage for a micro-batch, in a step."""
    INPUT_GRADIENT = "input-gradient"
    """What a position gave the stage before for a micro-batch, in a step."""


BOUNDARY_KINDS = (SegmentKind.ACTIVATION, SegmentKind.INPUT_GRADIENT)
"""The kinds that cross the boundary of a stage. They are of a micro-batch and not of a unit."""


FlowNumber = Annotated[int, Range(-1, MAX_TYPES)]
"""A shard type or a micro-batch; -1 is none."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SegmentKey:
    """The name of a segment. Good segments of one key hold the same bytes, whoever wrote them."""

    lineage: Count
    position: Index
    """By stage, then by inner rank."""
    unit: Index
    """Place of the unit in its position's canonical order; 0 where it is of no unit."""
    kind: SegmentKind
    version: Count
    """Of a state or compute weights the version, else the step."""
    shard_type: FlowNumber = field(default=-1, metadata=OMITTED)
    """Of what crossed a boundary; else -1."""
    micro_batch: FlowNumber = field(default=-1, metadata=OMITTED)
    """The same."""

    def __str__(self) -> str:
        what = (
            f"type {self.shard_type} micro-batch {self.micro_batch}"
            if self.kind in BOUNDARY_KINDS
            else f"unit {self.unit}"
        )
        return f"{self.kind} of {what} of position {self.position} at {self.version}"


def cut_to_bounds(key: SegmentKey) -> SegmentKey:
    """Return a key that a message can carry, of one in whose memory bits have changed."""
    flow = (key.shard_type, key.micro_batch)
    shard_type, micro_batch = (min(max(number, -1), MAX_TYPES) for number in flow)
    return replace(
        key,
        lineage=min(max(key.lineage, 0), MAX_COUNT),
        position=min(max(key.position, 0), MAX_MEMBERS),
        unit=min(max(key.unit, 0), MAX_MEMBERS),
        version=min(max(key.version, 0), MAX_COUNT),
        shard_type=shard_type,
        micro_batch=micro_batch,
    )


def seal(key: SegmentKey, digest: str) -> str:
    """Return the digest of a unit's segment: of what it holds, and of the key by which it counts.

    So what is of another version, unit or position is not taken for it, whose bytes are whole. What
    crossed a boundary has its key in the digest of its bytes.

    Args:
        key: of the segment.
        digest: of what it holds.
    """
    place = f"{key.lineage}/{key.position}/{key.unit}/{key.kind}/{key.version}"
    return hashlib.blake2b(f"{place}/{digest}".encode(), digest_size=SEAL_BYTES).hexdigest()


def boundary_key(
    lineage: int, position: int, kind: SegmentKind, step: int, shard_type: int, micro_batch: int
) -> SegmentKey:
    """Return the key of what a position gave a neighbour for one micro-batch."""
    return SegmentKey(
        lineage=lineage,
        position=position,
        unit=0,
        kind=kind,
        version=step,
        shard_type=shard_type,
        micro_batch=micro_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The description of a segment, without its bytes."""

    key: SegmentKey
    job: JobUid
    fingerprint: Digest
    """Digest of the job's numerics fingerprint. Bytes of another one are not this job's."""
    unit_name: Name
    """Model-wide name of the unit, for people."""
    num_units: Index
    """Units of the position."""
    nonce: Name
    """Of the quorum in which it was written."""
    window: Count
    """First version of the window to which a state belongs; of a gradient that of the window in
    flight."""
    num_instalments: Count
    """Versions of that window."""
    size_bytes: Annotated[int, Range(0, MAX_SEGMENT_BYTES)]
    digest: Digest
    """Of the bytes and of the key (:func:`seal`), by whoever wrote them. Who reads them for a state
    checks it."""
    place: Count = field(default=0, metadata=OMITTED)
    """Of a state's unit in the order in which its window copies the units of the position."""
    quorum: Count = field(default=0, metadata=OMITTED)
    """Number of the quorum in which it was written: of two copies that of the newer one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod to which a segment is sent."""

    pod: PodUid
    address: Address
    """Where its store of segments listens."""


Holders = Annotated[tuple[Holder, ...], Longest(MAX_HOLDERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An unbroken run of steps."""

    first: Count
    last: Count


def runs_of(steps: Iterable[int]) -> list[Run]:
    """Return the unbroken runs of ascending steps."""
    runs: list[Run] = []
    for step in steps:
        if runs and runs[-1].last + 1 == step:
            runs[-1] = Run(first=runs[-1].first, last=step)
        else:
            runs.append(Run(first=step, last=step))
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitHeld:
    """The states and gradients of one unit that one pod keeps."""

    position: Index
    unit: Index
    unit_name: Name
    num_units: Index
    """Units of the position."""
    states: Annotated[tuple[Count, ...], Longest(MAX_HELD_STATES)] = ()
    """Versions of which it keeps the state, ascending."""
    gradients: Annotated[tuple[Run, ...], Longest(MAX_RUNS)] = ()
    """Steps of which it keeps the gradient, ascending."""
    computes: Annotated[tuple[Run, ...], Longest(MAX_RUNS)] = field(default=(), metadata=OMITTED)
    """Versions of which it keeps the compute weights, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LogsHeld:
    """Boundary logs that one pod keeps: of shard types in steps, each with all micro-batches."""

    position: Index
    """Whose member sent it."""
    kind: SegmentKind
    voted_in: Name
    """Quorum (as text) in which its sender voted on the steps. If another one has committed a step,
    these logs are of an attempt that does not count."""
    first_step: Count
    last_step: Count
    first_type: TypeIndex
    last_type: TypeIndex
    micro_batches: Annotated[int, Range(1, MAX_MICRO_BATCHES)]
    """Of each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSegment:
    """A segment that a member has read and found damaged."""

    key: SegmentKey
    pod: PodUid
    """Whose store has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """The content of one pod's store of segments, as far as it is of one lineage."""

    pod: PodUid
    address: Address
    """Where it serves its segments."""
    lineage: Count
    units: Annotated[tuple[UnitHeld, ...], Longest(MAX_HELD_UNITS)] = ()
    records: Annotated[tuple[CommitRecord, ...], Longest(MAX_RECORDS)] = ()
    """The commits that it has kept, by step, ascending."""
    bad: Annotated[tuple[BadSegment, ...], Longest(MAX_BAD)] = ()
    """What the member that tells this has found damaged, in any pod's store."""
    logs: Annotated[tuple[LogsHeld, ...], Longest(MAX_HELD_LOGS)] = field(
        default=(), metadata=OMITTED
    )
    """Boundary logs, ascending."""
    problem: Sentence = field(default="", metadata=OMITTED)
    """Why the store could not be asked, or not all is told; empty if it was and it is."""
    is_full: bool = field(default=False, metadata=OMITTED)
    """Whether a replay of this pod's member has found no room for what others of its stretch
    read."""

    def __post_init__(self) -> None:
        cut_fields(self, "problem")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldStores:
    """The reports of stores of segments that one member gives to the others."""

    reports: Annotated[tuple[StoreReport, ...], Longest(MAX_MEMBERS)]
    """Of its own pod first, then of those without a member that are its to ask."""
