"""A member's side of the gather: blocking calls, interruptible from any thread.

The rules are those of :mod:`mainstay_core.gather.client`; here are its socket and its
threads. A reader thread receives, so that an abort is noticed at once even while the
owner is blocked in something else, and can be told to shut its other sockets.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.frames import FrameParser
from mainstay_core.base.proofs import Purpose
from mainstay_core.gather.client import ClientProtocol, QuorumAborted
from mainstay_core.gather.frames import (
    Abort,
    Gathered,
    Join,
    Leave,
    Newer,
    Post,
    decode_for_member,
    encode,
)
from mainstay_core.rank.connections import GroupEnded
from mainstay_net.caller import prove
from mainstay_train.base import job_secret, network_cut

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16

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
        self._address, self._secret = address, job_secret.read()
        join = Join(quorum=quorum, index=index, size=size, incarnation=incarnation)
        self._protocol: ClientProtocol[bytes] = ClientProtocol(join)
        self._on_abort, self._on_plan = on_abort, on_plan
        self._changed = threading.Condition()
        """Guards the protocol; notified with everything that may end a wait."""
        self._sending = threading.Lock()
        """Held while a frame is written. Never taken while the other lock is held."""
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
            self._changed.wait_for(lambda: self._protocol.may_post)
            message = self._protocol.post(key, body)
        try:
            self._send(message)
        except OSError as error:
            # The reader may hold the abort frame that explains it: let it finish first.
            with self._changed:
                self._changed.wait_for(lambda: self._protocol.ended is not None)
                end = self._protocol.ended
                assert end is not None
                raise QuorumAborted(end.why, end.suspects, was_told=end.was_told) from error

    def wait(self, key: str) -> list[bytes]:
        """Return all members' bytes for ``key`` in index order, once; blocks until all posted.

        What was gathered before the quorum ended is still returned.

        Raises:
            QuorumAborted: the quorum ended before all had posted.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._protocol.may_take(key))
            return list(self._protocol.take(key))

    def meet(
        self, key: str, body: bytes, size: int, ended: Callable[[], str | None]
    ) -> list[bytes]:
        """Give this member's bytes and return those of all who post the key; blocks until then.

        Args:
            key: for some of the members.
            body: of this member.
            size: how many they are.
            ended: why nothing comes of it any more; asked again after :meth:`wake`.

        Returns:
            The bytes in the order of the members' indices.

        Raises:
            GroupEnded: ``ended`` gave a reason, or the quorum has ended.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._protocol.may_post or ended())
                _raise_if(ended())
                message = self._protocol.post(key, body, size)
            with contextlib.suppress(OSError):  # the reader learns why
                self._send(message)
            with self._changed:
                self._changed.wait_for(lambda: self._protocol.may_take(key) or ended())
                _raise_if(ended())
                return list(self._protocol.take(key))
        except QuorumAborted as end:
            raise GroupEnded(end.why) from end

    def wake(self) -> None:
        """Have whoever meets here ask again whether anything can come of it."""
        with self._changed:
            self._changed.notify_all()

    def abort(self, why: str, suspects: tuple[int, ...] = ()) -> None:
        """End the quorum for everybody, naming suspects, and shut this side."""
        with self._changed:
            last = self._protocol.abort(why, suspects)
            self._changed.notify_all()
        self._say_and_shut(last)

    def leave(self) -> None:
        """Shut this side without disturbing the others: all move on together."""
        with self._changed:
            last = self._protocol.leave()
            self._changed.notify_all()
        self._say_and_shut(last)

    def shutdown(self, why: str) -> None:
        """Wake every thread that waits here with QuorumAborted; returns at once.

        The others see the connection end, which ends the quorum for them.
        """
        with self._changed:
            self._protocol.shutdown(why)
            self._changed.notify_all()
        self._shut()

    def close(self) -> None:
        """Shut this side and wait for the reader thread. Not to be called by ``on_abort``."""
        self.shutdown("closed")
        self._reader.join()

    @property
    def ended(self) -> QuorumAborted | None:
        """Why the quorum ended, if it has."""
        return self._protocol.ended

    def _send(self, message: Join | Post[bytes] | Abort | Leave) -> None:
        with self._sending:
            self._socket.sendall(encode(message))

    def _say_and_shut(self, last: Abort | Leave | None) -> None:
        if last is not None:
            with contextlib.suppress(OSError):
                self._send(last)
        self._shut()

    def _shut(self) -> None:
        # Only the reader closes the socket: its number must not be reused under a blocked call.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # What follows runs in the reader thread.

    def _read(self) -> None:
        try:
            self._connect()
            parser = FrameParser()
            while data := self._socket.recv(READ_BYTES):
                for frame in parser.feed(data):
                    self._receive(decode_for_member(frame))
        except (OSError, MainstayError) as error:
            self._lose(f"gather server {self._peer[0]}:{self._peer[1]}: {error}")
        finally:
            self._lose("the gather server's connection ended")
            with self._sending:
                self._socket.close()

    def _connect(self) -> None:
        if self._protocol.ended is None:
            network_cut.refuse()
            self._socket.connect(self._peer)
            prove(self._socket, self._secret, self._address, Purpose.MEET)
        # A post that is woken by this waits for the lock: nothing is sent before the join.
        with self._sending:
            with self._changed:
                join = self._protocol.opened()
                self._changed.notify_all()
            if join is None:
                # A shutdown before the connection stood had nothing to shut.
                self._shut()
            else:
                self._socket.sendall(encode(join))

    def _receive(self, message: Gathered[bytes] | Abort | Newer) -> None:
        with self._changed:
            told = self._protocol.received(message)
            self._changed.notify_all()
        if isinstance(told, QuorumAborted):
            self._tell(told)
        elif told is not None and self._on_plan is not None:
            self._on_plan(told.plan)

    def _lose(self, why: str) -> None:
        with self._changed:
            told = self._protocol.lost(why)
            self._changed.notify_all()
        self._shut()
        if told is not None:
            self._tell(told)

    def _tell(self, end: QuorumAborted) -> None:
        self._shut()
        if self._on_abort is not None:
            try:
                self._on_abort(end.why, end.suspects)
            except Exception:
                logger.exception("on_abort failed")


def _raise_if(ended: str | None) -> None:
    if ended:
        raise GroupEnded(ended)
