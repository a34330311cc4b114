"""Sends segments to the store of another pod.

A connection is opened for the first segment and hangs up some time after the last. Segments are
sent one behind the other, without waiting for the answers, which come in the same order, one answer
for all segments that have come by then. What is not begun yet takes no part in keeping a segment:
one that is dropped meanwhile is not sent.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mainstay_agent.snapshots.arena import Arena
from mainstay_agent.snapshots.channel import Channel
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import FIRST_HEAD_BYTES
from mainstay_core.base.proofs import ANSWER_BYTES, NONCE_BYTES, CallerProof, Purpose
from mainstay_core.segments import frames
from mainstay_core.segments.deliveries import list_lacking
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.wire.segments import Holder, SegmentKey
from mainstay_core.wire.unit_digests import UnitDigests
from mainstay_core.wire.votes import CommitRecord

STALL_S = 30.0
"""How long a holder may answer nothing once it was sent a segment whole, or take nothing of one
that is being sent. Then it counts as gone, so that who waits for it hears so. A holder whose
process has ended is gone at once."""
LINGER_S = 20.0
"""How long a connection stays that has nothing to send: longer than most steps, and shorter than a
holder waits (``callers.IDLE_S``)."""


class Parcel(NamedTuple):
    """A segment that is to be sent."""

    key: SegmentKey
    keep_from: int
    done: Callable[[str], None]
    """Called once: with why the holder does not keep it, or an empty sentence if it does."""
    again: tuple[Holder, ...] = ()
    """Of a segment that is sent again, as others have gone: all stores that keep it then."""


class HolderLine(Channel):
    """A connection to a holder.

    Args:
        connection: of :func:`call`; it is still being opened.
        address: the holder's.
        secret: of the job.
        arena: memory of the store.
        index: what is in it.
    """

    reads_always = True
    """Answers come while the next segment is sent."""
    max_body = 0

    def __init__(
        self,
        connection: socket.socket,
        address: str,
        secret: str,
        arena: Arena,
        index: SegmentIndex,
    ) -> None:
        super().__init__(connection, arena.fd, FIRST_HEAD_BYTES)
        self._address, self._index = address, index
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._proof = CallerProof(secret, nonce, address, Purpose.SNAPSHOT)
        self._answer = b""
        self._is_open = self._is_proved = False
        self._waiting: deque[Parcel] = deque()
        self._sent: deque[tuple[Parcel, Segment]] = deque()
        """Those whose answers are still to come; the last one may not be all sent."""
        self._owed_since_s: float | None = None
        """When the oldest of them was all sent, or the last answer came, which is later; None: it
        may not be all sent. What is sent since then, and nobody has to answer, moves nothing."""
        self._notes: deque[frames.PassRecord | frames.PassDigests | frames.AskSeals] = deque()
        """Commits, and digests of units, that go before the next segment."""
        self.has_passed_on = False
        """Whether any commits were to be sent."""
        self._has_told: dict[int, bool] = {}
        """Positions of which digests of units were to be sent, and whether the holder has said
        which it has."""

    @property
    def interest(self) -> int:
        """The events to wait for; the first is that the connection stands."""
        return super().interest if self._is_open else selectors.EVENT_WRITE

    @property
    def has_more(self) -> bool:
        """Whether there is something to send."""
        return super().has_more or (self._is_proved and bool(self._waiting or self._notes))

    def put(self, parcel: Parcel) -> None:
        """Send a segment after those before it."""
        if not (self._waiting or self._sent):
            self.moved_at_s = self._clock()
        self._waiting.append(parcel)

    def pass_on(self, records: Iterable[CommitRecord]) -> None:
        """Send commits; nobody answers."""
        self.has_passed_on = True
        self._notes.extend(frames.PassRecord(record=record) for record in records)

    def pass_digests(self, told: UnitDigests) -> None:
        """Send digests of units that the store keeps.

        The first ones of a position go once the holder has said which it has, with all that it
        lacks: it may have been chosen just now, or have heard of most steps over a connection
        before this one.
        """
        if told.position not in self._has_told:
            self._has_told[told.position] = False
            self._notes.append(frames.AskSeals(position=told.position))
        elif self._has_told[told.position]:
            self._notes.append(frames.PassDigests(digests=told))

    def turn(self, events: int) -> None:
        if not self._is_open:
            self._open()
        elif not self._is_proved:
            self._prove(events)
        else:
            super().turn(events)

    def refill(self) -> bool:
        """Queue the next note, or segment that is still kept; return whether there was one."""
        if self._sent and self._owed_since_s is None:
            self._owed_since_s = self.moved_at_s
        if self._is_proved and self._notes:
            self.queue(frames.encode(self._notes.popleft()))
            return True
        while self._is_proved and self._waiting:
            parcel = self._waiting.popleft()
            segment = self._index.find(parcel.key)
            if segment is None:
                parcel.done("it was dropped before it was sent")
                continue
            self._index.hold(segment)
            self._sent.append((parcel, segment))
            message = frames.Segment(
                header=segment.header,
                keep_from=parcel.keep_from,
                holders=parcel.again or segment.holders,
                is_again=bool(parcel.again),
            )
            self.queue(frames.encode(message, segment.span.size), segment.span)
            return True
        return False

    def begin(self, head: dict[str, Any], body_size: int) -> memoryview | None:
        answer = frames.decode_to_holder(head, body_size)
        if isinstance(answer, frames.ToldSeals):
            self._pass_lacking(answer)
            return None
        number, why_not = 1, ""
        if isinstance(answer, frames.Stored):
            number = answer.number
        else:
            why_not = answer.why
        if number > len(self._sent):
            raise RemoteProtocolError("an answer to nothing")
        self._owed_since_s = None
        for _ in range(number):
            parcel, segment = self._sent.popleft()
            self._index.release(segment)
            parcel.done(why_not)
        return None

    def _pass_lacking(self, told: frames.ToldSeals) -> None:
        """Send the digests of a position's units that the holder does not have."""
        if self._has_told.get(told.position) is not False:
            raise RemoteProtocolError("an answer to nothing")
        self._has_told[told.position] = True
        lacking = list_lacking(self._index, told)
        self._notes.extend(frames.PassDigests(digests=digests) for digests in lacking)

    def finish(self) -> None:
        """Answers have no body: :meth:`begin` has taken them."""

    def ended(self, why: str) -> None:
        for parcel, segment in self._sent:
            self._index.release(segment)
            parcel.done(f"{self._address}: {why}")
        for parcel in self._waiting:
            parcel.done(f"{self._address}: {why}")
        self._sent.clear()
        self._waiting.clear()
        self._notes.clear()

    def due_s(self) -> float:
        if not (self._waiting or self._sent):
            return self.moved_at_s + LINGER_S
        since_s = self.moved_at_s if self._owed_since_s is None else self._owed_since_s
        return since_s + STALL_S

    def _open(self) -> None:
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        self._is_open = True
        self.send(self._proof.hello)

    def _prove(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            data = self.socket.recv(ANSWER_BYTES - len(self._answer))
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("it closed the connection before its proof")
        self._answer += data
        if len(self._answer) == ANSWER_BYTES:
            proof = self._proof.answered(self._answer)
            self._is_proved = True
            self.send(proof)


def call(address: str, local: str) -> socket.socket:
    """Begin to connect to ``host:port`` from ``local``; the socket does not block.

    Raises:
        OSError: it cannot even begin.
        ValueError: the address is none.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.bind((local, 0))
        code = connection.connect_ex((host, int(port)))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except (OSError, ValueError, OverflowError):
        connection.close()
        raise
    return connection
