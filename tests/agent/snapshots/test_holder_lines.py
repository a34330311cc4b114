"""When a line counts its holder as gone, on a clock of the test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from tests.core.segments.keys import JOB, header_of, key_of, record_of
from tests.core.segments.test_records import told

from mainstay_agent.snapshots.arena import Arena
from mainstay_agent.snapshots.holders import LINGER_S, STALL_S, HolderLine, Parcel
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, FrameParser, parse_head
from mainstay_core.base.ids import PodUid
from mainstay_core.segments import frames
from mainstay_core.segments.deliveries import answer_seals, note_digests
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.wire.segments import Holder

ADDRESS = "b:1"
STEP_S = 10.0


def index_of(*steps: int) -> SegmentIndex:
    index = SegmentIndex(JOB, 1 << 16)
    for step in steps:
        assert note_digests(index, told(step))
    return index


class Line:
    """A line that is open and proved, to a holder that is the test."""

    def __init__(self, sender: socket.socket, holder: socket.socket) -> None:
        arena, index = Arena(1 << 16), SegmentIndex(JOB, 1 << 16)
        self.index, self._holder = index, holder
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

    def digest(self, step: int) -> None:
        """Keep the digests of a step's units, and pass them on."""
        assert note_digests(self.index, told(step))
        self.line.pass_digests(told(step))

    def sent(self) -> list[frames.FromPeer]:
        """What the holder gets next."""
        self.line.flush()
        received = FrameParser().feed(self._holder.recv(1 << 20))
        return [frames.decode_from_peer(frame.head, 0) for frame in received]

    def answer(self, number: int = 1) -> None:
        self.say(frames.Stored(number=number))

    def say(self, answer: frames.ToHolder) -> None:
        frame = frames.encode(answer)
        self.line.begin(parse_head(frame[PREFIX.size :]), 0)
        self.line.moved_at_s = self.now_s


@contextlib.contextmanager
def opened() -> Iterator[Line]:
    sender, holder = socket.socketpair()
    with sender, holder:
        sender.setblocking(False)
        yield Line(sender, holder)


def test_commits_that_leave_do_not_keep_a_holder_that_answers_nothing() -> None:
    with opened() as line:
        line.send(3)
        for step in range(9):
            line.commit(step)
            assert line.line.due_s() == STALL_S


def test_segments_that_leave_do_not_keep_it_either() -> None:
    with opened() as line:
        for version in range(5):
            line.send(version)
            line.now_s += STEP_S
        assert line.line.due_s() == STALL_S


def test_a_holder_has_all_its_time_again_with_each_answer() -> None:
    with opened() as line:
        line.send(3)
        line.send(4)
        line.commit(4)
        line.answer()
        line.commit(5)
        assert line.line.due_s() == STEP_S + STALL_S
        line.answer()
        assert line.whys == ["", ""]
        line.commit(6)
        assert line.line.due_s() == 3 * STEP_S + LINGER_S, "nothing is owed"
        line.now_s = 100.0
        line.send(5)
        line.commit(7)
        assert line.line.due_s() == 100.0 + STALL_S


def test_a_holder_that_knows_the_steps_before_is_told_the_newest_alone() -> None:
    with opened() as line:
        for step in (3, 4, 5):
            line.digest(step)
        (asked,) = line.sent()
        assert asked == frames.AskSeals(position=0)

        line.say(answer_seals(index_of(3, 4), asked))

        assert line.sent() == [frames.PassDigests(digests=told(5))]
        line.digest(6)
        assert line.sent() == [frames.PassDigests(digests=told(6))], "it is asked once"


def test_a_holder_that_knows_nothing_is_told_all_of_the_position() -> None:
    with opened() as line:
        for step in (3, 4):
            line.digest(step)
        (asked,) = line.sent()
        line.say(answer_seals(index_of(), asked))
        assert line.sent() == [frames.PassDigests(digests=told(step)) for step in (3, 4)]


@pytest.mark.parametrize("position", [0, 1])
def test_what_a_holder_was_not_asked_for_is_not_taken(position: int) -> None:
    answer = frames.ToldSeals(position=position, seals=())
    with opened() as line:
        line.digest(3)
        if position == 0:
            line.say(answer)
        with pytest.raises(RemoteProtocolError, match="nothing"):
            line.say(answer)
