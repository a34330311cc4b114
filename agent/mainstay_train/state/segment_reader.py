"""Reads segments from the stores of other pods."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from mainstay_core.base.errors import MainstayError, RemoteProtocolError
from mainstay_core.base.frames import MAX_HEAD_BYTES
from mainstay_core.base.proofs import Purpose
from mainstay_core.segments import frames
from mainstay_core.wire.segments import (
    MAX_SEGMENT_BYTES,
    SegmentHeader,
    SegmentKey,
    StoreReport,
)
from mainstay_core.wire.unit_digests import UnitDigests
from mainstay_net.caller import prove
from mainstay_train.base import job_secret
from mainstay_train.comm.registered import (
    close_registered,
    open_registered,
    read_exactly,
    read_frame,
)

STALL_S = 30.0
"""How long a store may send nothing, or not let us connect. Then the next holder is asked."""
MAX_IDLE = 8
"""Connections that are kept for the next segment. Stores are asked in turns for many segments, and
each connection costs a proof of the job's secret."""


Question = frames.Fetch | frames.Doubt | frames.AskDigests
Answer = frames.Segment | frames.Header | frames.Missing | frames.Noted | frames.ToldDigests
"""What a store answers to somebody who wants a segment or the digests of a step's units, or has
found a segment damaged."""


class ReaderEnded(MainstayError):  # noqa: N818 - a state, not a failure
    """This reader was shut down."""


class SegmentReader:
    """Asks stores for segments; :meth:`shutdown` ends it from any thread.

    Several threads may read at a time, each over a connection of its own.

    Args:
        local: address to call from.
    """

    def __init__(self, local: str) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._idle: list[tuple[str, socket.socket]] = []
        """With their addresses, the longest idle first."""
        self._busy: set[socket.socket] = set()
        self._ended: str | None = None

    def shutdown(self, why: str) -> None:
        """End all reading, now and later."""
        with self._lock:
            self._ended = self._ended or why
            idle, self._idle = self._idle, []
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for _, connection in idle:
            close_registered(connection)

    def interrupt(self) -> None:
        """Break what is being read, which ends with an OSError; later reading is not concerned."""
        with self._lock:
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def fetch(self, address: str, key: SegmentKey, into: memoryview) -> SegmentHeader | None:
        """Read a segment into memory of its size; return its header, None if it is not there.

        Raises:
            OSError: the store cannot be reached, or the connection broke; ``into`` is void then.
            RemoteProtocolError: it says what it may not, or the segment has another size.
            ReaderEnded: this reader was shut down.
        """
        answer = self._ask(address, frames.Fetch(key=key), into)
        assert not isinstance(answer, frames.Noted | frames.ToldDigests)
        return None if isinstance(answer, frames.Missing) else answer.header

    def digests(
        self, address: str, lineage: int, position: int, step: int, timeout_s: float
    ) -> UnitDigests | None:
        """Return what a store knows of the units of a position in a step; None if nothing.

        Args:
            address: where it listens.
            lineage: of the step.
            position: of the units.
            step: of which digests are wanted.
            timeout_s: how long it may let us connect.

        Raises:
            OSError: the store cannot be reached, or the connection broke.
            RemoteProtocolError: it says what it may not.
            ReaderEnded: this reader was shut down.
        """
        asked = frames.AskDigests(request=0, lineage=lineage, position=position, step=step)
        answer = self._ask(address, asked, None, timeout_s=timeout_s)
        assert isinstance(answer, frames.ToldDigests)
        return answer.digests

    def doubt(self, address: str, header: SegmentHeader) -> None:
        """Tell a store that a segment which it sent has not the digest that its header names.

        Raises:
            OSError: the store cannot be reached, or the connection broke.
            RemoteProtocolError: it says what it may not.
            ReaderEnded: this reader was shut down.
        """
        doubt = frames.Doubt(key=header.key, nonce=header.nonce, digest=header.digest)
        self._ask(address, doubt, None)

    def fetch_awaited(
        self,
        address: str,
        key: SegmentKey,
        nonce: str,
        into: memoryview,
        ended: Callable[[], str],
    ) -> SegmentHeader:
        """Read a segment that was written in the quorum of a nonce, once it is there.

        Args:
            address: of the store in which it appears.
            key: of the segment.
            nonce: of the quorum.
            into: receives it, of its size.
            ended: returns why nobody waits any longer; asked again after :meth:`interrupt`.

        Raises:
            TimeoutError: it has not come for long.
            OSError, RemoteProtocolError, ReaderEnded: as :meth:`fetch`.
        """
        answer = self._ask(address, frames.Fetch(key=key, nonce=nonce), into, ended)
        if not isinstance(answer, frames.Segment):
            raise RemoteProtocolError(f"a store that was to wait for {key} did not")
        return answer.header

    def report(self, address: str, lineage: int, timeout_s: float) -> StoreReport:
        """Return what a store keeps of a lineage.

        Args:
            address: where it listens.
            lineage: of the plan.
            timeout_s: how long it may let us connect, or send nothing.

        Raises:
            OSError: the store cannot be reached, or does not answer.
            RemoteProtocolError: it says what it may not.
            ReaderEnded: this reader was shut down.
        """
        connection = open_registered(address, self._local, timeout_s)
        try:
            with self._entered(connection):
                prove(connection, job_secret.read(), address, Purpose.SNAPSHOT)
                connection.sendall(frames.encode(frames.AskReport(request=0, lineage=lineage)))
                head, size = read_frame(connection, 0, MAX_HEAD_BYTES)
        finally:
            close_registered(connection)
        answer = frames.decode_to_reader(head, size)
        if not isinstance(answer, frames.Reported) or answer.report.lineage != lineage:
            raise RemoteProtocolError(f"not what was asked for: lineage {lineage}")
        return answer.report

    def _ask(
        self,
        address: str,
        message: Question,
        into: memoryview | None,
        ended: Callable[[], str] = lambda: "",
        timeout_s: float = STALL_S,
    ) -> Answer:
        idle = self._take_idle(address)
        if idle is not None:
            # A store hangs up on a connection that is idle for long: then a new one is opened.
            with contextlib.suppress(OSError):
                return self._ask_over(idle, address, message, into, ended, timeout_s)
            self._raise_if_ended()
        connection = open_registered(address, self._local, timeout_s)
        try:
            with self._entered(connection):
                prove(connection, job_secret.read(), address, Purpose.SNAPSHOT)
        except (OSError, MainstayError):
            close_registered(connection)
            raise
        return self._ask_over(connection, address, message, into, ended, timeout_s)

    def _ask_over(
        self,
        connection: socket.socket,
        address: str,
        message: Question,
        into: memoryview | None,
        ended: Callable[[], str],
        timeout_s: float,
    ) -> Answer:
        """Ask over a connection, which is closed unless all went well."""
        try:
            with self._entered(connection, ended):
                connection.settimeout(timeout_s)
                connection.sendall(frames.encode(message))
                answer = _read_answer(connection, message, into)
        except (OSError, MainstayError):
            close_registered(connection)
            raise
        self._put_idle(address, connection)
        return answer

    @contextlib.contextmanager
    def _entered(
        self, connection: socket.socket, ended: Callable[[], str] = lambda: ""
    ) -> Iterator[None]:
        """Have a shutdown or an interrupt end what is done over a connection meanwhile."""
        with self._lock:
            self._raise_if_ended()
            if why := ended():  # said before the interrupt, which has not seen this connection
                raise ConnectionAbortedError(why)
            self._busy.add(connection)
        try:
            yield
        except OSError:
            self._raise_if_ended()
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)

    def _take_idle(self, address: str) -> socket.socket | None:
        with self._lock:
            for at, (where, connection) in enumerate(self._idle):
                if where == address:
                    del self._idle[at]
                    return connection
        return None

    def _put_idle(self, address: str, connection: socket.socket) -> None:
        surplus: list[socket.socket] = []
        with self._lock:
            if self._ended is not None:
                surplus.append(connection)
            else:
                self._idle.append((address, connection))
                surplus += [c for _, c in self._idle[:-MAX_IDLE]]
                self._idle = self._idle[-MAX_IDLE:]
        for closed in surplus:
            close_registered(closed)

    def _raise_if_ended(self) -> None:
        if self._ended is not None:
            raise ReaderEnded(self._ended)


def _read_answer(connection: socket.socket, message: Question, into: memoryview | None) -> Answer:
    """Read what a store answers, and a segment's bytes into memory of their size.

    Raises:
        OSError: the connection ended first.
        RemoteProtocolError: it is no answer to this message.
    """
    head, size = read_frame(connection, MAX_SEGMENT_BYTES, frames.MAX_PEER_HEAD_BYTES)
    answer = frames.decode_to_reader(head, size)
    if isinstance(answer, frames.Missing) and isinstance(message, frames.Fetch):
        return answer
    wanted = _wanted(message, into)
    if isinstance(answer, frames.Missing | frames.Reported) or not isinstance(answer, wanted):
        raise RemoteProtocolError(f"not what was asked for: {message}")
    if isinstance(answer, frames.Noted | frames.ToldDigests):
        return answer
    assert isinstance(message, frames.Fetch)
    if answer.header.key != message.key:
        raise RemoteProtocolError(f"not what was asked for: {message.key}")
    if into is not None:
        if size != into.nbytes:
            raise RemoteProtocolError(f"{message.key} has {size} bytes, not {into.nbytes}")
        read_exactly(connection, into)
    return answer


def _wanted(message: Question, into: memoryview | None) -> type[Answer]:
    """Return what a store answers to a message, if it has what is asked for."""
    match message:
        case frames.Doubt():
            return frames.Noted
        case frames.AskDigests():
            return frames.ToldDigests
        case frames.Fetch():
            return frames.Segment if into is not None else frames.Header
