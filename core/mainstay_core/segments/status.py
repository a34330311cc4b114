"""Says in short what a store of segments holds, and keeps the checksums of a check.

Units of which a store has the same versions are told together: those that one author copies in one
instalment. So what is told grows with authors and instalments, not with units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.wire.segments import (
    BOUNDARY_KINDS,
    MAX_BAD,
    MAX_HELD_STATES,
    MAX_RUNS,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    runs_of,
)
from mainstay_core.wire.stores import (
    MAX_CHECKED,
    MAX_GROUPS,
    MAX_KINDS,
    MAX_SUMS,
    MAX_TOLD_LOGS,
    MAX_WINDOWS,
    SUM_DIGITS,
    CheckedSegments,
    CommittedSteps,
    Doubts,
    SegmentBytes,
    StoreCheck,
    StoreStatus,
    UnitsHeld,
    WindowHeld,
)
from mainstay_core.wire.votes import CommitRecord

_KINDS_OF_UNITS = (SegmentKind.STATE, SegmentKind.GRADIENT, SegmentKind.COMPUTE)
_Alike = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(position, its units, versions of states, steps of gradients, versions of compute weights)."""


def status_of(index: SegmentIndex, pod: PodUid, address: str = "") -> StoreStatus:
    """Return the status of a store; of what is too much to tell, the newest is told.

    Complexity: linear in the segments, but for their order.
    """
    segments = index.segments()
    commits = index.commits
    records = commits.good
    judged = (r.commit.step for r in records if r.states)
    logs = index.good_log_runs()
    has_boundaries = bool(logs) or any(s.header.key.kind is SegmentKind.COMPUTE for s in segments)
    return StoreStatus(
        pod=pod,
        address=address,
        memory_bytes=index.size_bytes,
        used_bytes=index.size_bytes - index.free_bytes,
        kinds=_kinds(segments),
        lineage=index.lineage,
        keep_from=index.from_version,
        windows=_windows(segments),
        units=_groups(s.header for s in segments if not s.is_doubted),
        judged=tuple(runs_of(judged)[-MAX_RUNS:]),
        num_refused=index.num_refused + index.num_evicted,
        short_of=index.short_of,
        num_discarded=index.num_discarded + commits.num_discarded,
        num_damaged=sum(s.is_doubted for s in segments) + len(commits.damaged),
        logs=tuple(logs[-MAX_TOLD_LOGS:]),
        certified=_certified(records)[-MAX_RUNS:] if has_boundaries else (),
    )


def _kinds(segments: Sequence[Segment]) -> tuple[SegmentBytes, ...]:
    sums: dict[str, list[int]] = {}
    for segment in segments:
        sums.setdefault(segment.header.key.kind.value, []).append(segment.header.size_bytes)
    return tuple(
        SegmentBytes(kind=kind, num_segments=len(sizes), size_bytes=sum(sizes))
        for kind, sizes in sorted(sums.items())
    )[:MAX_KINDS]


def _windows(segments: Sequence[Segment]) -> tuple[WindowHeld, ...]:
    found = {
        (s.header.window, s.header.num_instalments)
        for s in segments
        if s.header.key.kind is SegmentKind.STATE
    }
    windows = [WindowHeld(first=first, length=length) for first, length in sorted(found)]
    return tuple(windows[-MAX_WINDOWS:])


def _certified(records: Iterable[CommitRecord]) -> tuple[CommittedSteps, ...]:
    """Return which quorums have committed steps, runs of steps at once."""
    found: list[CommittedSteps] = []
    for record in records:
        step, quorum = record.commit.step, record.certified_in
        if found and (found[-1].quorum, found[-1].last) == (quorum, step - 1):
            found[-1] = replace(found[-1], last=step)
        else:
            found.append(CommittedSteps(quorum=quorum, first=step, last=step))
    return tuple(found)


def _groups(headers: Iterable[SegmentHeader]) -> tuple[UnitsHeld, ...]:
    """Return what is held of each unit, those with the same versions in one group."""
    held: dict[tuple[int, int, int], dict[SegmentKind, list[int]]] = {}
    for header in headers:
        key = header.key
        if key.kind in BOUNDARY_KINDS:
            continue  # of no unit
        place = (key.position, header.num_units, key.unit)
        held.setdefault(place, {}).setdefault(key.kind, []).append(key.version)
    groups: dict[_Alike, list[int]] = {}
    for (position, size, unit), by_kind in sorted(held.items()):
        states, gradients, computes = (
            tuple(sorted(by_kind.get(kind, ()))) for kind in _KINDS_OF_UNITS
        )
        groups.setdefault((position, size, states, gradients, computes), []).append(unit)
    told = [
        UnitsHeld(
            position=position,
            num_units=size,
            units=tuple(runs_of(units)),
            states=states[-MAX_HELD_STATES:],
            gradients=tuple(runs_of(gradients)[-MAX_RUNS:]),
            computes=tuple(runs_of(computes)[-MAX_RUNS:]),
        )
        for (position, size, states, gradients, computes), units in sorted(groups.items())
    ]
    return tuple(told[:MAX_GROUPS])


class Checksums:
    """The checksums of all segments of one store, as they are found one by one."""

    def __init__(self) -> None:
        self._known: dict[SegmentKey, tuple[str, int]] = {}
        """Of segments that were checked before: nonce and digest of the header, and the sum."""
        self._found: dict[SegmentKey, tuple[SegmentHeader, int]] = {}
        self._changed: list[SegmentKey] = []
        self._doubted: list[SegmentKey] = []
        self._newest: tuple[int, dict[SegmentKey, SegmentHeader]] = (0, {})
        """Number of the newest check that is done, and what it has read; 0 once it was judged."""

    def add(self, header: SegmentHeader, checksum: int, *, is_doubted: bool = False) -> None:
        """Take note of a segment that was read.

        Args:
            header: of the segment.
            checksum: CRC-32 of its bytes.
            is_doubted: whether it was found damaged before.
        """
        written = f"{header.nonce}/{header.digest}"
        before = self._known.get(header.key)
        if is_doubted:
            self._doubted.append(header.key)
            self._known.pop(header.key, None)  # a good copy may come with the same header
        elif before is not None and before[0] == written and before[1] != checksum:
            self._changed.append(header.key)
        else:
            self._known[header.key] = written, checksum
        self._found[header.key] = header, checksum

    def close(self, number: int, lineage: int, seconds: float) -> StoreCheck:
        """Return the outcome of the check, and begin the next one."""
        found, changed = self._found, tuple(self._changed[:MAX_BAD])
        doubted = tuple(self._doubted[:MAX_BAD])
        self._known = {key: known for key, known in self._known.items() if key in found}
        self._found, self._changed, self._doubted = {}, [], []
        self._newest = number, {key: header for key, (header, _) in found.items()}
        return StoreCheck(
            number=number,
            num_segments=len(found),
            size_bytes=sum(header.size_bytes for header, _ in found.values()),
            seconds=seconds,
            lineage=lineage,
            segments=_checked(found),
            changed=changed,
            doubted=doubted,
        )

    def take_headers(self, doubts: Doubts) -> tuple[SegmentHeader, ...]:
        """Return the copies here that a check has found damaged.

        That it is told again is of no concern: what came in their place meanwhile may have the same
        headers. So is what a check before the newest one has found.
        """
        number, read = self._newest
        if doubts.check != number:
            return ()
        self._newest = 0, {}
        for key in doubts.keys:
            self._known.pop(key, None)  # a good copy may come with the same header
        return tuple(read[key] for key in doubts.keys if key in read)


def _checked(
    found: dict[SegmentKey, tuple[SegmentHeader, int]],
) -> tuple[CheckedSegments, ...]:
    lines = []
    for _, keys in groupby(sorted(found, key=_line_of), key=lambda key: replace(key, version=0)):
        of_line = [*keys][-MAX_SUMS // SUM_DIGITS :]
        runs = runs_of(key.version for key in of_line)[-MAX_RUNS:]
        told = [key for key in of_line if key.version >= runs[0].first]
        lines.append(
            CheckedSegments(
                key=told[0],
                unit_name=found[told[0]][0].unit_name,
                versions=tuple(runs),
                sums="".join(f"{found[key][1]:0{SUM_DIGITS}x}" for key in told),
            )
        )
    return tuple(lines[:MAX_CHECKED])


def _line_of(key: SegmentKey) -> tuple[SegmentKey, int]:
    return replace(key, version=0), key.version
