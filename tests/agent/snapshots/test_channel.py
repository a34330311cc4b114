"""Frames arrive as they were sent, however the kernel cuts them; answers come in their order."""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.agent.snapshots.conftest import HOST, SECRET, Pod
from tests.agent.snapshots.test_ends import calling
from tests.agent.snapshots.test_store import write
from tests.core.segments.keys import header_of, key_of

from mainstay_agent.snapshots.channel import AHEAD_BYTES, LEAST_BYTES, TURN_BYTES, Channel
from mainstay_core.base.admission import Bounds
from mainstay_core.base.frames import FrameParser, pack_json
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.base.proofs import Purpose
from mainstay_core.segments import frames
from mainstay_core.segments.spans import Span
from mainstay_core.wire.segments import Holder
from mainstay_net.acceptor import listen
from mainstay_net.entrance import Entrance
from mainstay_train.state.segments import SegmentClient

Make = Callable[..., Pod]
MakeClient = Callable[..., SegmentClient]
ARENA_BYTES = 1 << 20
ALL = selectors.EVENT_READ | selectors.EVENT_WRITE
LONG_HEAD = 3 * AHEAD_BYTES


def frame_of(at: int, *, more: int = 0, kept: bool = True, body_size: int = 0) -> bytes:
    """Return a frame up to its body, with so many characters more in its head."""
    return pack_json(json.dumps({"at": at, "kept": kept, "more": "x" * more}), body_size)


class Taker(Channel):
    """Takes frames, and keeps the bodies of those that say so."""

    def __init__(
        self, connection: socket.socket, arena_fd: int, answer: Callable[[int], bytes] | None
    ) -> None:
        super().__init__(connection, arena_fd, LONG_HEAD + 100)
        self.taken: list[tuple[int, bytes | None]] = []
        self._answer = answer
        self._at, self._memory = 0, bytearray()

    def begin(self, head: dict[str, Any], body_size: int) -> memoryview | None:
        self._at, self._memory = head["at"], bytearray(body_size)
        self._is_kept = head["kept"]
        return memoryview(self._memory) if self._is_kept else None

    def finish(self) -> None:
        self.taken.append((self._at, bytes(self._memory) if self._is_kept else None))
        if self._answer is not None:
            self.send(self._answer(self._at))

    def ended(self, why: str) -> None:
        raise AssertionError(why)

    def due_s(self) -> None: ...


def pair(seed: int) -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096 << seed % 8)
    return ends


@pytest.fixture
def arena() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.write(fd, random.Random(0).randbytes(ARENA_BYTES))
    yield fd
    os.close(fd)


@pytest.mark.parametrize("seed", range(40))
def test_frames_arrive_whole_and_in_order_however_the_kernel_cuts_them(
    arena: int, seed: int
) -> None:
    rng = random.Random(seed)
    sizes = [0, 1, 11, 100, AHEAD_BYTES - 1, AHEAD_BYTES, 5 * AHEAD_BYTES, 300_000]
    ours, theirs = pair(seed)
    answers = bool(seed % 2)
    sender = Taker(ours, arena, None)
    sender.reads_always = True  # as who sends segments
    taker = Taker(theirs, arena, frame_of if answers else None)
    with ours, theirs:
        sent: list[tuple[int, bytes | None]] = []
        for at in range(rng.randrange(1, 60)):
            size, is_kept = rng.choice(sizes[: rng.randrange(1, 9)]), rng.random() < 0.8
            offset = rng.randrange(ARENA_BYTES - size)
            more = rng.choice([0, 0, 0, 700, LONG_HEAD])
            head = frame_of(at, more=more, kept=is_kept, body_size=size)
            sender.queue(head, Span(offset, size))
            sent.append((at, os.pread(arena, size, offset) if is_kept else None))
        while len(taker.taken) < len(sent) or (answers and len(sender.taken) < len(sent)):
            for channel in rng.sample([sender, taker], 2):
                channel.turn(ALL & (channel.interest | rng.choice([0, ALL])))
    assert taker.taken == sent
    assert [at for at, _ in sender.taken] == ([at for at, _ in sent] if answers else [])


def test_what_was_received_ahead_waits_for_no_event_of_the_socket(arena: int) -> None:
    """A long answer leaves first. Then nothing comes any more that would wake the store."""
    ours, theirs = pair(0)
    taker = Taker(theirs, arena, answer=lambda at: frame_of(at, more=0 if at else 1 << 20))
    with ours, theirs:
        ours.sendall(b"".join(frame_of(at) for at in range(30)))
        taker.turn(selectors.EVENT_READ)
        assert len(taker.taken) == 1
        parser, answered = FrameParser(), 0
        while answered < 30:
            assert taker.interest & selectors.EVENT_WRITE or len(taker.taken) == 30
            answered += len(parser.feed(ours.recv(1 << 16)))
            taker.turn(selectors.EVENT_WRITE)


def answers_of(caller: socket.socket, number: int) -> list[str]:
    """Return the kinds of so many answers; one message may confirm several segments."""
    parser, kinds = FrameParser(), list[str]()
    while len(kinds) < number:
        data = caller.recv(65536)
        assert data
        for frame in parser.feed(data):
            kinds += [frame.kind] * frame.head.get("number", 1)
    return kinds


@pytest.mark.parametrize("seed", range(6))
def test_the_rest_of_a_body_wakes_the_store_however_short_it_is(
    make_store: Make, make_client: MakeClient, seed: int
) -> None:
    """The kernel wakes it for many bytes at a time, but for the last ones, too."""
    rng, pod = random.Random(seed), make_store("a", 8 * TURN_BYTES)
    sizes = [rng.choice([LEAST_BYTES, TURN_BYTES]) + rng.randrange(-50, 5000) for _ in range(6)]
    bodies = [rng.randbytes(size) for size in sizes]
    keys = [key_of(version) for version in range(len(sizes))]
    with calling(pod) as caller:
        for key, body in zip(keys, bodies, strict=True):
            left = frames.encode(frames.Segment(header=header_of(key, len(body))), len(body)) + body
            while left:
                size = rng.choice([1, 1000, LEAST_BYTES - 1, LEAST_BYTES, TURN_BYTES])
                caller.sendall(left[:size])
                left = left[size:]
        assert answers_of(caller, len(keys)) == ["stored"] * len(keys)
    client = make_client(pod)
    for key, body in zip(keys, bodies, strict=True):
        into = bytearray(len(body))
        client.fetch(key, [], memoryview(into))
        assert bytes(into) == body


def test_segments_that_come_together_are_confirmed_together_and_in_their_place(
    make_store: Make, make_client: MakeClient
) -> None:
    pod = make_store("a")
    good = [frames.Segment(header=header_of(key_of(version), 5)) for version in range(6)]
    bad = frames.Segment(header=header_of(key_of(9), 5, job=JobUid("job-2")))
    fetch = frames.encode(frames.Fetch(key=key_of(9)))
    said = [frames.encode(message, 5) + b"bytes" for message in (*good[:3], bad, *good[3:5])]
    said += [fetch, frames.encode(good[5], 5) + b"bytes"]
    expected = ["stored"] * 3 + ["refused"] + ["stored"] * 2 + ["missing", "stored"]
    with calling(pod) as caller:
        caller.sendall(b"".join(said))
        assert answers_of(caller, len(expected)) == expected
        caller.sendall(fetch)
        assert answers_of(caller, 1) == ["missing"]
    assert [unit.states for unit in make_client(pod).report(0).units] == [(0, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize(("number", "is_held"), [(1, False), (2, True), (3, False)])
def test_a_holder_confirms_what_was_sent_and_no_more(
    make_store: Make, make_client: MakeClient, number: int, is_held: bool
) -> None:
    """One message confirms the oldest segments; one that confirms too many ends the connection."""
    entrance = Entrance(listen(HOST), SECRET, (Purpose.SNAPSHOT,), Bounds(total=4))
    holder = Holder(pod=PodUid("b"), address=entrance.address)
    client = make_client(make_store("a"))
    keys = [key_of(3), key_of(4)]
    for key in keys:
        write(client, key, b"bytes", [holder])
    proved = entrance.turn()
    while not proved:
        proved = entrance.turn()
    with proved[0].socket as line:
        line.setblocking(True)
        parser, taken = FrameParser(), list[str]()
        while len(taken) < len(keys):
            taken += [frame.kind for frame in parser.feed(line.recv(65536))]
        line.sendall(frames.encode(frames.Stored(number=number)))
        first = client.wait_held(keys[:1])
        if number < len(keys):
            assert first == ""
            assert client.pending() == {keys[1]: ""}
    why_not = client.wait_held(keys)
    entrance.close()
    assert (why_not == "") is is_held
    if number > len(keys):
        assert "an answer to nothing" in why_not
