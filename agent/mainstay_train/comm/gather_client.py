"""A member's side of the gather: blocking calls, interruptible from any thread.

``wait`` has no timeout: a member that is only late is not gone (protocol
section 5). It ends because all have posted, because an abort frame came, because
the connection ended or because another thread called ``shutdown``. A reader
thread receives, so that an abort is noticed at once even while the owner is
blocked in something else, and can be told to shut its other sockets.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

from mainstay_core.base.errors import LocalProtocolError, MainstayError, RemoteProtocolError
from mainstay_core.base.frames import PREFIX, Frame, pack, parse_head, parse_prefix
from mainstay_train.base import job_secret, network_cut
from mainstay_train.base.aborts import QuorumAborted

logger = logging.getLogger(__name__)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


OnAbort = Callable[[str, tuple[int, ...]], None]
OnPlan = Callable[[dict[str, Any]], None]


class GatherClient:
    """One member of one quorum's gather. All methods may be called from any thread.

    The constructor returns at once; a reader thread connects and joins.

    Args:
        address: ``host:port`` of the gather server.
        quorum: the quorum as text, ``q{id}-{nonce}``.
        index: position of this member in the plan.
        size: number of members.
        incarnation: this life of the trainer.
        bind_address: local address to connect from.
        on_abort: called once, in the reader thread, with the reason and the
            suspects when the quorum ends by others' doing; never after
            ``shutdown``, ``abort`` or ``leave`` of this side.
        on_plan: called in the reader thread with a newer plan that the server's
            supervisor holds, as JSON.
    """

    def __init__(
        self,
        address: str,
        quorum: str,
        index: int,
        size: int,
        incarnation: str,
        bind_address: str,
        on_abort: OnAbort | None = None,
        on_plan: OnPlan | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._peer = (host, int(port))
        self._join = pack(
            {
                "kind": "join",
                "quorum": quorum,
                "index": index,
                "size": size,
                "incarnation": incarnation,
                "proof": job_secret.prove("join", quorum, index, incarnation),
            }
        )
        self._on_abort, self._on_plan = on_abort, on_plan
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._joined = False
        self._ended: QuorumAborted | None = None
        self._posted: set[str] = set()
        self._gathered: dict[str, list[bytes]] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.bind((bind_address, 0))
        self._reader = threading.Thread(target=self._read, name=f"gather-{quorum}", daemon=True)
        self._reader.start()

    def post(self, key: str, body: bytes) -> None:
        """Give this member's bytes for ``key``. Waits until the connection stands.

        Raises:
            QuorumAborted: the quorum has ended.
            LocalProtocolError: the key was posted before by this member.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._joined or self._ended is not None)
            if self._ended is not None:
                raise self._fresh(self._ended)
            if key in self._posted:
                raise LocalProtocolError(f"{key} was posted before")
            self._posted.add(key)
        self._send(pack({"kind": "post", "key": key}, body))

    def wait(self, key: str) -> list[bytes]:
        """Return all members' bytes for ``key`` in index order, once; blocks until all posted.

        What was gathered before the quorum ended is still returned.

        Raises:
            QuorumAborted: the quorum ended before all had posted.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._gathered or self._ended is not None)
            if key in self._gathered:
                return self._gathered.pop(key)
            assert self._ended is not None
            raise self._fresh(self._ended)

    def abort(self, why: str, suspects: tuple[int, ...] = ()) -> None:
        """End the quorum for everybody, naming suspects, and shut this side."""
        self._say_and_end(
            {"kind": "abort", "why": why, "suspects": list(suspects)}, QuorumAborted(why, suspects)
        )

    def leave(self) -> None:
        """Shut this side without disturbing the others: all move on together."""
        self._say_and_end({"kind": "leave"}, QuorumAborted("this member has moved on"))

    def shutdown(self, why: str) -> None:
        """Wake every thread that waits here with QuorumAborted; returns at once.

        The others see the connection end, which ends the quorum for them.
        """
        self._end(QuorumAborted(why))
        self._shut()

    def close(self) -> None:
        """Shut this side and wait for the reader thread. Not to be called by ``on_abort``."""
        self.shutdown("closed")
        self._reader.join()

    @property
    def ended(self) -> QuorumAborted | None:
        """Why the quorum ended, if it has."""
        return self._ended

    @staticmethod
    def _fresh(end: QuorumAborted) -> QuorumAborted:
        # A new exception per raise: one object raised in two threads mixes their tracebacks.
        return QuorumAborted(end.why, end.suspects)

    def _say_and_end(self, head: dict[str, object], end: QuorumAborted) -> None:
        with self._changed:
            connected, first = self._joined, self._ended is None
        self._end(end)
        if connected and first:
            with contextlib.suppress(OSError), self._sending:
                self._socket.sendall(pack(head))
        self._shut()

    def _shut(self) -> None:
        # Only the reader closes the socket: its number must not be reused under a blocked call.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _end(self, end: QuorumAborted) -> bool:
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = end
            self._changed.notify_all()
            return True

    def _send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(message)
        except OSError as error:
            # The reader may hold the abort frame that explains it: let it finish first.
            with self._changed:
                self._changed.wait_for(lambda: self._ended is not None)
                assert self._ended is not None
                raise self._fresh(self._ended) from error

    def _read(self) -> None:
        end = QuorumAborted("the gather server's connection ended")
        try:
            self._connect()
            with self._socket.makefile("rb") as stream:
                while (frame := _read_frame(stream)) is not None:
                    if frame.kind == "abort":
                        suspects = tuple(int(s) for s in frame.head.get("suspects", ()))
                        end = QuorumAborted(str(frame.head["why"]), suspects)
                        break
                    if frame.kind == "plan":
                        if self._on_plan is not None:
                            self._on_plan(frame.head["plan"])
                        continue
                    if frame.kind != "gathered":
                        raise RemoteProtocolError(f"unknown kind {frame.kind!r}")
                    self._store(frame)
        except (OSError, MainstayError) as error:
            end = QuorumAborted(f"gather server {self._peer[0]}:{self._peer[1]}: {error}")
        finally:
            told = self._end(end)
            self._shut()
            if told and self._on_abort is not None:
                try:
                    self._on_abort(end.why, end.suspects)
                except Exception:
                    logger.exception("on_abort failed")
            with self._sending:
                self._socket.close()

    def _connect(self) -> None:
        if self._ended is None:
            network_cut.refuse()
            self._socket.connect(self._peer)
        if self._ended is not None:
            # A shutdown before the connection stood had nothing to shut.
            raise self._fresh(self._ended)
        with self._sending:
            self._socket.sendall(self._join)
        with self._changed:
            self._joined = True
            self._changed.notify_all()

    def _store(self, frame: Frame) -> None:
        bodies, offset = [], 0
        for size in frame.head["sizes"]:
            bodies.append(frame.body[offset : offset + size])
            offset += size
        with self._changed:
            self._gathered[str(frame.head["key"])] = bodies
            self._changed.notify_all()


def _read_frame(stream: _Readable) -> Frame | None:
    """Return the next frame, or None at the end of the stream."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    head_size, body_size = parse_prefix(prefix)
    raw = stream.read(head_size + body_size)
    if len(raw) < head_size + body_size:
        return None
    return Frame(parse_head(raw[:head_size]), raw[head_size:])
