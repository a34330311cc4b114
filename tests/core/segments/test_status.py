"""What a store tells in short is what it tells in a settle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.segments.keys import JOB, header_of, key_of, record_of

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.records import CommitRecords
from mainstay_core.segments.spans import PAGE_BYTES, Span
from mainstay_core.segments.status import Checksums, status_of
from mainstay_core.wire.segments import Run, SegmentKind, boundary_key
from mainstay_core.wire.stores import CommittedSteps, Doubts, WindowHeld

POD = PodUid("pod-1")


def put(index: SegmentIndex, version: int, **key: object) -> bool:
    header = header_of(key_of(version, **key), window=version // 2 * 2)  # type: ignore[arg-type]
    room = index.take_room(header.size_bytes)
    if room is None:
        index.why_full(header.size_bytes)
        return False
    index.put(header, room)
    return True


@pytest.mark.parametrize("seed", range(10))
def test_a_status_says_of_each_unit_what_the_report_says(seed: int) -> None:
    rng = random.Random(seed)
    index = SegmentIndex(JOB, 200 * PAGE_BYTES)
    for step in range(60):
        kind = rng.choice(("state", "gradient", "compute"))
        put(index, rng.randint(0, 9), unit=rng.randint(0, 3), kind=kind, position=rng.randint(0, 1))
        if rng.random() < 0.3:
            index.record(record_of(step % 10))
        if rng.random() < 0.05:
            index.keep_from(0, rng.randint(0, 5))
    status, report = status_of(index, POD), index.report(POD, "a:1", 0)

    told = {
        (group.position, unit): (group.states, group.gradients, group.computes, group.num_units)
        for group in status.units
        for unit in group.numbers
    }
    assert told == {
        (u.position, u.unit): (u.states, u.gradients, u.computes, u.num_units) for u in report.units
    }
    alike = {(g.position, g.states, g.gradients, g.computes) for g in status.units}
    assert len(status.units) == len(alike)
    steps = [s for run in status.judged for s in range(run.first, run.last + 1)]
    assert steps == [r.commit.step for r in report.records]
    segments = index.segments()
    assert sum(k.num_segments for k in status.kinds) == len(segments)
    assert status.used_bytes == len(segments) * PAGE_BYTES
    firsts = {s.header.window for s in segments if s.header.key.kind == "state"}
    assert status.windows == tuple(WindowHeld(first=f, length=2) for f in sorted(firsts))


def test_a_header_with_another_number_of_units_gives_it_to_its_own_copy_alone() -> None:
    index = SegmentIndex(JOB, 20 * PAGE_BYTES)
    for version, num_units in ((8, 4), (9, 4), (10, 5)):
        header = header_of(key_of(version, unit=version - 8), num_units=num_units)
        room = index.take_room(header.size_bytes)
        assert room is not None
        index.put(header, room)

    told = {group.states: group.num_units for group in status_of(index, POD).units}
    assert told == {(8,): 4, (9,): 4, (10,): 5}


def test_boundary_logs_are_told_as_in_the_report_and_belong_to_no_unit() -> None:
    index = SegmentIndex(JOB, 200 * PAGE_BYTES)
    assert put(index, 2, kind="state", position=1)
    for step in (2, 3, 4):
        key = boundary_key(0, 1, SegmentKind.ACTIVATION, step, 0, 0)
        room = index.take_room(10)
        assert room is not None
        index.put(header_of(key), room)
        kinds = (SegmentKind.ACTIVATION,)
        voted = VotedLogs(
            request=1, lineage=0, position=1, step=step, quorum="q1-abc", kinds=kinds, types=(0,),
            micro_batches=1,
        )  # fmt: skip
        assert not index.note_voted(voted)
        index.record(record_of(step, certified_in="q1-abc" if step < 4 else "q2-def"))
    status = status_of(index, POD)
    assert status.logs == index.report(POD, "a:1", 0).logs
    assert [(log.first_step, log.last_step) for log in status.logs] == [(2, 4)]
    assert [(g.position, g.numbers, g.states) for g in status.units] == [(1, (0,), (2,))]
    assert status.certified == (
        CommittedSteps(quorum="q1-abc", first=2, last=3),
        CommittedSteps(quorum="q2-def", first=4, last=4),
    )


def test_where_gradients_are_logged_no_quorum_is_told() -> None:
    index = SegmentIndex(JOB, 200 * PAGE_BYTES)
    assert put(index, 2, kind="gradient")
    index.record(record_of(2))
    assert status_of(index, POD).certified == ()


def test_a_commit_whose_votes_are_not_known_is_not_judged() -> None:
    index = SegmentIndex(JOB, PAGE_BYTES)
    index.record(record_of(3))
    index.record(record_of(4, states=(), gradients=()))
    assert status_of(index, POD).judged == (Run(first=3, last=3),)


def commits_of(index: SegmentIndex) -> CommitRecords:
    """The commits that a store keeps."""
    return index.commits


def damage_commit(index: SegmentIndex, step: int) -> None:
    """Change a commit where it lies."""
    commits = commits_of(index)
    record = commits.find(step)
    assert record is not None
    commits.put(replace(record, chain="x"))


@pytest.mark.parametrize("finds", ["settle", "check"])
def test_a_commit_that_was_found_damaged_judges_nothing_until_it_is_written_again(
    finds: str,
) -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    assert put(index, 3, kind="compute")
    for step in (3, 4, 5):
        index.record(record_of(step))
    damage_commit(index, 4)
    assert status_of(index, POD).judged == (Run(first=3, last=5),), "nobody has found it yet"

    for _ in range(2):
        if finds == "settle":
            # Who is told of it names it, and its pod.
            assert [r.commit.step for r in index.report(POD, "a:1", 0).records] == [3, 4, 5]
        else:
            assert [s for s in range(2, 6) if commits_of(index).check(s)] == [4]

    status = status_of(index, POD)
    assert status.judged == (Run(first=3, last=3), Run(first=5, last=5))
    assert [(c.first, c.last) for c in status.certified] == [(3, 3), (5, 5)]
    assert (status.num_discarded, status.num_damaged) == (1, 1)

    index.record(record_of(4))
    assert status_of(index, POD).judged == (Run(first=3, last=5),)
    damage_commit(index, 4)
    assert commits_of(index).check(4)
    index.keep_from(0, 5)
    status = status_of(index, POD)
    assert (status.num_discarded, status.num_damaged) == (2, 0), "it is needed no more"
    assert not commits_of(index).check(4)


def test_a_state_whose_commit_was_found_damaged_is_no_judged_one() -> None:
    """That a newer window needs no older states is known of judged ones alone."""
    index = SegmentIndex(JOB, 8 * PAGE_BYTES)
    for version in (2, 4):
        index.put(header_of(key_of(version), window=version), index.take_room(10) or Span(0, 0))
        index.record(record_of(version))
    damage_commit(index, 4)
    assert commits_of(index).check(4)
    index.put(header_of(key_of(6), window=6), index.take_room(10) or Span(0, 0))
    assert [s.header.key.version for s in index.segments()] == [2, 6]


def test_a_store_that_runs_short_says_so_until_a_whole_window_had_room() -> None:
    index = SegmentIndex(JOB, 2 * PAGE_BYTES)
    assert put(index, 0)
    assert put(index, 1)
    assert not put(index, 1, kind="gradient")
    status = status_of(index, POD)
    assert status.num_refused == 1
    assert "spec.snapshots.memory" in status.short_of

    index.keep_from(0, 2)
    assert status_of(index, POD).short_of == status.short_of
    assert put(index, 2)
    index.keep_from(0, 4)
    assert status_of(index, POD).short_of == ""
    assert status_of(index, POD).num_refused == 1


def test_a_copy_that_was_found_damaged_is_counted_once() -> None:
    index = SegmentIndex(JOB, 2 * PAGE_BYTES)
    put(index, 0)
    index.discard_damaged(key_of(0))
    index.discard_damaged(key_of(0))
    assert status_of(index, POD).num_discarded == 1


def test_a_copy_that_a_reader_doubts_covers_nothing_until_another_one_is_put_there() -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    put(index, 0)
    put(index, 1)

    index.doubt(key_of(0), "another", "d")
    index.doubt(key_of(0), "abc", "another")
    index.doubt(key_of(2), "abc", "d")
    assert [g.states for g in status_of(index, POD).units] == [(0, 1)]
    for _ in range(2):
        index.doubt(key_of(0), "abc", "d")

    status = status_of(index, POD)
    assert [g.states for g in status.units] == [(1,)]
    assert (status.num_discarded, status.num_damaged) == (1, 1)
    assert sum(k.num_segments for k in status.kinds) == 2
    # A settle may still try it: whoever reads it compares its digest. Nor is it let go of, if
    # others lose theirs: it may be the reader whose memory is wrong.
    assert [u.states for u in index.report(POD, "a:1", 0).units] == [(0, 1)]
    assert [s.header.key.version for s in index.needed(0)] == [0, 1]

    put(index, 0)
    assert [g.states for g in status_of(index, POD).units] == [(0, 1)]
    assert status_of(index, POD).num_damaged == 0


def test_a_log_that_a_reader_doubts_covers_nothing_until_it_is_written_again() -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    header = header_of(boundary_key(0, 1, SegmentKind.ACTIVATION, 2, 0, 0))
    voted = VotedLogs(
        request=1, lineage=0, position=1, step=2, quorum="q1-abc",
        kinds=(SegmentKind.ACTIVATION,), types=(0,), micro_batches=1,
    )  # fmt: skip

    def write() -> None:
        room = index.take_room(10)
        assert room is not None
        index.put(header, room)

    write()
    assert not index.note_voted(voted)
    assert len(status_of(index, POD).logs) == 1

    index.doubt(header.key, header.nonce, header.digest)
    assert status_of(index, POD).logs == ()
    # A settle may still try it, as long as it is all there is.
    assert len(index.report(POD, "a:1", 0).logs) == 1

    write()
    assert len(status_of(index, POD).logs) == 1


@pytest.mark.parametrize("other", [3, 9])
def test_a_segment_whose_key_has_changed_goes_with_its_room(other: int) -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    for version in (2, 3):
        put(index, version)
    segment = index.find(key_of(2))
    assert segment is not None
    object.__setattr__(segment.header.key, "version", other)
    assert index.find(key_of(2)) is None

    assert index.drop_lost() == [key_of(other)]

    assert [g.states for g in status_of(index, POD).units] == [(3,)]
    assert (status_of(index, POD).num_discarded, index.free_bytes) == (1, 3 * PAGE_BYTES)
    assert index.find(key_of(3)) is not None
    assert index.drop_lost() == []


def test_a_unit_that_is_found_no_more_goes_with_all_its_segments() -> None:
    index = SegmentIndex(JOB, 4 * PAGE_BYTES)
    for unit in (0, 1):
        put(index, 2, unit=unit)
        put(index, 3, unit=unit)
    units = index._units
    units[0, 5] = units.pop((0, 1))

    assert index.drop_lost() == [key_of(2, 1), key_of(3, 1)]

    assert [g.numbers for g in status_of(index, POD).units] == [(0,)]
    assert index.free_bytes == 2 * PAGE_BYTES


def test_no_vote_rests_on_what_comes_in_place_of_a_log_that_no_key_finds() -> None:
    index = SegmentIndex(JOB, 8 * PAGE_BYTES)
    keys = [boundary_key(0, 1, SegmentKind.ACTIVATION, step, 0, 0) for step in (2, 3)]
    for key in keys:
        index.put(header_of(key), index.take_room(10) or Span(0, 0))
        voted = VotedLogs(
            request=1, lineage=0, position=1, step=key.version, quorum="q1-abc",
            kinds=(SegmentKind.ACTIVATION,), types=(0,), micro_batches=1,
        )  # fmt: skip
        assert not index.note_voted(voted)
    segment = index.find(keys[0])
    assert segment is not None
    object.__setattr__(segment.header.key, "version", 9)

    assert [key.version for key in index.drop_lost()] == [9]
    written = replace(keys[0], version=2)
    index.put(header_of(written, digest="another"), index.take_room(10) or Span(0, 0))

    assert [(log.first_step, log.last_step) for log in status_of(index, POD).logs] == [(3, 3)]


def test_a_check_is_judged_once_and_for_what_it_has_read() -> None:
    sums = Checksums()
    keys = tuple(key_of(version) for version in (3, 4))
    for number in (1, 2):
        sums.add(header_of(keys[0]), 1)
        sums.close(number, 0, 0.0)

    assert sums.take_headers(Doubts(check=1, keys=keys)) == ()
    assert sums.take_headers(Doubts(check=2, keys=keys)) == (header_of(keys[0]),)
    assert sums.take_headers(Doubts(check=2, keys=keys)) == ()


def test_a_segment_with_other_bytes_than_at_the_check_before_has_changed() -> None:
    sums = Checksums()
    header = header_of(key_of(3))
    sums.add(header, 1)
    assert sums.close(1, 0, 0.0).changed == ()
    sums.add(header, 2)
    assert sums.close(2, 0, 0.0).changed == (key_of(3),)
    # It stays changed: what it was at first counts.
    sums.add(header, 2)
    assert sums.close(3, 0, 0.0).changed == (key_of(3),)
    sums.add(replace(header, digest="another"), 5)
    assert sums.close(4, 0, 0.0).changed == ()


def test_a_check_tells_the_sums_of_each_unit_by_version() -> None:
    sums = Checksums()
    for version, number in ((4, 2), (3, 1), (6, 0xFFFFFFFF)):
        sums.add(header_of(key_of(version)), number)
    sums.add(header_of(key_of(3, kind="gradient")), 7)
    gradient, state = sums.close(9, 0, 1.5).segments
    assert (gradient.key, gradient.sums) == (key_of(3, kind="gradient"), "00000007")
    assert state.key == key_of(3)
    assert state.versions == (Run(first=3, last=4), Run(first=6, last=6))
    assert state.sums == "0000000100000002ffffffff"


def test_a_good_copy_with_the_header_of_one_that_was_doubted_is_not_taken_for_damaged() -> None:
    """Who sends a copy again sends its header with it."""
    sums, header = Checksums(), header_of(key_of(4))
    sums.add(header, 2, is_doubted=True)
    assert sums.close(1, 0, 0.1).doubted == (key_of(4),)
    sums.add(header, 1)
    told = sums.close(2, 0, 0.1)
    assert (told.changed, told.doubted) == ((), ())
