"""Serves a pod that has called and has proved the job's secret.

Its store sends segments, which are kept and confirmed; a trainer asks what is kept, reads segments,
and says which it has found damaged. Both get their answers in the order of their frames. Segments
that come in one turn are confirmed together, when it ends; after any other answer the next frame is
taken once that is gone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from mainstay_agent.snapshots.arena import Arena
from mainstay_agent.snapshots.channel import Channel
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.segments import frames
from mainstay_core.segments.deliveries import (
    answer_digests,
    answer_seals,
    is_here,
    note_digests,
    note_needless,
    note_passed,
)
from mainstay_core.segments.evictions import needed_in
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.segments.spans import Span
from mainstay_core.wire.segments import Holder, SegmentHeader, SegmentKey, StoreReport

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""How long a caller may move nothing. One whose node is lost says no farewell, and what it has sent
of a segment takes room. A store that has nothing to send hangs up sooner."""


class Awaited:
    """Readers that wait for a segment which is not there yet.

    Args:
        came: called with each segment that has come.
    """

    def __init__(self, came: Callable[[SegmentKey], None]) -> None:
        self._came = came
        self._callers: dict[SegmentKey, list[Caller]] = {}

    def wait(self, key: SegmentKey, caller: Caller) -> None:
        """Have a caller look again when the segment comes."""
        self._callers.setdefault(key, []).append(caller)

    def come(self, key: SegmentKey) -> None:
        """Have those look again who wait for a segment: it is there."""
        self._came(key)
        for caller in self._callers.pop(key, ()):
            caller.look_again()

    def leave(self, caller: Caller) -> None:
        """Forget a caller that has gone."""
        for key, callers in tuple(self._callers.items()):
            left = [other for other in callers if other is not caller]
            if left:
                self._callers[key] = left
            else:
                del self._callers[key]


class Caller(Channel):
    """A connection from another pod.

    Args:
        connection: has proved itself.
        arena: memory of the store.
        index: what is in it.
        awaited: readers that wait for a segment.
        report: returns what is kept of a lineage.
    """

    def __init__(
        self,
        connection: socket.socket,
        arena: Arena,
        index: SegmentIndex,
        awaited: Awaited,
        report: Callable[[int], StoreReport],
    ) -> None:
        super().__init__(connection, arena.fd, frames.MAX_PEER_HEAD_BYTES)
        self._arena, self._index, self._awaited = arena, index, awaited
        self._report = report
        self._wanted: frames.Fetch | None = None
        """The segment that its reader waits for."""
        self._incoming: SegmentHeader | None = None
        self._room: Span | None = None
        self._holders: tuple[Holder, ...] = ()
        self._is_again = False
        self._refusal = ""
        self._num_stored = 0
        """Segments that are kept, and not confirmed yet."""
        self._outgoing: Segment | None = None

    def turn(self, events: int) -> None:
        super().turn(events)
        self._confirm()

    def begin(self, head: dict[str, Any], body_size: int) -> memoryview | None:
        # Whoever asks for more has what was sent: the kernel needs its pages no more.
        self._let_go()
        if self._wanted is not None:
            raise RemoteProtocolError("a request before the answer to the one before")
        message = frames.decode_from_peer(head, body_size)
        if isinstance(message, frames.Segment):
            return self._take(message)
        self._confirm()
        match message:
            case frames.Fetch():
                self._serve(message, self.send)
            case frames.AskReport():
                report = self._report(message.lineage)
                self.send(frames.encode(frames.Reported(request=message.request, report=report)))
            case frames.Doubt():
                self._index.doubt(message.key, message.nonce, message.digest)
                self.send(frames.encode(frames.Noted()))
            case frames.AskDigests():
                self.send(frames.encode(answer_digests(self._index, message)))
            case frames.AskSeals():
                self.send(frames.encode(answer_seals(self._index, message)))
            case frames.PassDigests():
                note_digests(self._index, message.digests)
            case frames.PassRecord() as message:
                why = note_passed(self._index, message.record)
                if why:
                    logger.warning("a commit that was passed on is not kept: %s", why)
        return None

    def finish(self) -> None:
        header, room = self._incoming, self._room
        if header is None:
            return
        self._incoming = self._room = None
        if room is not None:
            # What is kept may have changed while the body came.
            self._refusal = self._index.refusal_of(header, is_again=self._is_again)
            if self._refusal or self._has_newer(header):
                self._index.give_room_back(room)
            else:
                self._index.put(header, room, self._holders)
                self._awaited.come(header.key)
        elif not self._refusal and not self._has_newer(header):
            # No body was taken, as the segment was here. What may have come in its place since is
            # older: it would be confirmed in the name of what is sent.
            self._refusal = f"{header.key} went while it came again"
        if not self._refusal:
            self._num_stored += 1
            return
        self._confirm()
        self.send(frames.encode(frames.Refused(why=self._refusal)))

    def ended(self, why: str) -> None:
        del why
        self._let_go()
        self._awaited.leave(self)
        if self._room is not None:
            self._index.give_room_back(self._room)
            self._room = None

    def due_s(self) -> float:
        return self.moved_at_s + IDLE_S

    def _take(self, message: frames.Segment) -> memoryview | None:
        header, index = message.header, self._index
        self._holders, self._is_again = message.holders, message.is_again
        self._incoming = header
        self._refusal = index.refusal_of(header, is_again=message.is_again)
        if not self._refusal:
            note_needless(index, message)
            self._refusal = index.refusal_of(header, is_again=message.is_again)
        if self._refusal or self._has_newer(header):
            return None
        self._room = index.take_room(
            header.size_bytes, 0 if message.is_again else needed_in(header.key, header.window)
        )
        if self._room is None:
            self._refusal = index.why_full(header.size_bytes)
            return None
        offset, size = self._room
        return self._arena.view[offset : offset + size]

    def _has_newer(self, header: SegmentHeader) -> bool:
        """Return whether what comes is sent again, and must not take the place of what is here."""
        return self._is_again and is_here(self._index, header)

    def _serve(self, message: frames.Fetch, send: Callable[[bytes, Span | None], None]) -> None:
        segment = self._index.find(message.key)
        if message.nonce and (segment is None or segment.header.nonce != message.nonce):
            self._wanted = message
            self._awaited.wait(message.key, self)
        elif segment is None:
            send(frames.encode(frames.Missing()), None)
        elif message.header_only:
            send(frames.encode(frames.Header(header=segment.header)), None)
        else:
            self._outgoing = segment
            self._index.hold(segment)
            head = frames.encode(frames.Segment(header=segment.header), segment.span.size)
            send(head, segment.span)

    def _confirm(self) -> None:
        """Confirm all segments that came since the answer before."""
        if self._num_stored:
            stored, self._num_stored = frames.Stored(number=self._num_stored), 0
            self.send(frames.encode(stored))

    def look_again(self) -> None:
        """The segment that is waited for has come, in this quorum or in another one."""
        message, self._wanted = self._wanted, None
        if message is not None:
            # In its turn, as this is another connection's.
            self._serve(message, self.queue)

    def _let_go(self) -> None:
        if self._outgoing is not None:
            self._index.release(self._outgoing)
            self._outgoing = None
