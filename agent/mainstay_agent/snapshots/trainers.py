"""Serves a trainer of this pod over a Unix socket.

The trainer maps the arena and writes its segments there itself. What it has not finished when its
connection ends was never there: its rooms are given back.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from mainstay_agent.snapshots.arena import Arena
from mainstay_agent.snapshots.callers import Awaited
from mainstay_agent.snapshots.channel import Channel
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import FIRST_HEAD_BYTES, MAX_HEAD_BYTES
from mainstay_core.segments import frames
from mainstay_core.segments.deliveries import answer_digests
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.segments.spans import Span
from mainstay_core.wire.segments import Holder, SegmentKey, StoreReport
from mainstay_core.wire.unit_digests import UnitDigests
from mainstay_core.wire.votes import CommitRecord

Deliver = Callable[[SegmentKey, Sequence[Holder], int, Callable[[str], None]], None]
"""Sends a segment to holders, with the version from which on they keep; then calls with why it is
not at all of them, or with an empty sentence."""


class TrainerLine(Channel):
    """A connection of a trainer of this pod.

    Args:
        connection: has just been accepted.
        arena: memory of the store, which the trainer gets.
        index: what is in it.
        awaited: readers that wait for a segment.
        deliver: sends segments to holders.
        report: returns what is kept of a lineage.
        record: keeps a commit.
        keep_digests: keeps the digests of a step's units, and passes them on to holders.
        own: the pod of this store, and where it listens.
    """

    max_body = 0

    def __init__(
        self,
        connection: socket.socket,
        arena: Arena,
        index: SegmentIndex,
        awaited: Awaited,
        deliver: Deliver,
        report: Callable[[int], StoreReport],
        record: Callable[[CommitRecord], None],
        keep_digests: Callable[[UnitDigests, Sequence[Holder]], None],
        own: Holder,
    ) -> None:
        super().__init__(connection, arena.fd, FIRST_HEAD_BYTES)
        self._arena, self._index, self._awaited = arena, index, awaited
        self._own = own
        self._deliver, self._report, self._record = deliver, report, record
        self._keep_digests = keep_digests
        self._name = ""
        self._rooms: dict[int, Span] = {}
        self._reads: dict[int, Segment] = {}
        self._held: list[int] = []
        """Requests whose segments are at all their holders, which is still to be told."""
        self._has_ended = False

    def __str__(self) -> str:
        return f"trainer {self._name or 'that has not said who it is'}"

    @property
    def has_more(self) -> bool:
        """Whether there is something to send."""
        return super().has_more or bool(self._held)

    def refill(self) -> bool:
        """Queue what is told of segments that are held by now, all in one message."""
        if not self._held:
            return False
        first, *also = self._held
        self._held = []
        self.queue(frames.encode(frames.Held(request=first, why_not="", also=tuple(also))))
        return True

    def begin(self, head: dict[str, Any], body_size: int) -> memoryview | None:
        del body_size  # bounded by max_body
        message = frames.decode_from_trainer(head)
        if isinstance(message, frames.Hello):
            self._welcome(message)
        elif not self._name:
            raise RemoteProtocolError(f"{message.kind!r} before hello")
        else:
            self._take(message)
        return None

    def finish(self) -> None:
        """No frame of a trainer has a body: :meth:`begin` has done everything."""

    def ended(self, why: str) -> None:
        del why
        self._has_ended = True
        for room in self._rooms.values():
            self._index.give_room_back(room)
        for segment in self._reads.values():
            self._index.release(segment)
        self._rooms.clear()
        self._reads.clear()

    def due_s(self) -> None:
        """Return None: a trainer may be silent for as long as it lives."""

    def _welcome(self, hello: frames.Hello) -> None:
        if self._name:
            raise RemoteProtocolError("a second hello")
        self._name = f"{hello.incarnation} of slot {hello.slot}"
        self._max_head = MAX_HEAD_BYTES
        # A few bytes into an empty buffer: the kernel takes them whole, with the descriptor.
        arena = frames.encode(frames.Arena(size=self._arena.size_bytes))
        socket.send_fds(self.socket, [arena], [self._arena.fd])

    def _take(self, message: frames.FromTrainer) -> None:
        index = self._index
        match message:
            case frames.TakeRoom():
                self._give_room(message)
            case frames.GiveBack():
                index.give_room_back(self._room_of(message.request))
            case frames.Written():
                self._keep(message)
            case frames.KeepRecord():
                self._record(message.record)
            case frames.KeepDigests():
                self._keep_digests(message.digests, message.holders)
            case frames.KeepFrom():
                index.keep_from(
                    message.lineage,
                    message.version,
                    may_go_back=message.may_go_back,
                    drops_later=message.drops_later,
                )
            case frames.VotedLogs():
                why_not = index.note_voted(message)
                self.send(frames.encode(frames.Held(request=message.request, why_not=why_not)))
            case frames.AskReport():
                report = self._report(message.lineage)
                self.send(frames.encode(frames.Reported(request=message.request, report=report)))
            case frames.AskDigests():
                self.send(frames.encode(answer_digests(index, message)))
            case frames.Read():
                self._show(message)
            case frames.ReadDone():
                segment = self._reads.pop(message.request, None)
                if segment is None:
                    raise RemoteProtocolError(f"nothing is read by request {message.request}")
                index.release(segment)
            case frames.Discard(key=key, is_outdated=True):
                index.discard_outdated(key)
            case frames.Discard():
                index.discard_damaged(message.key)
            case frames.Hello():
                raise AssertionError("taken before")

    def _give_room(self, message: frames.TakeRoom) -> None:
        if message.request in self._rooms:
            raise RemoteProtocolError(f"room {message.request} is taken")
        room = self._index.take_room(message.size, message.window)
        if room is None:
            why = self._index.why_full(message.size)
            self.send(frames.encode(frames.Full(request=message.request, why=why)))
            return
        self._rooms[message.request] = room
        self.send(frames.encode(frames.Room(request=message.request, offset=room.offset)))

    def _keep(self, message: frames.Written) -> None:
        """Keep a segment and send it to its holders, or say why not."""
        header, room = message.header, self._room_of(message.request)
        if header.size_bytes != room.size:
            self._index.give_room_back(room)
            raise RemoteProtocolError(f"{header.size_bytes} bytes in a room for {room.size}")
        refusal = self._index.refusal_of(header)
        if refusal:
            self._index.give_room_back(room)
            self.send(frames.encode(frames.Held(request=message.request, why_not=refusal)))
            return
        others = (holder for holder in message.holders if holder.pod != self._own.pod)
        self._index.put(header, room, (self._own, *others))
        self._awaited.come(header.key)

        def done(why_not: str) -> None:
            # In its turn, as this may be another connection's.
            if not self._has_ended and why_not:
                self.queue(frames.encode(frames.Held(request=message.request, why_not=why_not)))
            elif not self._has_ended:
                self._held.append(message.request)

        self._deliver(header.key, message.holders, message.keep_from, done)

    def _show(self, message: frames.Read) -> None:
        segment = self._index.find(message.key)
        if message.request in self._reads:
            raise RemoteProtocolError(f"request {message.request} reads already")
        if segment is None:
            self.send(frames.encode(frames.NotFound(request=message.request)))
            return
        self._reads[message.request] = segment
        self._index.hold(segment)
        found = frames.Found(
            request=message.request, header=segment.header, offset=segment.span.offset
        )
        self.send(frames.encode(found))

    def _room_of(self, request: int) -> Span:
        if request not in self._rooms:
            raise RemoteProtocolError(f"there is no room {request}")
        return self._rooms.pop(request)
