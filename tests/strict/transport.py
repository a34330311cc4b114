"""Moves bytes between the ranks of a group, without buffers and in one order."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HEADER = struct.Struct("!cQ")
READY, DATA = b"R", b"D"
"""A receive has begun and has room for so many bytes; so many bytes follow."""
HELLO = struct.Struct("!I")
GARBAGE = 0xA5
"""In what an aborted receive leaves."""


@dataclass(slots=True)
class Leg:
    """One direction of an operation with one peer."""

    peer: int
    outgoing: bool
    buffer: memoryview
    done: bool = False


@dataclass(slots=True)
class Operation:
    """Transfers that go on side by side. It ends when all of them have."""

    legs: Sequence[Leg]
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Line:
    """The connection with one peer."""

    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    credit: int | None = None
    """Bytes for which the peer has room; None while it does not receive."""
    lost: str = ""


class Transport:
    """One rank's connections with its group.

    Args:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._lines: dict[int, _Line] = {}
        self._waiting: deque[Operation] = deque()
        self._changed = threading.Condition()
        self._aborted = False
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self.problem = ""
        """Why operations do not go on, for who asks."""
        self.has_problem = threading.Event()

    def connect(
        self, exchange: Callable[[str, bytes], list[bytes]], address: str, timeout_s: float
    ) -> None:
        """Meet all ranks; blocks until they are there.

        Raises:
            RuntimeError: aborted, a peer is gone, or not within ``timeout_s``.
        """
        try:
            self._meet(exchange, address, timeout_s)
        except OSError as error:  # a peer is gone, or the group was ended: its sockets are shut
            raise RuntimeError(f"a connection failed: {error}") from error
        for line in self._lines.values():
            line.sock.setblocking(False)
            line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._run, name="strict", daemon=True)
        self._thread.start()

    def _meet(
        self, exchange: Callable[[str, bytes], list[bytes]], address: str, timeout_s: float
    ) -> None:
        with socket.create_server((address, 0)) as server:
            own = f"{address}:{server.getsockname()[1]}".encode()
            addresses = exchange("strict", own)
            deadline_s = time.monotonic() + timeout_s
            server.settimeout(0.05)
            for peer in range(self.rank):
                host, _, port = addresses[peer].decode().rpartition(":")
                sock = socket.create_connection((host, int(port)), timeout_s)
                sock.sendall(HELLO.pack(self.rank))
                self._lines[peer] = _Line(sock)
            while len(self._lines) < self.size - 1:
                self._go_on(deadline_s)
                with contextlib.suppress(TimeoutError):
                    sock, _ = server.accept()
                    sock.settimeout(timeout_s)
                    (peer,) = HELLO.unpack(_exactly(sock, HELLO.size))
                    self._lines[peer] = _Line(sock)

    def _go_on(self, deadline_s: float) -> None:
        if self._aborted:
            raise RuntimeError("aborted while connecting")
        if time.monotonic() > deadline_s:
            raise RuntimeError("not all ranks are there")

    def start(self, legs: Sequence[Leg]) -> Operation:
        """Queue an operation behind those that were started before."""
        operation = Operation(legs)
        with self._changed:
            if self._aborted:
                _spoil(operation)
            else:
                self._waiting.append(operation)
                self._changed.notify_all()
        return operation

    def abort(self) -> None:
        """End all operations, without an error; returns when they are over."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        if self._thread is not None:
            self._thread.join()

    def _note(self, problem: str) -> None:
        self.problem = problem
        self.has_problem.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._aborted)
                if self._aborted:
                    for operation in self._waiting:
                        _spoil(operation)
                    self._waiting.clear()
                    break
                operation = self._waiting[0]
            if self._carry_out(operation):
                with self._changed:
                    self._waiting.popleft()
                operation.ended.set()
        for line in self._lines.values():
            line.sock.close()
        self._wake.close()
        self._woken.close()

    def _carry_out(self, operation: Operation) -> bool:
        """Run an operation; False if the group was aborted first."""
        for leg in operation.legs:
            if not leg.outgoing:
                self._write(self._lines[leg.peer], HEADER.pack(READY, len(leg.buffer)))
        left = list(operation.legs)
        while left and not self._aborted:
            for leg in left:
                leg.done = self._advance(leg)
            still = [leg for leg in left if not leg.done]
            if len(still) == len(left):
                self._wait()
            left = still
        return not left

    def _advance(self, leg: Leg) -> bool:
        line = self._lines[leg.peer]
        if leg.outgoing:
            if line.credit is None:
                return False
            if line.credit != len(leg.buffer):
                self._note(f"{len(leg.buffer)} bytes for a receive of {line.credit}")
                return False
            line.credit = None
            self._write(line, HEADER.pack(DATA, len(leg.buffer)))
            self._write(line, leg.buffer)
            return True
        whole = HEADER.size + len(leg.buffer)
        if len(line.received) < whole or line.received[:1] != DATA:
            return False
        leg.buffer[:] = line.received[HEADER.size : whole]
        del line.received[:whole]
        self._take_credit(line)
        return True

    @staticmethod
    def _take_credit(line: _Line) -> None:
        while len(line.received) >= HEADER.size and line.received[:1] == READY:
            _, line.credit = HEADER.unpack(line.received[: HEADER.size])
            del line.received[: HEADER.size]

    def _wait(self, writes: _Line | None = None) -> None:
        """Wait until something can be read, which is done, or a line written."""
        lines = [line for line in self._lines.values() if not line.lost]
        reads = [self._woken, *(line.sock for line in lines)]
        readable, _, _ = select.select(reads, [writes.sock] if writes else [], [])
        for line in lines:
            if line.sock in readable:
                try:
                    data = line.sock.recv(1 << 20)
                except OSError as error:
                    data, line.lost = b"", str(error)
                if not data:
                    line.lost = line.lost or "a peer closed its connection"
                    self._note(line.lost)
                line.received += data
                self._take_credit(line)

    def _write(self, line: _Line, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view and not line.lost and not self._aborted:
            try:
                view = view[line.sock.send(view) :]
            except BlockingIOError:
                self._wait(line)  # the peer may be writing as well: its bytes are taken
            except OSError as error:
                line.lost = str(error)
                self._note(line.lost)


def _spoil(operation: Operation) -> None:
    for leg in operation.legs:
        if not leg.outgoing and not leg.done:
            leg.buffer[:] = bytes([GARBAGE]) * len(leg.buffer)
    operation.ended.set()


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise RuntimeError("a rank left while connecting")
        data += more
    return data
