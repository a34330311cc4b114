"""When a line counts its holder as gone, on a clock of the test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from tests.core.segments.keys import JOB, header_of, key_of, record_of

from mainstay_agent.snapshots.arena import Arena
from mainstay_agent.snapshots.holders import LINGER_S, STALL_S, HolderLine, Parcel
from mainstay_core.base.frames import PREFIX, parse_head
from mainstay_core.base.ids import PodUid
from mainstay_core.segments import frames
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.wire.segments import Holder

ADDRESS = "b:1"
STEP_S = 10.0


class Line:
    """A line that is open and proved, to a holder that is the test."""

    def __init__(self, sender: socket.socket) -> None:
        arena, index = Arena(1 << 16), SegmentIndex(JOB, 1 << 16)
        for version in range(9):
            index.put(header_of(key_of(version)), index.take_room(10))
        self.now_s = 0.0
        self.line = HolderLine(sender, ADDRESS, "secret", arena, index)
        self.line._clock = lambda: self.now_s
        self.line.moved_at_s = 0.0
        self.line._is_open = self.line._is_proved = True
        self.whys: list[str] = []

    def send(self, version: int) -> None:
        holders = (Holder(pod=PodUid("b"), address=ADDRESS),)
        self.line.put(Parcel(key_of(version), 0, self.whys.append, holders))
        self.line.flush()

    def commit(self, step: int) -> None:
        """Pass a step's commit on."""
        self.now_s += STEP_S
        self.line.pass_on([record_of(step)])
        self.line.flush()

    def answer(self, number: int = 1) -> None:
        frame = frames.encode(frames.Stored(number=number))
        self.line.begin(parse_head(frame[PREFIX.size :]), 0)
        self.line.moved_at_s = self.now_s


@contextlib.contextmanager
def opened() -> Iterator[Line]:
    sender, holder = socket.socketpair()
    with sender, holder:
        sender.setblocking(False)
        yield Line(sender)


def test_commits_that_leave_do_not_keep_a_holder_that_answers_nothing() -> None:
    with opened() as told:
        told.send(3)
        for step in range(9):
            told.commit(step)
            assert told.line.due_s() == STALL_S


def test_segments_that_leave_do_not_keep_it_either() -> None:
    with opened() as told:
        for version in range(5):
            told.send(version)
            told.now_s += STEP_S
        assert told.line.due_s() == STALL_S


def test_a_holder_has_all_its_time_again_with_each_answer() -> None:
    with opened() as told:
        told.send(3)
        told.send(4)
        told.commit(4)
        told.answer()
        told.commit(5)
        assert told.line.due_s() == STEP_S + STALL_S
        told.answer()
        assert told.whys == ["", ""]
        told.commit(6)
        assert told.line.due_s() == 3 * STEP_S + LINGER_S, "nothing is owed"
        told.now_s = 100.0
        told.send(5)
        told.commit(7)
        assert told.line.due_s() == 100.0 + STALL_S
