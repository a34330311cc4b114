"""Defines segments: what pods keep in memory so that a state which nobody alive holds is made anew.

A *segment* holds either the whole state of one unit at one version, or the reduced gradient of one
unit in one step. The pod of the trainer that wrote it keeps it, and so do other pods (its
*holders*). From the newest state of each unit and the gradients since then, a trainer that has no
state computes the state of its position again, bit for bit (protocol section 7).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    Address,
    Count,
    Digest,
    Index,
    Longest,
    Name,
    Range,
    Sentence,
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
MAX_BAD = 4096
"""Segments that one member names as damaged."""
MAX_HOLDERS = 64
"""Pods to which one segment is sent."""


class SegmentKind(enum.StrEnum):
    """The kinds of segments."""

    STATE = "state"
    """Masters and optimizer state of a unit at a version."""
    GRADIENT = "gradient"
    """The reduced gradient of a unit in a step."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SegmentKey:
    """The name of a segment. Good segments of one key hold the same bytes, whoever wrote them."""

    lineage: Count
    position: Index
    """By stage, then by inner rank."""
    unit: Index
    """Place of the unit in its position's canonical order."""
    kind: SegmentKind
    version: Count
    """Of a state its version, of a gradient its step."""

    def __str__(self) -> str:
        return f"{self.kind} of unit {self.unit} of position {self.position} at {self.version}"


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
    """Of the bytes, by whoever wrote them. Who reads them for a state checks it."""


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
    problem: Sentence = field(default="", metadata=OMITTED)
    """Why the store could not be asked; empty if it was."""

    def __post_init__(self) -> None:
        cut_fields(self, "problem")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldStores:
    """The reports of stores of segments that one member gives to the others."""

    reports: Annotated[tuple[StoreReport, ...], Longest(MAX_MEMBERS)]
    """Of its own pod first, then of those without a member that are its to ask."""
