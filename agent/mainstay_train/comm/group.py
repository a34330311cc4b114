"""Process groups whose blocked operations another thread can end.

A :class:`Group` is what is the same for every backend: it meets the other ranks at
the quorum's gather, runs operations, and can be ended at any time by any thread. A
:class:`~mainstay_train.comm.backend.Backend` (:mod:`gloo`, :mod:`nccl`) makes the process
group of torch and says how its operations behave.

Callers may rely on this: an operation that returned has its result, and one that could not
raises :class:`GroupEnded`. A backend gives less. NCCL's operations end without an error when
their group is aborted, and leave whatever lay in memory. So a group first notes that it has
ended and then ends what waits, and after each wait it asks whether it has ended before the
result counts. Nor does the host wait for its operations: what they yield on a device counts once
:meth:`Group.wait_for` has returned for a moment that comes after them.

A group knows which sockets belong to it: those that appeared while it connected. Ending
the group shuts their receiving side, which wakes whoever waits in gloo. A peer that was
killed can still leave an operation of gloo that never ends; therefore a wait for a
collective looks every ``LOOK_S`` whether the group has ended and leaves the operation
behind if it must. A process that cannot be got out of an ended group ends itself.

Nor does gloo destroy a process group before its operations have ended: one that is lost keeps the
destructor until its own timeout. So a group that is let go is destroyed in a thread of its own.

The ranks tell each other their addresses by the gather, which stands already and ends
with the quorum. A store of torch's would be one more thing to reach in a recovery, and
its client asks the DNS for the name of whoever it calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from mainstay_core.base.errors import brief
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.base.device import Moment
from mainstay_train.base.sockets import OpenSocket, open_sockets, shut, socket_lock, stands
from mainstay_train.comm import gloo, nccl
from mainstay_train.comm.backend import Backend
from mainstay_train.comm.ending import EXIT_BLOCKED, destroy, wait_for_aborts
from mainstay_train.comm.meeting import RANK, Meeting
from mainstay_train.comm.operations import Exchange, Message, Pending

logger = logging.getLogger(__name__)

foreign_sockets: set[int] = set()
"""File descriptors of sockets that other threads opened and that belong to no group."""


LOOK_S = 0.05
"""Between two looks at the group of an operation that is waited for: whether it has ended."""
LEAVE_S = 0.2
"""How long an operation of an ended group may take to notice by itself; normally milliseconds."""


def backend_problem(error: RuntimeError) -> str:
    """Return the fact in a backend's message, for users: without its source line and its advice."""
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", brief(error)).partition(". This is typically")[0]


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (gloo.Gloo(), nccl.Nccl())}


class Group:
    """A process group over ``size`` ranks, connected by :meth:`connect`.

    Operations may be used by one thread; :meth:`shutdown` by any.

    Args:
        name: key prefix, unique to this membership.
        meeting: where its ranks learn how to reach each other.
        rank: this process's number in the group.
        size: number of ranks.
        address: local address to bind data sockets to.
        backend: ``gloo`` or ``nccl``.
        timeout_s: back-stop of a single operation.
        connect_s: how long connecting may take once all ranks are there; then the group ends.
        unblock_s: a process that is still in an operation so long after the group has ended ends
            itself: it could answer nobody. Its slot gets a new trainer, which heals.
    """

    def __init__(
        self,
        *,
        name: str,
        meeting: Meeting,
        rank: int,
        size: int,
        address: str,
        backend: str,
        timeout_s: float,
        connect_s: float = 10.0,
        unblock_s: float = 5.0,
    ) -> None:
        self.name, self.rank, self.size, self._meeting = name, rank, size, meeting
        self._address = address
        self._backend, self._timeout = BACKENDS[backend], timedelta(seconds=timeout_s)
        self._connect_s, self._unblock_s = connect_s, unblock_s
        self._before: frozenset[OpenSocket] | None = None
        self._own: frozenset[OpenSocket] | None = None
        self._ended: str | None = None
        self._group: Any = None
        self._met = False
        """Whether all ranks were there."""
        self._bound: threading.Timer | None = None
        """Ends the group if it is not connected in time, where the backend does not."""
        self._ended_at_s = 0.0
        self._operation = 0
        """Odd while one is running."""
        self._lock = threading.Lock()

    def __del__(self) -> None:
        held = [self.__dict__.pop("_group", None)]
        if held != [None] and self._backend.waits_can_hang:
            destroy(held)

    def connect(self) -> None:
        """Meet the other ranks. Blocks until all are there.

        Raises:
            GroupEnded: shut meanwhile, or a peer is gone.
            InvalidSpecError: the backend refuses the devices of the ranks.
        """
        try:
            self._connect()
        finally:
            if self._bound is not None:
                self._bound.cancel()
            with self._lock, socket_lock:
                if self._own is None:  # what others open from here on is theirs
                    self._own = self._appeared()

    def _connect(self) -> None:
        self.check()
        wait_for_aborts(self._backend, self._timeout)
        with self._lock:
            self.check()
            with socket_lock:
                self._before = open_sockets()
        try:
            self._group = self._backend.create(
                self._meet,
                self.rank,
                self.size,
                address=self._address,
                connect=timedelta(seconds=self._connect_s),
                operation=self._timeout,
            )
        except RuntimeError as error:
            raise GroupEnded(self._why(error)) from error
        finally:
            if self._backend.ends_by_sockets:
                with self._lock, socket_lock:
                    self._own = self._appeared()
        if self.ended is not None:  # shut before there was all that had to be shut
            self._shut_all()
        self.check()
        try:
            self._backend.connect(self._group, timedelta(seconds=self._connect_s))
        except RuntimeError as error:
            raise GroupEnded(self._why(error)) from error
        with self._lock:
            self.check()
            self._met = True

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return self._backend.name

    @property
    def process_group(self) -> Any:
        """The backend's process group, for collectives that a user's code starts; once connected.

        What such a collective raises says nothing by itself: ask :meth:`broke`.
        """
        return self._group

    @property
    def waits_can_hang(self) -> bool:
        """Whether a wait can outlive the group, so that whoever waits has to look."""
        return self._backend.waits_can_hang

    @property
    def tells_sent(self) -> bool:
        """Whether a send says that it is over before :meth:`finish`: :attr:`Pending.is_over`."""
        return self._backend.tells_sent

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor where the backend can reach it: itself, or a copy in host memory."""
        return self._backend.staged(tensor)

    def finish_collective(self, work: Any, *, looks: bool = True) -> None:
        """Wait for what a user's code started on :attr:`process_group`.

        Args:
            work: the backend's.
            looks: whether it is a collective; a message's wait may not be given up and repeated.

        Raises:
            GroupEnded: the group ended before it completed.
        """
        self._run(lambda: work, looks=looks)

    def broke(self, error: RuntimeError) -> str:
        """Why the group ended, if ``error`` comes from that; empty if it stands.

        gloo raises plain errors. When a peer is lost it closes its connection, or finds
        it closed; so a group of which one connection is gone has ended.
        """
        if self._ended is None:
            tells = self._backend.ends_by_sockets and self._own is not None
            gone = tells and not all(stands(opened) for opened in self._own or ())
            if not gone and not isinstance(error, distributed.DistError):
                return ""
        return self._why(error)

    def _why(self, error: RuntimeError) -> str:
        """Why the group ended, as who ended it said; else what the backend says."""
        return self._ended or f"{self.name}: {backend_problem(error)}"

    def _meet(self, key: str, body: bytes) -> list[bytes]:
        """Give every rank this one's bytes; return those of all, by rank. :meth:`shutdown` ends it.

        Raises:
            GroupEnded: the group ended before all were there.
        """
        self.check()
        mine = RANK.pack(self.rank) + body
        bodies = self._meeting.meet(f"{self.name}/{key}", mine, self.size, lambda: self._ended)
        if self._bound is None and not self._backend.ends_by_sockets:
            self._bound = threading.Timer(self._connect_s, self._end_late)
            self._bound.daemon = True
            self._bound.start()
        return [body[RANK.size :] for body in sorted(bodies, key=lambda body: body[: RANK.size])]

    def _end_late(self) -> None:
        """End a group whose ranks are all there and have not connected in time."""
        with self._lock:
            if self._met:
                return
            self._end(f"{self.name}: not all ranks met within {self._connect_s:g} s")
        self._meeting.wake()

    def shutdown(self, why: str) -> None:
        """End every operation that waits here, and all later ones; returns at once.

        A device may still be at some of them (:func:`~mainstay_train.comm.ending.wait_for_aborts`).
        """
        with self._lock:
            self._end(why)
        self._meeting.wake()

    def _end(self, why: str) -> None:
        if self._ended is None:
            self._ended, self._ended_at_s = why, time.monotonic()
            self._watch()
        self._shut_all()

    def _shut_all(self) -> None:
        by_sockets = self._backend.ends_by_sockets
        if by_sockets or not self._met:
            # Before the abort: NCCL's has to wait while a communicator waits for other ranks,
            # unless the sockets end by which these would come.
            with socket_lock:
                for opened in self._appeared() if self._own is None else self._own:
                    shut(opened, socket.SHUT_RD, listeners=not by_sockets)
        if self._group is not None:
            self._backend.abort(self._group)

    def _appeared(self) -> frozenset[OpenSocket]:
        """Sockets opened since connecting began; none before that."""
        if self._before is None:
            return frozenset()
        new = open_sockets() - self._before
        return frozenset(opened for opened in new if opened.fd not in foreign_sockets)

    @property
    def ended(self) -> str | None:
        """Why the group ended, if it has."""
        return self._ended

    @property
    def problem(self) -> str:
        """Why what its operations yield from now on may be anything; empty while it stands."""
        if self._ended is not None:
            return self._ended
        problem = self._backend.problem(self._group) if self._met else ""
        return f"{self.name}: {problem}" if problem else ""

    @property
    def connected(self) -> bool:
        """Whether the others have met this rank here."""
        return self._met and self._ended is None

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Exchange:
        """Start an all-to-all of flat tensors; all ranks start theirs in one order.

        Args:
            received: cut by source; there after :meth:`finish_exchange`.
            sent: cut by destination; it may not change before that.
            received_sizes: elements by source.
            sent_sizes: elements by destination.

        Raises:
            GroupEnded: the group has ended.
        """
        stage_in, stage_out = self._backend.staged(sent), self._backend.staged(received)
        work = self._start(
            lambda: self._group.alltoall_base(
                stage_out, stage_in, list(received_sizes), list(sent_sizes)
            )
        )
        return Exchange(work, received, stage_out, stage_in)

    def finish_exchange(self, exchange: Exchange) -> None:
        """Wait for what :meth:`start_exchange` started.

        Raises:
            GroupEnded: the group ended before it completed.
        """
        self._run(lambda: exchange.work, looks=True)
        if exchange.staged is not exchange.received:
            exchange.received.copy_(exchange.staged)

    def abandon(self, exchanges: Sequence[Exchange]) -> None:
        """End exchanges that nobody will finish, and with them the group; waits for them briefly.

        One that is left behind may still write to its tensors.
        """
        self.shutdown("an exchange was given up")
        deadline_s = time.monotonic() + LEAVE_S
        for exchange in exchanges:
            work = exchange.work
            while not work.is_completed() and time.monotonic() < deadline_s:
                with contextlib.suppress(RuntimeError):  # why it failed, another one has told
                    work.wait(timedelta(seconds=LOOK_S))

    def send(self, message: Message) -> Pending:
        """Start sending; the tensor may change once :meth:`finish` has returned.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        pending, start = self._sending(message)
        return pending._replace(work=self._start(start))

    def receive(self, message: Message) -> Pending:
        """Start receiving; :meth:`finish` waits for it.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        pending, start = self._receiving(message)
        return pending._replace(work=self._start(start))

    def send_and_receive(self, sent: Message, received: Message) -> tuple[Pending, Pending]:
        """Start both at once: the peer may do the same, and neither waits for the other.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        going, send = self._sending(sent)
        coming, receive = self._receiving(received)
        works = self._start(lambda: self._backend.together(self._group, send, receive))
        return going._replace(work=works[0]), coming._replace(work=works[1])

    def finish(self, pending: Pending) -> None:
        """Wait for a message. A received one is in its tensor afterwards.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        self._run(lambda: pending.work)
        if pending.into is not None and pending.into is not pending.staged:
            pending.into.copy_(pending.staged)

    def wait_for(self, moment: Moment) -> None:
        """Wait until a device has done what operations of the group led to: then that counts.

        An end of the group ends no wait, as the device may be busy with ordinary work: what it has
        still to do writes to memory of the caller's.

        Raises:
            GroupEnded: the group ended before, or the device does not get there in time.
        """
        self.check()
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                moment.wait(min(LOOK_S, max(0.0, deadline_s - time.monotonic())))
            except TimeoutError as error:
                self._check_connections()
                if time.monotonic() > deadline_s:
                    # The error's own time is that of one look.
                    seconds = self._timeout.total_seconds()
                    why = f"{self.name}: the device was not done within {seconds:g} s"
                    raise GroupEnded(why) from error
            else:
                break
        self._check_connections()
        self.check()

    def _check_connections(self) -> None:
        problem = self.problem
        if problem and self._ended is None:
            raise GroupEnded(problem)

    def _sending(self, message: Message) -> tuple[Pending, Callable[[], Any]]:
        staged = self._backend.staged(message.tensor)
        return Pending(None, staged, None), lambda: self._group.send(
            [staged], message.peer, message.tag
        )

    def _receiving(self, message: Message) -> tuple[Pending, Callable[[], Any]]:
        staged = self._backend.staged(message.tensor)
        return Pending(None, staged, message.tensor), lambda: self._group.recv(
            [staged], message.peer, message.tag
        )

    def _start(self, start: Callable[[], Any]) -> Any:
        self.check()
        try:
            return start()
        except RuntimeError as error:
            raise GroupEnded(self._why(error)) from error

    def check(self) -> None:
        """Return if the group stands; else what came out of its collectives does not count.

        Raises:
            GroupEnded: the group has ended.
        """
        ended = self.ended
        if ended is not None:
            raise GroupEnded(ended)

    def _run(self, start: Any, *, looks: bool = False) -> None:
        """Start an operation and wait for it; ``looks``: its wait may be given up and repeated."""
        self._operation += 1  # before the look: who ends the group after it sees an operation
        try:
            self.check()
            work = start()
            if looks and self._backend.waits_can_hang:
                self._await(work)
            self._backend.wait(work, self._timeout)
        except RuntimeError as error:
            raise GroupEnded(self._why(error)) from error
        finally:
            self._operation += 1
        # A work that was aborted may end like one that is done.
        self.check()

    def _await(self, work: Any) -> None:
        """Wait until a collective is over, or leave it behind when the group has ended.

        Raises:
            GroupEnded: the group has ended and the operation does not notice.
        """
        while not work.is_completed():
            began_s = time.monotonic()
            try:
                work.wait(timedelta(seconds=LOOK_S))
            except RuntimeError:  # not yet, or it failed
                if time.monotonic() - began_s < LOOK_S:
                    raise
            else:
                return  # gloo never says of a reduce-scatter that it is complete
            late = self._ended is not None and time.monotonic() - self._ended_at_s > LEAVE_S
            if late and not work.is_completed():
                raise GroupEnded(self._ended or "")

    def _watch(self) -> None:
        """See that the thread in an operation comes back from it, once the group has ended."""
        operation = self._operation
        if operation % 2 == 0:
            return

        def look() -> None:
            if self._operation == operation:
                logger.error("%s: an operation does not end; this trainer does", self.name)
                os._exit(EXIT_BLOCKED)

        timer = threading.Timer(self._unblock_s, look)
        timer.daemon = True
        timer.start()
