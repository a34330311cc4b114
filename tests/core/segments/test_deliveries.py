"""One segment on its way to its holders."""

from __future__ import annotations

import pytest
from tests.core.segments.keys import JOB, header_of, key_of, record_of

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.deliveries import Delivery, is_here, note_needless, note_passed
from mainstay_core.segments.frames import Segment
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.wire.segments import SegmentKey

A, B = PodUid("a"), PodUid("b")


def test_a_segment_is_held_once_every_holder_has_confirmed_it() -> None:
    delivery = Delivery([A, B])
    delivery.answered(A)
    assert not delivery.is_over

    delivery.answered(B)

    assert delivery.is_over
    assert delivery.why_not == ""


def test_every_holder_that_does_not_keep_it_is_named() -> None:
    delivery = Delivery([B, A])
    delivery.answered(B, "it is full")
    delivery.answered(A, "it is gone")
    delivery.answered(A)

    assert delivery.why_not == "a: it is gone; b: it is full"


def test_without_holders_nothing_is_waited_for() -> None:
    assert Delivery([]).is_over
    assert Delivery([]).why_not == ""


@pytest.mark.parametrize("is_again", [False, True])
def test_what_is_sent_again_drops_nothing_of_a_job_that_went_back(is_again: bool) -> None:
    """Its sender was away meanwhile, and knows a window to which the job comes later."""
    index = SegmentIndex(JOB, 1 << 20)
    for key in (key_of(6), key_of(6, kind="gradient")):
        room = index.take_room(10)
        assert room is not None
        index.put(header_of(key, window=6), room)
    index.record(record_of(6))

    later = Segment(header=header_of(key_of(10), window=10), keep_from=10, is_again=is_again)
    note_needless(index, later)

    assert index.from_version == (0 if is_again else 10)
    assert len(index.segments()) == (2 if is_again else 0)
    assert len(index.records) == (1 if is_again else 0)


def test_commits_alone_are_not_dropped_for_what_is_sent_again() -> None:
    index = SegmentIndex(JOB, 1 << 20)
    index.record(record_of(6))
    again = Segment(header=header_of(key_of(10), window=10), keep_from=10, is_again=True)
    note_needless(index, again)
    assert len(index.records) == 1


def test_a_store_that_has_nothing_learns_which_window_is_complete_from_what_is_sent_again() -> None:
    """Else it would take that window for one that was given up once the next one comes."""
    index = SegmentIndex(JOB, 1 << 20)
    again = Segment(header=header_of(key_of(10), window=10), keep_from=10, is_again=True)
    note_needless(index, again)
    assert index.from_version == 10


@pytest.mark.parametrize(
    ("quorum", "digest", "window", "is_kept"),
    [
        (5, "other", 4, True),  # a newer quorum's is here
        (6, "other", 4, True),
        (7, "d", 4, True),
        (7, "other", 4, False),  # what is here may have been refused by the votes
        (7, "d", 2, False),  # it would go with a window that was given up
    ],
)
def test_what_is_sent_again_takes_the_place_of_other_bytes_of_an_older_quorum(
    quorum: int, digest: str, window: int, is_kept: bool
) -> None:
    index, key = SegmentIndex(JOB, 1 << 20), key_of(4, kind="gradient")
    again = header_of(key, quorum=quorum, digest=digest, window=window)
    assert not is_here(index, again)
    room = index.take_room(10)
    assert room is not None
    index.put(header_of(key, quorum=6, digest="d", window=4), room)

    assert is_here(index, again) is is_kept

    index.doubt(key, "abc", "d")
    assert not is_here(index, again)


def written_by(index: SegmentIndex, key: SegmentKey, window: int, quorum: int) -> bool:
    """Whether a store keeps what a quorum writes, or has no room for it."""
    header = header_of(key, PAGE_BYTES, window=window, quorum=quorum, nonce=f"n{quorum}")
    room = index.take_room(header.size_bytes)
    if room is not None:
        index.put(header, room)
    return room is not None


def run_windows(index: SegmentIndex, steps: range, quorum: int, keep_from: int) -> list[int]:
    """Copy windows of four steps to a pod without a member; return steps whose log had no room."""
    lacking = []
    for step in steps:
        window = steps.start + (step - steps.start) // 4 * 4
        if step == window:
            index.keep_from(0, max(keep_from, window - 4))
            written_by(index, key_of(step), window, quorum)
        if not written_by(index, key_of(step, kind="gradient"), window, quorum):
            lacking.append(step)
        note_passed(index, record_of(step, certified_in=f"q{quorum}-abc"))
    return lacking


def test_a_pod_without_a_member_hears_by_the_commits_that_the_job_went_back() -> None:
    index = SegmentIndex(JOB, 16 * PAGE_BYTES)
    assert run_windows(index, range(120), quorum=5, keep_from=0) == []
    assert index.from_version == 112

    assert run_windows(index, range(60, 90), quorum=6, keep_from=60) == []
    assert index.from_version == 84
    told = [(r.commit.step, r.certified_in) for r in index.records]
    assert told == [(step, "q6-abc") for step in range(84, 90)]
    assert {s.header.quorum for s in index.segments()} == {6}


@pytest.mark.parametrize("quorum", ["q5-abc", "q4-abc", "?"])
def test_a_commit_that_only_comes_late_takes_nothing_back(quorum: str) -> None:
    index = SegmentIndex(JOB, 16 * PAGE_BYTES)
    run_windows(index, range(12), quorum=5, keep_from=0)
    before = [s.header.key for s in index.segments()]
    note_passed(index, record_of(3, certified_in=quorum))
    assert index.from_version == 4
    assert [s.header.key for s in index.segments()] == before
    assert [r.commit.step for r in index.records] == list(range(4, 12))
