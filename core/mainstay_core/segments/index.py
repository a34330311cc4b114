"""Knows the segments of one pod's store: what is kept, where, and what may go.

A segment comes in three moves: room is taken for it, its bytes are written there, and only then is
it put into the index, whole. Who writes has a room of its own until then, so a writer that dies in
the middle leaves nothing behind but its room. Who reads a segment, or sends it, holds it: its place
is given away only once nobody does, even if the segment itself was replaced or dropped meanwhile.

What is kept belongs to one lineage: the newest that was heard of, as a new one voids all states of
those before. ``keep_from`` moves only forward, whatever a slow writer of another pod says. The own
trainers of the pod may take it back, when the job goes on from an older checkpoint; where it has
none, a newer quorum's commit of an older step does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mainstay_core.base.bounds import MAX_MEMBERS
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.base.words import count, quote
from mainstay_core.segments.boundary_votes import BoundaryVotes
from mainstay_core.segments.evictions import COPIES, Kept, plan_evictions
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.segments.kept import Segment, UnitKey, UnitSegments, take_lost
from mainstay_core.segments.records import CommitRecords, refusal_of
from mainstay_core.segments.report_sizes import bounded
from mainstay_core.segments.spans import Span, SpanAllocator
from mainstay_core.wire.segments import (
    BOUNDARY_KINDS,
    MAX_EMPTY_SEGMENTS,
    MAX_HELD_LOGS,
    MAX_HELD_UNITS,
    Holder,
    LogsHeld,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    StoreReport,
)
from mainstay_core.wire.votes import CommitRecord


class SegmentIndex:
    """The segments of one store, and the arena in which they lie.

    Invariant: every place of the arena is free, or of exactly one room or segment.

    Args:
        job: the store's; segments of others are refused.
        size_bytes: of the arena, whole pages.
    """

    def __init__(self, job: JobUid, size_bytes: int) -> None:
        self._job, self._size_bytes = job, size_bytes
        self._spans = SpanAllocator(size_bytes)
        self._units: dict[UnitKey, UnitSegments] = {}
        self._logs: dict[SegmentKey, Segment] = {}
        """What crossed boundaries."""
        self._votes = BoundaryVotes(self._logs.__contains__)
        self.commits = CommitRecords()
        """With what is known of the units in their steps."""
        self._has_trainers = False
        """Whether a trainer of the pod has told a commit of this lineage."""
        self._num_empty = 0
        """Segments without bytes."""
        self._lineage = 0
        self._from_version = 0
        """What is older goes when this grows. It is not refused: where the job went back, others
        may write before the trainers here have said so."""
        self._completed_at = -1
        """The version at hand when that window was told to be complete."""
        self._is_broken = False
        """Whether logs since the newest complete window had to go: its copies make nothing anew."""
        self._fingerprint = ""
        """Of the lineage's first segment; empty before."""
        self.num_refused = self.num_evicted = self.num_discarded = 0
        """Segments that found no room, that gave theirs to others, and that were found damaged."""
        self.short_of = ""
        """Why the newest of those found none; empty once a whole window has found room again."""
        self._short_before = 0
        """How many had found no room, or had gone for others, when older versions were last
        dropped."""

    @property
    def free_bytes(self) -> int:
        """Bytes of the arena that nothing takes."""
        return self._spans.free_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the arena."""
        return self._size_bytes

    @property
    def lineage(self) -> int:
        """Lineage to which all that is kept belongs."""
        return self._lineage

    @property
    def from_version(self) -> int:
        """Version before which everything has gone."""
        return self._from_version

    @property
    def records(self) -> tuple[CommitRecord, ...]:
        """The commits that are kept, by step, ascending."""
        return self.commits.told

    # Rooms -----------------------------------------------------------------------

    def take_room(self, size: int, window: int = 0) -> Span | None:
        """Return a place to write ``size`` bytes into; None if it does not fit.

        Args:
            size: bytes of the segment.
            window: first version of the window in flight, if the segment is one that it needs
                (:func:`needed_in`). For it older logs and copies go, where there is no room.
        """
        room = self._spans.allocate(size)
        if room is None and window > self._from_version:
            self._make_room(size, window)
            room = self._spans.allocate(size)
        return room

    def _make_room(self, size: int, window: int) -> None:
        """Drop what the window in flight does not need, as far as it takes to have room.

        If all of it is not enough, nothing goes. Nor does anything at the version at which a window
        begins, unless that begins because another one is complete: all have settled, and some may
        be making this very version anew from what is here. Without a trainer no store can tell.
        """
        at = self.commits.newest + 1
        if not self._has_trainers or (window >= at and self._completed_at != at):
            return
        segments = {s.header.key: s for s in self.segments() if not s.num_readers and s.span.size}
        kept = (Kept(key, segment.header.window) for key, segment in segments.items())
        free, gone = self._spans.copy(), list[SegmentKey]()
        complete, is_broken = self._from_version, self._is_broken
        for keys in plan_evictions(kept, window=window, complete=complete, is_broken=is_broken):
            for key in keys:
                free.free(segments[key].span)
            gone += keys
            if free.largest >= size:
                break
        else:
            return
        self.num_evicted += len(gone)
        num_copies = sum(key.kind in COPIES for key in gone)
        self._is_broken |= num_copies < len(gone)
        self.short_of = (
            f"of the {self._size_bytes} bytes of the store of segments too few are left for the "
            f"window that begins at version {window}: {count(len(gone) - num_copies, 'log')} and "
            f"{count(num_copies, 'copy', 'copies')} of what was before it had to go "
            "(spec.snapshots.memory)"
        )
        self._drop(gone)
        for key in gone:
            self._votes.forget(key)  # other bytes may come in its place

    def why_full(self, size: int) -> str:
        """Return why no room was to be had, and note it."""
        self.num_refused += 1
        self.short_of = (
            f"a segment of {size} bytes does not fit into the store of segments: of its "
            f"{self._size_bytes} bytes {self._spans.free_bytes} are free, {self._spans.largest} of "
            "them in one piece (spec.snapshots.memory)"
        )
        return self.short_of

    def give_room_back(self, room: Span) -> None:
        """Take back a room into which nothing was written, or not all of it."""
        self._spans.free(room)

    # Segments --------------------------------------------------------------------

    def refusal_of(self, header: SegmentHeader, *, is_again: bool = False) -> str:
        """Return why a segment is not kept here; empty if it is.

        One that is sent again takes the place of no good one, however old that is.
        """
        key, unit = header.key, self._units.get((header.key.position, header.key.unit))
        if header.job != self._job:
            return f"{key} is of job {quote(header.job)}, this store is of job {quote(self._job)}"
        if key.lineage < self._lineage:
            return f"{key} is of lineage {key.lineage}, this store is at lineage {self._lineage}"
        if key.lineage > self._lineage:
            return ""
        if self._fingerprint and header.fingerprint != self._fingerprint:
            return (
                f"{key} has the fingerprint {quote(header.fingerprint)}, the segments of this "
                f"store have {quote(self._fingerprint)}"
            )
        if not header.size_bytes and self._num_empty >= MAX_EMPTY_SEGMENTS and not self.find(key):
            return (
                f"{key} is one more than the {MAX_EMPTY_SEGMENTS} segments without bytes that a "
                "store keeps"
            )
        if unit is None and len(self._units) >= MAX_HELD_UNITS:
            return f"{key} is of one more unit than the {MAX_HELD_UNITS} of which a store keeps any"
        here = None if is_again else self.find(key)
        if here is not None and not here.is_doubted and here.header.quorum > header.quorum:
            return f"{key} came after what quorum {here.header.quorum}, a newer one, has written"
        return ""

    def put(self, header: SegmentHeader, room: Span, holders: tuple[Holder, ...] = ()) -> Segment:
        """Keep a segment that is written, and has no refusal, in place of one of the same key."""
        assert not self.refusal_of(header)
        assert room.size == header.size_bytes
        self._move_to(header.key.lineage)
        self._fingerprint = header.fingerprint
        before = self.find(header.key)
        if before is not None and before.header.digest != header.digest:
            self._votes.forget(header.key)
        self.discard(header.key)
        segment = Segment(header, room, holders)
        self._num_empty += not header.size_bytes
        if header.key.kind in BOUNDARY_KINDS:
            self._logs[header.key] = segment
            return segment
        place = header.key.position, header.key.unit
        unit = self._units.setdefault(place, UnitSegments(header.unit_name, header.num_units))
        if header.key.kind is not SegmentKind.GRADIENT:
            self._drop(self._given_up(unit, header.window))
        unit = self._units.setdefault(place, unit)
        unit.segments[header.key] = segment
        return segment

    def _given_up(self, unit: UnitSegments, window: int) -> list[SegmentKey]:
        """Return a unit's copies of windows that were given up: another one has followed.

        What is kept begins with the newest complete window, and one is in flight: those between
        will never be complete. Where nothing of a complete one is here that votes have judged, or
        logs since it had to go, the newest state stays that they have judged: until those of the
        window in flight are judged, a replay has no other to start from.
        """
        copies = [s for key, s in unit.segments.items() if key.kind is not SegmentKind.GRADIENT]
        given_up = [s.header.key for s in copies if self._from_version < s.header.window < window]
        states = [s for s in copies if s.header.key.kind is SegmentKind.STATE and not s.is_doubted]
        complete = [s.header.key for s in states if s.header.window <= self._from_version]
        has_complete = any(self.commits.is_judged(key.version) for key in complete)
        if has_complete and not self._is_broken:
            return given_up
        judged = [
            key.version
            for key in given_up
            if key.kind is SegmentKind.STATE and self.commits.is_judged(key.version)
        ]
        newest = max(judged, default=-1)
        return [
            key for key in given_up if key.kind is not SegmentKind.STATE or key.version != newest
        ]

    def find(self, key: SegmentKey) -> Segment | None:
        """Return a segment; None if it is not kept here."""
        if key.kind in BOUNDARY_KINDS:
            return self._logs.get(key)
        unit = self._units.get((key.position, key.unit))
        return None if unit is None else unit.segments.get(key)

    def hold(self, segment: Segment) -> None:
        """Note that one more reads the bytes of a segment."""
        segment.num_readers += 1

    def release(self, segment: Segment) -> None:
        """Note that one reads the bytes of a segment no more."""
        segment.num_readers -= 1
        if not segment.is_kept and not segment.num_readers:
            self._spans.free(segment.span)

    def discard(self, key: SegmentKey) -> None:
        """Keep a segment no more; one that is not kept is none to discard."""
        place = key.position, key.unit
        unit = self._units.get(place)
        if key.kind in BOUNDARY_KINDS:
            segment = self._logs.pop(key, None)
        else:
            segment = None if unit is None else unit.segments.pop(key, None)
        if segment is None:
            return
        if unit is not None and not unit.segments:
            del self._units[place]
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Note that a segment is kept no more; its place goes with its last reader."""
        self._num_empty -= not segment.header.size_bytes
        segment.is_kept = False
        if not segment.num_readers:
            self._spans.free(segment.span)

    def needed(self, lineage: int, among: Collection[SegmentKey] | None = None) -> list[Segment]:
        """Return what a replay in a lineage may need of units, by key.

        States of a window that is not complete do not count: the next settle gives it up. Copies
        that somebody has found damaged do: nobody here can tell whose memory was wrong. Boundary
        logs stay with their sender. With ``among`` only these keys are looked at.
        """
        if lineage != self._lineage:
            return []
        found = [
            s
            for s in (self._of_units() if among is None else filter(None, map(self.find, among)))
            if s.header.key.kind is SegmentKind.GRADIENT or s.header.window <= self._from_version
        ]
        return sorted(found, key=lambda s: s.header.key)

    def _of_units(self) -> list[Segment]:
        return [s for unit in self._units.values() for s in unit.segments.values()]

    def note_voted(self, voted: VotedLogs) -> str:
        """Note that a vote rests on boundary logs; return which one is lacking, empty if none is.

        If one is lacking, none of them counts for this vote.
        """
        if voted.lineage != self._lineage and self._logs:
            return f"logs of lineage {voted.lineage} are not kept at lineage {self._lineage}"
        return self._votes.note(voted)

    def discard_damaged(self, key: SegmentKey) -> None:
        """Keep a segment no more whose bytes a trainer has found damaged."""
        self.num_discarded += self.find(key) is not None
        self.discard_outdated(key)

    def doubt(self, key: SegmentKey, nonce: str, digest: str) -> None:
        """Note that somebody has found a copy damaged, or void, if it is still the one meant.

        It stays until others take its place, and a settle is told of it: whoever reads it compares
        its digest. But it covers nothing.

        Args:
            key: of the segment.
            nonce: in the header of the copy that is meant.
            digest: in the same header.
        """
        segment = self.find(key)
        if segment is None or (segment.header.nonce, segment.header.digest) != (nonce, digest):
            return
        self.num_discarded += not segment.is_doubted
        segment.is_doubted = True

    def discard_outdated(self, key: SegmentKey) -> None:
        """Keep a segment no more whose writer has other bytes now, which found no room."""
        if self.find(key) is not None:
            self.discard(key)
            # What comes in its place may be other bytes, which nobody has voted on.
            self._votes.forget(key)

    # Commits, and what goes ------------------------------------------------------

    def record(self, record: CommitRecord, *, is_passed: bool = False) -> str:
        """Keep a commit, but none passed on where votes are known; return why not if damaged."""
        why, is_here = refusal_of(record), is_passed and record.lineage == self._lineage
        is_known = is_here and self.commits.knows_votes(record.commit.step)
        if why or record.lineage < self._lineage or is_known:
            return why
        self._move_to(record.lineage)
        self._has_trainers |= not is_passed
        if record.commit.step >= self._from_version:
            self.commits.put(record)
        return ""

    def keep_from(
        self,
        lineage: int,
        version: int,
        *,
        may_go_back: bool = False,
        drops_later: bool = True,
    ) -> None:
        """Drop states of older versions, and logs and records of older steps.

        Args:
            lineage: to which the version belongs.
            version: from which on all is kept.
            may_go_back: whether the job goes on from this version, which may be an older one than
                before.
            drops_later: whether nothing later counts then, whatever was kept of it. Nothing later
                can have been written since: a step takes all members, and each says this before it
                goes on.
        """
        if lineage < self._lineage:
            return
        self._move_to(lineage)
        if may_go_back:
            self._from_version = min(self._from_version, version)
            if not drops_later:
                return
            self._is_broken = False
            self._drop(s.header.key for s in self.segments() if s.header.key.version > version)
            self.commits.drop(lambda step: step >= version)
            self._votes.keep_steps(stop=version)
            return
        if version <= self._from_version:
            return
        num_short = self.num_refused + self.num_evicted
        if num_short == self._short_before:
            self.short_of = ""
        self._short_before = num_short
        self._completed_at = self.commits.newest + 1
        self._from_version, self._is_broken = version, False
        self._drop(s.header.key for s in self.segments() if s.header.key.version < version)
        self.commits.drop(lambda step: step < version)
        self._votes.keep_steps(first=version)

    def _move_to(self, lineage: int) -> None:
        """Drop everything when the lineage is a new one."""
        if lineage == self._lineage:
            return
        self._drop(segment.header.key for segment in self.segments())
        self.commits.drop(lambda _: True)
        self._votes.clear()
        self._lineage, self._from_version, self._fingerprint = lineage, 0, ""
        self._is_broken = self._has_trainers = False
        self._completed_at = -1

    def drop_lost(self) -> list[SegmentKey]:
        """Keep those no more that no key finds, as a bit of theirs has changed: nobody reads them.

        Returns:
            As what the index had them, which may be the key that has changed.
        """
        lost = take_lost(self._logs, self.find)
        if lost:
            self._votes.keep_whole(self._lineage)  # other bytes may come in their place
        for unit in self._units.values():
            lost += take_lost(unit.segments, self.find)
        self._units = {place: unit for place, unit in self._units.items() if unit.segments}
        for _, segment in lost:
            self._forget(segment)
        self.num_discarded += len(lost)
        return sorted(key for key, _ in lost)

    def segments(self) -> list[Segment]:
        """Return all that is kept: of units, and then boundary logs."""
        return [*self._of_units(), *self._logs.values()]

    def _drop(self, keys: Iterable[SegmentKey]) -> None:
        for key in keys:
            self.discard(key)

    # What is told ----------------------------------------------------------------

    def report(self, pod: PodUid, address: str, lineage: int) -> StoreReport:
        """Return what is kept of a lineage.

        Of a unit with more states or runs of gradients than a report names, the newest are told. A
        report that no message could carry is empty, and says why. Damaged commits are told, too.
        """
        if lineage != self._lineage:
            return StoreReport(pod=pod, address=address, lineage=lineage)
        self.commits.check_all()
        report = StoreReport(
            pod=pod,
            address=address,
            lineage=lineage,
            units=tuple(
                unit.told(place)
                for place, unit in sorted(self._units.items())
                # Of a larger number bits have changed, and no message carries it.
                if max(*place, unit.num_units) <= MAX_MEMBERS
            ),
            records=self.records,
            logs=tuple(self.log_runs()[-MAX_HELD_LOGS:]),
        )
        return bounded(report)

    def log_runs(self) -> list[LogsHeld]:
        """Return the boundary logs that votes rest on, those of types and steps in a row as one."""
        return self._votes.list_runs(self._lineage, lambda _: True)

    def good_log_runs(self) -> list[LogsHeld]:
        """Return the same of logs that nobody has found damaged."""
        return self._votes.list_runs(self._lineage, lambda key: not self._logs[key].is_doubted)
