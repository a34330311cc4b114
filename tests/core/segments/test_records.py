"""Digests of units live as long as the commit of their step, and take bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.core.segments.keys import JOB, record_of

from mainstay_core.base.frames import FIRST_HEAD_BYTES
from mainstay_core.segments import records as records_module
from mainstay_core.segments.deliveries import (
    answer_digests,
    answer_seals,
    list_lacking,
    note_digests,
)
from mainstay_core.segments.frames import AskDigests, AskSeals, encode
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.wire.unit_digests import MAX_TOLD_SEALS, UnitDigests, seal_digests


def told(step: int, position: int = 0, lineage: int = 0, units: int = 2) -> UnitDigests:
    digests = f"{step:032x}" * units
    return seal_digests(
        UnitDigests(
            lineage=lineage, position=position, step=step, gradients=digests, masters=digests
        )
    )


def store(*steps: int) -> SegmentIndex:
    index = SegmentIndex(JOB, PAGE_BYTES)
    for step in steps:
        index.record(record_of(step))
        assert note_digests(index, told(step))
    return index


def listed(index: SegmentIndex, position: int = 0) -> tuple[UnitDigests, ...]:
    commits = index.commits
    return commits.list_digests(position)


def known(index: SegmentIndex, lineage: int = 0, position: int = 0) -> list[int]:
    asked = (AskDigests(request=1, lineage=lineage, position=position, step=s) for s in range(20))
    answers = (answer_digests(index, one).digests for one in asked)
    return [answer.step for answer in answers if answer is not None]


def test_what_is_kept_is_told_to_who_asks_for_the_step() -> None:
    index = store(3, 4)
    assert note_digests(index, told(4, position=1))
    assert note_digests(index, told(5))
    assert listed(index) == (told(3), told(4), told(5))
    assert listed(index, 1) == (told(4, position=1),)

    asked = AskDigests(request=7, lineage=0, position=1, step=4)
    assert answer_digests(index, asked).request == 7
    assert answer_digests(index, asked).digests == told(4, position=1)
    assert (known(index), known(index, position=1)) == ([3, 4, 5], [4])
    assert known(index, lineage=1) == []


def test_those_of_a_step_that_is_taken_again_take_the_place_of_the_first() -> None:
    index = store(3)
    again = seal_digests(replace(told(3), masters="f" * 64))
    assert note_digests(index, again)
    assert listed(index) == (again,)


def test_a_store_is_passed_on_what_it_lacks_of_a_position() -> None:
    index, other = store(3, 4, 5), store(4)
    assert note_digests(other, told(7))
    assert note_digests(other, seal_digests(replace(told(5), masters="f" * 64)))
    assert note_digests(other, told(3, position=1))

    answer = answer_seals(other, AskSeals(position=0))

    # What it has of a step that was taken again since is what it lacks.
    assert list_lacking(index, answer) == (told(3), told(5))
    nothing = answer_seals(SegmentIndex(JOB, PAGE_BYTES), AskSeals(position=0))
    assert list_lacking(index, nothing) == (told(3), told(4), told(5))


def test_a_store_tells_no_more_seals_than_a_message_takes() -> None:
    index = store()
    for step in range(MAX_TOLD_SEALS + 2):
        assert note_digests(index, told(step, units=0))
    answer = answer_seals(index, AskSeals(position=0))
    assert list_lacking(index, answer) == (told(0, units=0), told(1, units=0))
    assert len(encode(answer)) < FIRST_HEAD_BYTES


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (lambda index: index.keep_from(0, 5), [5, 6]),
        (lambda index: index.keep_from(0, 5, may_go_back=True), [3, 4]),
        (lambda index: index.keep_from(0, 5, may_go_back=True, drops_later=False), [3, 4, 5, 6]),
        (lambda index: index.record(record_of(1, lineage=2)), []),
    ],
)
def test_they_go_with_the_commits_of_their_steps(
    what: Callable[[SegmentIndex], object], left: list[int]
) -> None:
    index = store(3, 4, 5, 6)
    what(index)
    assert known(index) == left
    assert [r.commit.step for r in index.records if r.lineage == 0] == left


def test_they_go_with_commits_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_RECORDS", 2)
    index = store(3, 4, 5, 6)
    assert known(index) == [r.commit.step for r in index.records] == [5, 6]


def test_what_is_older_than_all_that_counts_or_came_damaged_is_not_kept() -> None:
    index = store(5)
    index.keep_from(0, 5)
    assert not note_digests(index, told(4))
    assert not note_digests(index, told(6, lineage=1))
    assert not note_digests(index, replace(told(6), masters="0" * 64))
    assert not note_digests(index, replace(told(6), seal=""))
    assert known(index) == [5]


def test_they_take_bounded_memory_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_DIGESTS_BYTES", 3 * told(0).size_bytes)
    index = store(1, 2, 3, 4)
    note_digests(index, told(4))
    assert known(index) == [2, 3, 4]
    index.keep_from(0, 4)
    note_digests(index, told(5))
    note_digests(index, told(6))
    assert known(index) == [4, 5, 6], "what went is counted no more"
