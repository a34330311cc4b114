"""What a store of segments keeps, against a twin that keeps everything in one list."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest
from tests.core.segments.keys import JOB, header_of, key_of, record_of

from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.segments import index as index_module
from mainstay_core.segments import records as records_module
from mainstay_core.segments import report_sizes
from mainstay_core.segments.deliveries import note_passed
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.segments.report_sizes import (
    MAX_WHY,
    fit_reports,
    record_bytes,
    report_bytes,
)
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.wire.segments import (
    BadSegment,
    LogsHeld,
    Run,
    SegmentHeader,
    SegmentKey,
    SegmentKind,
    StoreReport,
    ToldStores,
    UnitHeld,
    boundary_key,
    runs_of,
)
from mainstay_core.wire.votes import CommitRecord, seal_record

POD = PodUid("pod-1")


def store(num_pages: int = 8) -> SegmentIndex:
    return SegmentIndex(JOB, num_pages * PAGE_BYTES)


def put(index: SegmentIndex, header: SegmentHeader) -> Segment:
    room = index.take_room(header.size_bytes)
    assert room is not None
    return index.put(header, room)


def report(index: SegmentIndex, lineage: int = 0) -> StoreReport:
    return index.report(POD, "10.0.0.1:1", lineage)


def test_a_segment_is_kept_once_it_is_whole() -> None:
    index = store()
    room = index.take_room(10)
    assert room is not None
    assert index.find(key_of(3)) is None
    assert report(index).units == ()

    segment = index.put(header_of(key_of(3)), room)

    assert index.find(key_of(3)) is segment
    (unit,) = report(index).units
    assert (unit.unit_name, unit.states, unit.gradients) == ("layer.0", (3,), ())


def test_a_room_that_is_given_back_is_free() -> None:
    index = store(1)
    room = index.take_room(PAGE_BYTES)
    assert room is not None
    assert index.take_room(1) is None
    assert "1 bytes does not fit" in index.why_full(1)

    index.give_room_back(room)

    assert index.free_bytes == PAGE_BYTES


def test_a_segment_of_the_same_key_takes_the_place_of_the_first() -> None:
    index = store(2)
    put(index, header_of(key_of(3), nonce="a"))

    again = put(index, header_of(key_of(3), nonce="b"))

    assert index.find(key_of(3)) is again
    assert index.free_bytes == PAGE_BYTES


@pytest.mark.parametrize("kind", ["state", "compute", "gradient"])
def test_what_a_newer_quorum_has_written_stays_whichever_comes_last(kind: str) -> None:
    """Pods that copied a unit in the quorum before may be late with it."""
    key = key_of(6, kind=kind)
    older = header_of(key, window=4, quorum=2, nonce="older")
    newer = header_of(key, window=6, quorum=3, nonce="newer")

    index = store()
    put(index, older)
    assert put(index, newer) is index.find(key)

    index = store()
    segment = put(index, newer)
    assert "quorum 3" in index.refusal_of(older)
    assert index.refusal_of(older, is_again=True) == "", "that takes nothing's place"
    assert index.refusal_of(newer) == ""
    index.doubt(key, "newer", "d")
    assert index.refusal_of(older) == "", "a good copy takes the place of a damaged one"
    assert index.find(key) is segment


def test_bytes_that_somebody_reads_stay_until_the_last_one_is_done() -> None:
    index = store(1)
    segment = put(index, header_of(key_of(3)))
    index.hold(segment)
    index.hold(segment)
    index.keep_from(0, 4)
    assert index.find(key_of(3)) is None

    index.release(segment)
    assert index.free_bytes == 0
    index.release(segment)

    assert index.free_bytes == PAGE_BYTES


def test_a_segment_that_is_kept_outlasts_its_readers() -> None:
    index = store(1)
    segment = put(index, header_of(key_of(3)))
    index.hold(segment)
    index.release(segment)

    assert index.find(key_of(3)) is segment
    index.discard(key_of(3))
    index.discard(key_of(3))
    assert index.free_bytes == PAGE_BYTES


def test_what_is_older_goes_and_does_not_come_back() -> None:
    index = store()
    for version in range(4):
        put(index, header_of(key_of(version)))
        put(index, header_of(key_of(version, kind="gradient")))
        index.record(record_of(version))

    index.keep_from(0, 2)
    index.keep_from(0, 1)
    index.record(record_of(1))

    (unit,) = report(index).units
    assert unit.states == (2, 3)
    assert unit.gradients == (Run(first=2, last=3),)
    assert [r.commit.step for r in report(index).records] == [2, 3]


def test_the_pods_own_trainers_say_that_the_job_went_back() -> None:
    index = store()
    index.keep_from(0, 4)
    for version in (4, 5):
        put(index, header_of(key_of(version)))
        index.record(record_of(version))
    put(index, header_of(key_of(1)))  # of another pod, whose trainer knows it already

    index.keep_from(0, 1)
    assert [unit.states for unit in report(index).units] == [(1, 4, 5)]
    index.keep_from(0, 1, may_go_back=True)

    assert [unit.states for unit in report(index).units] == [(1,)]
    assert report(index).records == ()
    index.record(record_of(1))
    put(index, header_of(key_of(2)))
    index.keep_from(0, 2, may_go_back=True)
    assert [unit.states for unit in report(index).units] == [(1, 2)]

    for version in (3, 4):
        put(index, header_of(key_of(version)))
        index.record(record_of(version))
    index.keep_from(0, 3, may_go_back=True)
    assert [unit.states for unit in report(index).units] == [(1, 2, 3)], "later ones never count"
    assert [r.commit.step for r in report(index).records] == [1]


def test_a_pod_that_was_away_while_the_job_went_back_keeps_what_comes_after() -> None:
    index = store()
    put(index, header_of(key_of(9)))
    index.keep_from(0, 9)
    index.record(record_of(5))
    assert report(index).records == (), "it is older than the window that the store knows"

    index.keep_from(0, 5, may_go_back=True, drops_later=False)
    index.record(record_of(5))
    index.keep_from(0, 6, may_go_back=True, drops_later=False)

    assert [r.commit.step for r in report(index).records] == [5]
    assert [unit.states for unit in report(index).units] == [(9,)], "the same bits as before"


def test_states_of_a_window_that_was_given_up_go_when_the_next_one_writes() -> None:
    index = store()
    index.keep_from(0, 2)
    index.record(record_of(2))
    index.record(record_of(5))
    for version, window in ((2, 2), (3, 2), (5, 5), (7, 7)):
        put(index, header_of(key_of(version), window=window))
    put(index, header_of(key_of(6, kind="gradient"), window=5))

    (unit,) = report(index).units

    assert unit.states == (2, 3, 7)
    assert unit.gradients == (Run(first=6, last=6),)


def test_the_newest_judged_state_stays_where_no_window_was_complete() -> None:
    """A settle gives the first window up; the states of the next one are judged a step later."""
    index = store()
    for version, window in ((3, 3), (4, 4)):
        put(index, header_of(key_of(version), window=window))
        index.record(record_of(version))
    assert [unit.states for unit in report(index).units] == [(3, 4)], "3 was all there was"

    put(index, header_of(key_of(6), window=6))
    assert [unit.states for unit in report(index).units] == [(4, 6)]
    put(index, header_of(key_of(7), window=7))

    assert [unit.states for unit in report(index).units] == [(4, 7)], "no vote has judged 6"


def test_it_stays_as_well_where_the_votes_on_the_complete_window_are_not_known_here() -> None:
    """A pod without a member may have been sent copies, and not the commits of their steps."""
    index = store()
    index.keep_from(0, 2)
    for version, window in ((2, 2), (5, 5), (7, 7)):
        put(index, header_of(key_of(version), window=window))
        index.record(record_of(5))

    assert [unit.states for unit in report(index).units] == [(2, 5, 7)]
    index.record(record_of(2))
    put(index, header_of(key_of(9), window=9))
    assert [unit.states for unit in report(index).units] == [(2, 9)]


def test_a_new_lineage_voids_what_was_kept() -> None:
    index = store()
    put(index, header_of(key_of(5)))
    index.record(record_of(5))
    index.keep_from(0, 5)

    put(index, header_of(key_of(2, lineage=1), fingerprint="f2"))

    assert report(index, 0) == StoreReport(pod=POD, address="10.0.0.1:1", lineage=0)
    assert [unit.states for unit in report(index, 1).units] == [(2,)]
    assert report(index, 1).records == ()
    assert index.free_bytes == 7 * PAGE_BYTES
    index.record(record_of(6, lineage=0))
    index.keep_from(0, 9)
    assert [unit.states for unit in report(index, 1).units] == [(2,)]


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (header_of(key_of(3, lineage=1), job=JobUid("other")), "is of job 'other'"),
        (header_of(key_of(3, lineage=0)), "is of lineage 0, this store is at lineage 1"),
        (header_of(key_of(3, lineage=1), fingerprint="f2"), "has the fingerprint 'f2'"),
        (header_of(key_of(1, lineage=1)), ""),
        (header_of(key_of(3, lineage=1)), ""),
        (header_of(key_of(3, lineage=2), fingerprint="f2"), ""),
    ],
)
def test_what_is_not_kept_is_refused_by_name(header: SegmentHeader, why: str) -> None:
    index = store()
    put(index, header_of(key_of(2, lineage=1)))
    index.keep_from(1, 2)

    assert (why in index.refusal_of(header)) if why else index.refusal_of(header) == ""


def test_one_unit_more_than_a_report_has_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "MAX_HELD_UNITS", 2)
    index = store()
    put(index, header_of(key_of(0, unit=0)))
    put(index, header_of(key_of(0, unit=1)))

    assert "one more unit than the 2" in index.refusal_of(header_of(key_of(0, unit=2)))
    assert index.refusal_of(header_of(key_of(1, unit=1))) == ""


def test_of_too_many_records_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_RECORDS", 2)
    index = store()
    for step in (4, 5, 6):
        index.record(record_of(step))

    assert [r.commit.step for r in report(index).records] == [5, 6]


def test_of_too_many_bytes_of_records_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    many = record_of(0)
    records = [
        seal_record(
            replace(many, commit=replace(many.commit, step=step, statistics=(10**6,) * 100))
        )
        for step in range(6)
    ]
    monkeypatch.setattr(records_module, "MAX_RECORD_BYTES", 3 * len(codec.dumps(records[0])))
    index = store()
    for record in records:
        index.record(record)

    told = report(index).records
    assert [r.commit.step for r in told] in ([4, 5], [3, 4, 5])
    assert len(codec.dumps(told)) <= 3 * len(codec.dumps(records[0])) + 10


def test_the_room_of_records_is_free_again_when_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    size = record_bytes(record_of(0))
    monkeypatch.setattr(records_module, "MAX_RECORD_BYTES", 3 * size)
    index = store()
    for step in (4, 6, 5, 6, 6):  # one that comes again takes no more room
        index.record(record_of(step))
    assert [r.commit.step for r in index.records] == [4, 5, 6]
    index.keep_from(0, 6)
    index.record(record_of(5))  # too old
    index.record(record_of(8))
    index.record(record_of(7))
    assert [r.commit.step for r in index.records] == [6, 7, 8]
    index.keep_from(0, 7, may_go_back=True)
    for step in (7, 8, 9):
        index.record(record_of(step))
    assert [r.commit.step for r in index.records] == [7, 8, 9]
    index.record(record_of(1, lineage=1))
    assert [r.commit.step for r in index.records] == [1]


def test_a_report_that_no_message_carries_counts_as_empty_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = store()
    for version in range(3):
        put(index, header_of(key_of(version)))
        index.record(record_of(version))
    size = report_bytes(report(index))
    assert report(index).problem == ""
    monkeypatch.setattr(report_sizes, "MAX_REPORT_BYTES", size - 1)
    told = report(index)
    assert (told.units, told.records, told.logs) == ((), (), ())
    assert told.problem.startswith("what it holds takes ")


def test_a_commit_that_comes_damaged_changes_nothing() -> None:
    index = store()
    assert not index.record(record_of(3))
    for damaged in (replace(record_of(3), chain="x"), replace(record_of(4), lineage=1)):
        for is_passed in (False, True):
            assert "does not have the seal" in index.record(damaged, is_passed=is_passed)
        assert "does not have the seal" in note_passed(index, damaged)
    assert index.records == (record_of(3),)
    assert index.lineage == 0


def test_a_commit_that_is_passed_on_takes_the_place_of_a_damaged_one() -> None:
    index = store()
    records = index.commits
    records.put(replace(record_of(3), chain="x"))
    assert not note_passed(index, record_of(3))
    assert index.records == (record_of(3),)


def test_a_commit_that_is_passed_on_takes_no_place_of_one_whose_votes_are_known() -> None:
    index = store()
    rolled = record_of(4, states=(), gradients=())
    for own in (record_of(3, chain="own"), rolled):
        index.record(own)
    for step in (3, 4, 5):
        index.record(record_of(step, chain="passed"), is_passed=True)
    assert [r.chain for r in index.records] == ["own", "passed", "passed"]
    index.record(record_of(1, lineage=1), is_passed=True)
    assert [r.commit.step for r in index.records] == [1], "its votes were of another lineage"
    index.record(record_of(9), is_passed=True)
    assert len(index.records) == 1


@pytest.mark.parametrize("is_passed", [False, True])
def test_a_store_without_a_trainer_drops_nothing_for_a_window_in_flight(is_passed: bool) -> None:
    """It cannot tell whether the version at hand is one that others make anew."""
    index = store(2)
    for version in (2, 3):
        put(index, header_of(key_of(version), window=version))
        index.record(record_of(version), is_passed=is_passed)
    index.record(record_of(4), is_passed=is_passed)
    assert (index.take_room(1, window=4) is None) is is_passed


def test_a_trainer_of_the_lineage_before_tells_nothing_of_the_next_one() -> None:
    """Its commits come from other pods until a trainer of this pod is back."""
    index = store(2)
    index.record(record_of(3))
    for version in (8, 9):
        index.keep_from(1, 8)
        put(index, header_of(key_of(version, kind="gradient", lineage=1), window=8))
    assert index.take_room(1, window=11) is None
    index.record(record_of(10, lineage=1))
    assert index.take_room(1, window=9) is not None


@pytest.mark.parametrize("seed", range(30))
def test_what_a_report_takes_is_bounded_without_encoding_it(seed: int) -> None:
    rng = random.Random(seed)
    largest = 2**53
    runs = tuple(Run(first=largest - 1, last=largest) for _ in range(rng.randrange(9)))
    unit = UnitHeld(
        position=rng.randrange(1000),
        unit=rng.randrange(1000),
        unit_name=rng.choice(["layers.3", "\u20ac" * 40, '"' * 40]),
        num_units=1000,
        states=tuple(rng.choice([1, largest]) for _ in range(rng.randrange(9))),
        gradients=runs,
        computes=runs[:2],
    )
    log = LogsHeld(
        position=3,
        kind=SegmentKind.INPUT_GRADIENT,
        voted_in="q123-" + "a" * 32,
        first_step=largest - 1,
        last_step=largest,
        first_type=0,
        last_type=60_000,
        micro_batches=60_000,
    )
    record = replace(
        record_of(rng.randrange(1_000_000)),
        gradients=("0" * 32,) * rng.randrange(9),
        states=("1" * 32,) * rng.randrange(9),
    )
    told = StoreReport(
        pod=PodUid("p" * 36),
        address="10.0.0.1:40000",
        lineage=7,
        units=(unit,) * rng.randrange(20),
        records=(record,) * rng.randrange(20),
        logs=(log,) * rng.randrange(20),
    )
    assert len(codec.dumps(told)) <= report_bytes(told)


@pytest.mark.parametrize("seed", range(60))
def test_reports_that_one_message_cannot_carry_tell_the_newest_commits(seed: int) -> None:
    rng = random.Random(seed)
    unit = UnitHeld(position=0, unit=0, unit_name="layer", num_units=1, states=(1,))
    reports = tuple(
        StoreReport(
            pod=PodUid(f"pod-{number}"),
            address=f"10.0.0.{number}:1",
            lineage=0,
            units=(unit,) * rng.randrange(30),
            records=tuple(record_of(s) for s in range(rng.randrange(5), rng.randrange(20))),
            bad=(BadSegment(key=key_of(1), pod=PodUid("p")),) * rng.randrange(3),
            problem=rng.choice(["", "", "x" * 4000]),
        )
        for number in range(rng.randint(1, 5))
    )
    sizes = [report_bytes(replace(r, records=(), problem="x" * MAX_WHY)) for r in reports]
    room = sum(sizes) + rng.randrange(60) * record_bytes(record_of(1))
    told = fit_reports(reports, room)

    assert sum(map(report_bytes, told)) <= room
    assert len(codec.dumps(ToldStores(reports=told))) <= room
    if sum(map(report_bytes, reports)) <= room:
        assert told == reports
        return
    assert [(t.units, t.bad, t.address) for t in told] == [
        (r.units, r.bad, r.address) for r in reports
    ]
    # From one step on all commits are told, and one step more would be too many.
    sent = {r.commit.step for t in told for r in t.records}
    kept = {r.commit.step for r in (r for report in reports for r in report.records)}
    first = min(sent, default=max(kept, default=0) + 1)
    for before, after in zip(reports, told, strict=True):
        assert after.records == tuple(r for r in before.records if r.commit.step >= first)
        if after.records != before.records:
            assert f"its commits before step {first} are not told" in after.problem
    older = max((s for s in kept if s < first), default=None)
    if older is not None:
        more = sum(record_bytes(r) for t in reports for r in t.records if r.commit.step >= older)
        assert sum(sizes) + more > room


@pytest.mark.parametrize("seed", range(30))
def test_where_units_alone_are_too_many_the_largest_reports_count_as_empty(seed: int) -> None:
    rng = random.Random(seed)
    unit = UnitHeld(position=0, unit=0, unit_name="layer", num_units=1, states=(1,))
    reports = tuple(
        StoreReport(
            pod=PodUid(f"pod-{number}"),
            address="a:1",
            lineage=0,
            units=(unit,) * rng.randrange(50, 200),
            records=(record_of(3),),
            bad=tuple(BadSegment(key=key_of(v), pod=PodUid("p")) for v in range(40)),
        )
        for number in range(4)
    )
    whole = sum(map(report_bytes, reports))
    told = fit_reports(reports, room := rng.randrange(20_000, whole))

    assert sum(map(report_bytes, told)) <= room
    for before, after in zip(reports, told, strict=True):
        assert after.units in (before.units, ())
        assert after.bad == before.bad[len(before.bad) - len(after.bad) :]
        assert after.problem or after == before
        assert not after.records or after.units, "of an empty one nothing counts"
    empty = [len(r.units) for r, t in zip(reports, told, strict=True) if not t.units]
    full = [len(t.units) for t in told if t.units]
    assert min(empty, default=200) >= max(full, default=0)
    if full:
        assert all(t.bad == r.bad for r, t in zip(reports, told, strict=True))


def test_a_segment_without_bytes_is_one_of_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_EMPTY_SEGMENTS", 2)
    index = store()
    for unit in (0, 1):
        put(index, header_of(key_of(0, unit), 0))
    empty, first = header_of(key_of(0, 2), 0), header_of(key_of(0, 0), 0)

    assert "one more than the 2 segments without bytes" in index.refusal_of(empty)
    assert not index.refusal_of(first), "it takes its own place"
    put(index, first)
    assert not index.refusal_of(header_of(key_of(0, 2), 1))
    index.discard(key_of(0, 0))
    assert not index.refusal_of(empty)


def test_runs_are_unbroken() -> None:
    runs = [Run(first=1, last=3), Run(first=5, last=5), Run(first=7, last=8)]

    assert runs_of([1, 2, 3, 5, 7, 8]) == runs


class Twin:
    """A store as one dictionary: what is kept follows from it by the rules alone."""

    def __init__(self) -> None:
        self.lineage = self.from_version = 0
        self.kept: dict[SegmentKey, SegmentHeader] = {}
        self.records: dict[int, CommitRecord] = {}

    def move_to(self, lineage: int, version: int) -> None:
        if lineage > self.lineage:
            self.lineage, self.from_version = lineage, 0
            self.kept, self.records = {}, {}
        if lineage == self.lineage and version > self.from_version:
            self.from_version = version
            self.kept = {k: h for k, h in self.kept.items() if k.version >= version}
            self.records = {s: r for s, r in self.records.items() if s >= version}

    def go_back(self, lineage: int, version: int, *, drops_later: bool) -> None:
        self.move_to(lineage, 0)
        if lineage == self.lineage:
            self.from_version = min(self.from_version, version)
        if lineage == self.lineage and drops_later:
            self.kept = {k: h for k, h in self.kept.items() if k.version <= version}
            self.records = {s: r for s, r in self.records.items() if s < version}

    def wants(self, lineage: int, version: int) -> bool:
        return lineage == self.lineage and version >= self.from_version

    def give_up(self, new: SegmentHeader) -> None:
        """Drop states of the unit's windows between the complete one and that of a new state."""
        if new.key.kind != "state":
            return
        place = new.key.position, new.key.unit
        mine = {
            k: h
            for k, h in self.kept.items()
            if (k.position, k.unit) == place and k.kind == "state" and k != new.key
        }
        old = {k for k, h in mine.items() if self.from_version < h.window < new.window}
        judged = {k.version for k in old if k.version in self.records}
        complete = {k.version for k, h in mine.items() if h.window <= self.from_version}
        if judged and not complete & self.records.keys():
            old = {k for k in old if k.version != max(judged)}
        self.kept = {k: h for k, h in self.kept.items() if k not in old}

    def report(self, lineage: int) -> StoreReport:
        units = []
        places = {(k.position, k.unit) for k in self.kept if k.lineage == lineage}
        for position, unit in sorted(places):
            mine = [k for k in self.kept if (k.position, k.unit) == (position, unit)]
            gradients = {k.version for k in mine if k.kind == "gradient"}
            firsts = sorted(g for g in gradients if g - 1 not in gradients)
            lasts = sorted(g for g in gradients if g + 1 not in gradients)
            header = self.kept[mine[0]]
            units.append(
                UnitHeld(
                    position=position, unit=unit, unit_name=header.unit_name,
                    num_units=header.num_units,
                    states=tuple(sorted(k.version for k in mine if k.kind == "state")),
                    gradients=tuple(
                        Run(first=a, last=b) for a, b in zip(firsts, lasts, strict=True)
                    ),
                )
            )  # fmt: skip
        records = [r for _, r in sorted(self.records.items()) if r.lineage == lineage]
        return StoreReport(
            pod=POD, address="10.0.0.1:1", lineage=lineage, units=tuple(units),
            records=tuple(records),
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_a_store_keeps_what_its_twin_keeps(seed: int) -> None:
    rng = random.Random(seed)
    index, twin, held = store(64), Twin(), []
    for _ in range(400):
        lineage, version = max(0, twin.lineage + rng.choice([-1, 0, 0, 0, 0])), rng.randrange(12)
        if rng.random() < 0.01:
            lineage = twin.lineage + 1
        kind = rng.choice(["state", "gradient"])
        key = key_of(version, rng.randrange(3), kind, lineage, rng.randrange(2))
        action = rng.choice(["put", "put", "put", "discard", "keep", "record", "hold", "release"])
        if action == "put":
            more = {
                "nonce": str(rng.random()),
                "window": rng.randrange(version + 1),
                "quorum": rng.randrange(3),
            }
            header = header_of(key, rng.randrange(3 * PAGE_BYTES), **more)
            refusal = index.refusal_of(header)
            here = twin.kept.get(key)
            is_late = here is not None and here.quorum > header.quorum
            assert (refusal == "") == (lineage >= twin.lineage and not is_late)
            room = index.take_room(header.size_bytes)
            if refusal == "" and room is not None:
                index.put(header, room)
                twin.move_to(lineage, 0)
                twin.give_up(header)
                twin.kept[key] = header
            elif room is not None:
                index.give_room_back(room)
        elif action == "discard":
            index.discard(key)
            twin.kept.pop(key, None)
        elif action == "keep" and rng.random() < 0.2:
            way = rng.choice(["forward", "forward", "back", "lower"])
            if way == "forward":
                index.keep_from(lineage, version)
                twin.move_to(lineage, version)
            else:
                drops = way == "back"
                index.keep_from(lineage, version, may_go_back=True, drops_later=drops)
                twin.go_back(lineage, version, drops_later=drops)
        elif action == "record":
            index.record(record_of(version, lineage))
            twin.move_to(lineage, 0)
            if twin.wants(lineage, version):
                twin.records[version] = record_of(version, lineage)
        elif action == "hold" and (found := index.find(key)) is not None:
            index.hold(found)
            held.append(found)
        elif action == "release" and held:
            index.release(held.pop(rng.randrange(len(held))))
        assert report(index, twin.lineage) == twin.report(twin.lineage)
        found = {k: s.header for k in twin.kept if (s := index.find(k)) is not None}
        assert found == twin.kept
    for segment in held:
        index.release(segment)
    index.keep_from(twin.lineage + 1, 0)
    assert index.free_bytes == 64 * PAGE_BYTES


# --- Logs of boundaries -------------------------------------------------------------------------


def log_key(step: int, shard_type: int, micro_batch: int, kind: str = "activation") -> SegmentKey:
    return boundary_key(0, 1, SegmentKind(kind), step, shard_type, micro_batch)


def vote_on(step: int, *types: int, quorum: str = "q1", kind: str = "activation") -> VotedLogs:
    return VotedLogs(
        request=1, lineage=0, position=1, step=step, quorum=quorum,
        kinds=(SegmentKind(kind),), types=types, micro_batches=2,
    )  # fmt: skip


def with_logs(*places: tuple[int, int]) -> SegmentIndex:
    """Return an index with the logs of some (step, type), of two micro-batches each."""
    index = SegmentIndex(JOB, 1 << 20)
    for step, shard_type in places:
        for micro_batch in range(2):
            put_log(index, log_key(step, shard_type, micro_batch))
    return index


def put_log(index: SegmentIndex, key: SegmentKey, digest: str = "d") -> None:
    room = index.take_room(10)
    assert room is not None
    index.put(header_of(key, 10, digest=digest), room)


def told(index: SegmentIndex) -> list[tuple[str, int, int, int, int]]:
    logs = index.report(PodUid("p"), "p:1", 0).logs
    return [(x.voted_in, x.first_step, x.last_step, x.first_type, x.last_type) for x in logs]


def test_boundary_logs_are_told_once_their_sender_has_voted_on_the_step() -> None:
    index = with_logs((3, 0), (3, 1), (4, 0), (4, 1), (4, 3))
    assert told(index) == []
    assert index.note_voted(vote_on(3, 0, 1)) == ""
    assert index.note_voted(vote_on(4, 0, 1, 3)) == ""
    assert told(index) == [("q1", 3, 4, 0, 1), ("q1", 4, 4, 3, 3)]
    assert index.note_voted(vote_on(4, 3, quorum="q2")) == ""
    assert ("q2", 4, 4, 3, 3) in told(index)


def test_a_vote_counts_for_none_of_its_logs_while_one_is_lacking() -> None:
    index = with_logs((3, 0))
    put_log(index, log_key(3, 1, 0))
    why = index.note_voted(vote_on(3, 0, 1))
    assert why == "activation of type 1 micro-batch 1 of position 1 at 3 is not kept"
    assert told(index) == []


def test_votes_on_no_log_at_all_leave_nothing_behind() -> None:
    index = with_logs()
    nothing = replace(vote_on(3, 0), kinds=())
    before = pickle.dumps(index)
    for step in range(3):
        assert index.note_voted(replace(nothing, step=step)) == ""
    assert pickle.dumps(index) == before


def test_other_bytes_in_the_place_of_a_log_have_no_votes_and_the_same_bytes_keep_them() -> None:
    index = with_logs((3, 0))
    assert index.note_voted(vote_on(3, 0)) == ""
    put_log(index, log_key(3, 0, 1))
    assert told(index) == [("q1", 3, 3, 0, 0)]
    put_log(index, log_key(3, 0, 1), digest="other")
    assert told(index) == []


def test_what_comes_in_place_of_a_damaged_log_has_no_votes() -> None:
    index = with_logs((3, 0))
    assert index.note_voted(vote_on(3, 0)) == ""
    index.discard_damaged(log_key(3, 0, 1))
    put_log(index, log_key(3, 0, 1), digest="other")
    assert told(index) == []


def test_where_a_log_is_lost_those_of_the_other_kind_still_count() -> None:
    index = with_logs((3, 0))
    for micro_batch in range(2):
        put_log(index, log_key(3, 0, micro_batch, "input-gradient"))
    both = (SegmentKind("activation"), SegmentKind("input-gradient"))
    assert index.note_voted(replace(vote_on(3, 0), kinds=both)) == ""
    lost = index.find(log_key(3, 0, 1))
    assert lost is not None
    object.__setattr__(lost.header.key, "version", 7)  # a bit of it has changed

    assert [key.version for key in index.drop_lost()] == [7]
    assert [log.kind for log in index.log_runs()] == ["input-gradient"]
    # What is written in its place counts for the vote that follows alone.
    put_log(index, log_key(3, 0, 1), digest="other")
    assert index.note_voted(replace(vote_on(3, 0, quorum="q2"), kinds=both)) == ""
    assert {(log.kind, log.voted_in) for log in index.log_runs()} == {
        ("activation", "q2"),
        ("input-gradient", "q2"),
    }


def test_a_unit_whose_number_no_message_carries_is_not_told_and_the_others_are() -> None:
    index = store()
    put(index, header_of(key_of(5)))
    kept = index._units
    (place,) = kept
    kept[place[0], place[1] ^ (1 << 40)] = kept.pop(place)
    put(index, header_of(key_of(5)))

    report_of_it = report(index)

    assert [(held.position, held.unit) for held in report_of_it.units] == [place]
    assert codec.decode(StoreReport, codec.encode(report_of_it)) == report_of_it


def test_an_outdated_log_goes_with_its_votes_and_was_not_damaged() -> None:
    index = with_logs((3, 0))
    assert index.note_voted(vote_on(3, 0)) == ""
    index.discard_outdated(log_key(3, 0, 1))
    index.discard_outdated(log_key(3, 0, 1))
    assert index.num_discarded == 0
    assert index.note_voted(vote_on(3, 0, quorum="q2")).endswith("is not kept")
    put_log(index, log_key(3, 0, 1), digest="other")
    assert told(index) == []


def test_a_log_that_is_damaged_or_old_is_not_told() -> None:
    index = with_logs((3, 0), (3, 1), (4, 0))
    assert index.note_voted(vote_on(3, 0, 1)) == ""
    assert index.note_voted(vote_on(4, 0)) == ""
    index.discard(log_key(3, 1, 0))
    assert told(index) == [("q1", 3, 4, 0, 0)]
    index.keep_from(0, 4)
    assert told(index) == [("q1", 4, 4, 0, 0)]
    assert index.find(log_key(3, 0, 0)) is None
    index.keep_from(0, 4, may_go_back=True)
    assert told(index) == [], "the step is computed again"


def test_compute_weights_are_told_by_version_and_go_with_their_window() -> None:
    index = SegmentIndex(JOB, 1 << 20)
    for version in (4, 5):
        put_log(index, key_of(version, kind="compute"))
    (held,) = index.report(PodUid("p"), "p:1", 0).units
    assert held.computes == (Run(first=4, last=5),)
    assert not held.states
