"""A full store keeps whatever the window in flight needs, against a twin that tries all sets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.core.segments.keys import JOB, header_of, key_of, record_of

from mainstay_core.segments.evictions import COPIES, Kept, needed_in, plan_evictions
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.wire.segments import SegmentHeader, SegmentKey, SegmentKind, boundary_key


def draw_kept(rng: random.Random) -> list[Kept]:
    found = {}
    for _ in range(rng.randrange(14)):
        kind = rng.choice([*SegmentKind])
        version, position = rng.randrange(10), rng.randrange(2)
        if kind in (SegmentKind.ACTIVATION, SegmentKind.INPUT_GRADIENT):
            key = boundary_key(0, position, kind, version, rng.randrange(2), 0)
        else:
            key = key_of(version, unit=rng.randrange(2), kind=kind, position=position)
        found[key] = Kept(key, rng.randrange(version + 1))
    return [*found.values()]


@pytest.mark.parametrize("seed", range(200))
def test_the_window_in_flight_loses_nothing_and_logs_go_before_copies(seed: int) -> None:
    rng = random.Random(seed)
    kept, window, complete = draw_kept(rng), rng.randrange(10), rng.randrange(6)

    groups = plan_evictions(kept, window=window, complete=complete)

    gone = [key for keys in groups for key in keys]
    written_in = dict(kept)
    if window <= complete:
        assert gone == []
        return
    needed = {
        key
        for key, first in kept
        if (first >= window if key.kind in COPIES else key.version >= window)
    }
    assert sorted(gone) == sorted(written_in.keys() - needed)
    ranks = [
        1 if key.kind not in COPIES else 0 if written_in[key] > complete else 2 for key in gone
    ]
    assert ranks == sorted(ranks)
    for keys in groups:
        assert len({(k.position, k.version, k.kind in COPIES) for k in keys}) == 1
    assert plan_evictions(kept[::-1], window=window, complete=complete) == groups


LENGTH, LAG, UNITS = 3, 2, 2
"""Of a window; a unit's states and gradients are a page each."""


@dataclass
class Trained:
    """Steps of a job whose windows follow each other, and one store that keeps all of them."""

    index: SegmentIndex
    window: int = 0
    """First version of the one in flight."""
    complete: int | None = None
    lacks: set[int] = field(default_factory=set)
    """Windows of which a copy found no room."""

    def write(self, kind: str, version: int, unit: int) -> bool:
        header = header_of(key_of(version, unit, kind), PAGE_BYTES, window=self.window)
        room = self.index.take_room(header.size_bytes, needed_in(header.key, header.window))
        if room is not None:
            self.index.put(header, room)
        return room is not None

    def step(self, version: int) -> None:
        turn = version - self.window
        if turn < LENGTH:
            for unit in range(UNITS):
                if unit % LENGTH == turn and not self.write("state", version, unit):
                    self.lacks.add(self.window)
        for unit in range(UNITS):
            self.write("gradient", version, unit)
        self.index.record(record_of(version))
        if turn == LENGTH + LAG - 1:
            if self.window not in self.lacks:
                self.index.keep_from(0, self.window)
                self.complete = self.window
            self.window = version + 1

    def covers(self, first: int | None, version: int) -> bool:
        """Whether a window's states and all gradients since make the next version anew."""
        if first is None:
            return False
        return all(
            self.index.find(key_of(first + unit % LENGTH, unit)) is not None
            and all(
                self.index.find(key_of(step, unit, "gradient")) is not None
                for step in range(first + unit % LENGTH, version + 1)
            )
            for unit in range(UNITS)
        )


PERIOD = LENGTH + LAG
WHOLE = UNITS * (2 + 2 * PERIOD)
"""Pages of two windows of states, and of the gradients since the older began."""
LEAST = UNITS * (1 + PERIOD) + 1
"""Pages of one window with its logs, and one more."""


@pytest.mark.parametrize("num_pages", range(LEAST, WHOLE + 2))
def test_some_complete_window_and_its_logs_exist_unless_memory_cannot_hold_it(
    num_pages: int,
) -> None:
    job = Trained(SegmentIndex(JOB, num_pages * PAGE_BYTES))
    num_covered = 0
    for version in range(12 * PERIOD):
        job.step(version)
        if version >= PERIOD - 1:
            num_covered += job.covers(job.complete, version)
            if num_pages >= WHOLE:
                assert job.covers(job.complete, version)
    assert job.lacks == set(), "training's newest copies always find room"
    assert bool(job.index.num_evicted) == (num_pages < WHOLE)
    # Each window covers its units when it is complete, whatever went before.
    assert num_covered >= 11
    if num_pages >= WHOLE:
        assert job.index.short_of == ""


def test_what_does_not_suffice_stays() -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    for version, kind in ((0, "state"), (0, "gradient"), (6, "state"), (6, "gradient")):
        header = header_of(key_of(version, 0, kind), PAGE_BYTES, window=version)
        room = index.take_room(PAGE_BYTES)
        assert room is not None
        index.put(header, room)

    index.record(record_of(6))
    assert index.take_room(3 * PAGE_BYTES, window=6) is None
    assert index.take_room(PAGE_BYTES) is None, "nothing goes for what no window needs"
    assert (len(index.segments()), index.num_evicted) == (4, 0)
    assert index.take_room(PAGE_BYTES, window=6) is not None
    assert (len(index.segments()), index.num_evicted) == (3, 1)
    assert index.find(key_of(0, 0, "state")) is not None
    assert "the window that begins at version 6: 1 log and 0 copies" in index.short_of


def test_nothing_goes_at_the_version_at_which_all_have_settled() -> None:
    """Some may be making that very version anew from what is here."""
    index = SegmentIndex(JOB, 2 * PAGE_BYTES)
    for version in (0, 1):
        put(index, header_of(key_of(version, 0, "gradient"), PAGE_BYTES, window=0))
    assert index.take_room(PAGE_BYTES, window=4) is None, "it knows of no commit"
    index.record(record_of(3))
    assert index.take_room(PAGE_BYTES, window=4) is None
    index.record(record_of(4))
    assert index.take_room(PAGE_BYTES, window=4) is not None


def test_where_a_complete_window_is_broken_its_copies_go_before_newer_ones() -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    for version, kind, window in ((0, "state", 0), (0, "gradient", 0), (2, "state", 2)):
        put(index, header_of(key_of(version, 0, kind), PAGE_BYTES, window=window))
    put(index, header_of(key_of(2, 0, "gradient"), PAGE_BYTES, window=2))
    index.record(record_of(4))
    rooms = [index.take_room(PAGE_BYTES, window=2), index.take_room(PAGE_BYTES, window=4)]
    assert None not in rooms
    kept = {segment.header.key for segment in index.segments()}
    assert kept == {key_of(2, 0, "state"), key_of(2, 0, "gradient")}


def test_what_is_read_stays_where_it_is() -> None:
    index = SegmentIndex(JOB, PAGE_BYTES)
    room = index.take_room(PAGE_BYTES)
    assert room is not None
    segment = index.put(header_of(key_of(1, 0, "gradient"), PAGE_BYTES, window=0), room)
    index.record(record_of(4))
    index.hold(segment)
    assert index.take_room(PAGE_BYTES, window=4) is None
    index.release(segment)
    assert index.take_room(PAGE_BYTES, window=4) is not None


def test_a_log_that_went_has_no_votes_when_other_bytes_come() -> None:
    index = SegmentIndex(JOB, PAGE_BYTES)
    key = boundary_key(0, 0, SegmentKind.ACTIVATION, 1, 0, 0)
    put(index, header_of(key, PAGE_BYTES))
    vote = VotedLogs(
        request=1,
        lineage=0,
        position=0,
        step=1,
        quorum="q1",
        kinds=(SegmentKind.ACTIVATION,),
        types=(0,),
        micro_batches=1,
    )
    assert index.note_voted(vote) == ""
    index.record(record_of(4))
    room = index.take_room(PAGE_BYTES, window=4)
    assert room is not None
    index.give_room_back(room)

    put(index, header_of(key, PAGE_BYTES, digest="other"))

    assert index.log_runs() == []


def put(index: SegmentIndex, header: SegmentHeader) -> SegmentKey:
    room = index.take_room(header.size_bytes)
    assert room is not None
    return index.put(header, room).header.key
