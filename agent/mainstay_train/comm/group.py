"""Process groups whose blocked operations another thread can end.

A :class:`Group` is what is the same for every backend: it meets the other ranks at a
store, runs operations, and can be ended at any time by any thread. A
:class:`Backend` (:mod:`gloo`, :mod:`nccl`) makes the process group of torch and says how
its operations behave.

A group knows which sockets belong to it: those that appeared while it connected. Ending
the group shuts their receiving side, which wakes whoever waits in gloo. A peer that was
killed can still leave an operation of gloo that never ends; therefore a wait for a
collective looks every ``LOOK_S`` whether the group has ended and leaves the operation
behind if it must. A process that cannot be got out of an ended group ends itself.

The store is in a pod's launcher, never in a trainer, and every group has a
prefix of its own: keys of an older quorum are never seen again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore

from mainstay_core.base.errors import brief
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.base import network_cut
from mainstay_train.base.sockets import OpenSocket, open_sockets, shut, socket_lock, stands
from mainstay_train.comm import gloo, nccl

logger = logging.getLogger(__name__)

foreign_sockets: set[int] = set()
"""File descriptors of sockets that other threads opened and that belong to no group."""


LOOK_S = 0.05
"""Between two looks whether the group of a waiting collective has ended."""
LEAVE_S = 0.2
"""How long an operation of an ended group may take to notice by itself; normally milliseconds."""
UNBLOCK_S = 5.0
"""A process that is still inside an ended group's operation after this long ends itself: it could
answer nobody. Its slot gets a new trainer, which heals."""
EXIT_BLOCKED = 5

_left_behind: list[Any] = []
"""Groups with an operation that never ends, kept: their destructors would wait for it."""


def backend_problem(error: RuntimeError) -> str:
    """Return the fact in a backend's message, for users: without its source line and its advice."""
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", brief(error)).partition(". This is typically")[0]


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """An all-to-all on its way."""

    work: Any
    received: torch.Tensor
    staged: torch.Tensor
    """What the backend receives into."""
    sent: torch.Tensor
    """What the backend reads: kept until it is over."""


def _ready(rank: int) -> str:
    return f"ready/{rank}"


class Backend(Protocol):
    """A library that carries a group's tensors."""

    @property
    def name(self) -> str:
        """Its name, as in ``runtime.backend``."""

    @property
    def connects_at_once(self) -> bool:
        """Whether all ranks have met once the group is made; else the first operation connects."""

    @property
    def waits_can_hang(self) -> bool:
        """Whether a wait may never end although the group's sockets were shut."""

    def create(
        self,
        store: PrefixStore,
        rank: int,
        size: int,
        *,
        address: str,
        connect: timedelta,
        operation: timedelta,
    ) -> Any:
        """Make torch's process group.

        Args:
            store: the rendezvous store, under the group's prefix.
            rank: this process's number in the group.
            size: number of ranks.
            address: local address to bind data sockets to.
            connect: how long connecting may take.
            operation: how long one operation may take.
        """

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor where the backend can reach it: itself, or a copy in host memory."""

    def abort(self, group: Any) -> None:
        """End the operations of a process group by the backend's own means, if it has any."""

    def keys(self, rank: int) -> Sequence[str]:
        """Keys that a rank leaves in the group's store."""


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (gloo.Gloo(), nccl.Nccl())}


class Group:
    """A process group over ``size`` ranks, connected by :meth:`connect`.

    Operations may be used by one thread; :meth:`shutdown` by any.

    Args:
        name: key prefix, unique to this membership.
        store: ``host:port`` of the rendezvous store.
        rank: this process's number in the group.
        size: number of ranks.
        address: local address to bind data sockets to.
        backend: ``gloo`` or ``nccl``.
        timeout_s: back-stop of a single operation.
        connect_s: how long reaching the store, and then the ranks, may take; then it fails.
        former: (name, rank) of groups that this process has left for good, at the same store:
            what it wrote there for them is deleted.
    """

    def __init__(
        self,
        *,
        name: str,
        store: str,
        rank: int,
        size: int,
        address: str,
        backend: str,
        timeout_s: float,
        connect_s: float = 10.0,
        former: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.name, self.rank, self.size, self.store = name, rank, size, store
        self._former, self._address = tuple(former), address
        self._backend, self._timeout = BACKENDS[backend], timedelta(seconds=timeout_s)
        self._connect_s = connect_s
        self._before: frozenset[OpenSocket] | None = None
        self._own: frozenset[OpenSocket] | None = None
        self._ended: str | None = None
        self._group: Any = None
        self._scoped: PrefixStore | None = None
        self._met = False
        self._ended_at_s = 0.0
        self._operation = 0
        """Odd while one is running."""
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Meet the other ranks. Blocks until all are there.

        Raises:
            GroupEnded: shut meanwhile, or a peer is gone.
        """
        with self._lock:
            self._alive()
            with socket_lock:
                self._before = open_sockets()
        try:
            store = self._reach_store()
            # Shut while the store's connection was not there yet: nothing would end what follows.
            self._alive()
            scoped = self._scoped = PrefixStore(self.name, store)
            scoped.set(_ready(self.rank), "1")
            self._tidy(store)
            self._await_all(scoped)
            self._group = self._create(scoped)
        except RuntimeError as error:
            raise GroupEnded(self.ended or f"{self.name}: {backend_problem(error)}") from error
        finally:
            with self._lock, socket_lock:
                self._own = self._appeared()
        if self.ended is not None:
            self._shut_all()
        self._alive()
        self._met = self._backend.connects_at_once

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return self._backend.name

    @property
    def keys(self) -> PrefixStore:
        """The store under this group's prefix; there once connected."""
        assert self._scoped is not None, "connected first"
        return self._scoped

    @property
    def process_group(self) -> Any:
        """The backend's process group, for collectives that a user's code starts; once connected.

        What such a collective raises says nothing by itself: ask :meth:`broke`.
        """
        return self._group

    def used(self) -> None:
        """Collectives of a user's code completed here: all ranks have met."""
        self._met = True

    def broke(self, error: RuntimeError) -> str:
        """Why the group ended, if ``error`` comes from that; empty if it stands.

        gloo raises plain errors. When a peer is lost it closes its connection, or finds
        it closed; so a group of which one connection is gone has ended.
        """
        if self._ended is None:
            gone = self._own is not None and not all(stands(opened) for opened in self._own)
            if not gone and not isinstance(error, distributed.DistError):
                return ""
        return self._ended or f"{self.name}: {backend_problem(error)}"

    def _reach_store(self) -> TCPStore:
        """Connect to the rendezvous store.

        The store's client keeps trying when it is refused, and nothing can end that
        from outside; so a store that died is found by a plain connection first.
        """
        host, _, port = self.store.rpartition(":")
        try:
            network_cut.refuse()
            socket.create_connection((host, int(port)), self._connect_s).close()
        except OSError as error:
            raise GroupEnded(f"{self.name}: store {self.store}: {error}") from error
        patience = timedelta(seconds=self._connect_s)
        store = TCPStore(host, int(port), None, False, patience, wait_for_workers=False)
        store.set_timeout(self._timeout)
        return store

    def _await_all(self, store: PrefixStore) -> None:
        """Wait until every rank is about to connect: a wait that :meth:`shutdown` can end.

        The connecting itself cannot be ended while it waits for a peer to call, as it
        has no connection that could be shut. With all ranks there it takes
        milliseconds, so it gets a short timeout of its own.
        """
        store.wait([_ready(rank) for rank in range(self.size)], self._timeout)

    def _tidy(self, store: TCPStore) -> None:
        """Delete what is left of former groups, while the others of this one are awaited."""
        for name, rank in self._former:
            for key in (_ready(rank), *self._backend.keys(rank)):
                store.delete_key(f"{name}/{key}")

    def _create(self, store: PrefixStore) -> Any:
        return self._backend.create(
            store,
            self.rank,
            self.size,
            address=self._address,
            connect=timedelta(seconds=self._connect_s),
            operation=self._timeout,
        )

    def shutdown(self, why: str) -> None:
        """End every operation that waits here, and all later ones; returns at once."""
        with self._lock:
            if self._ended is None:
                self._ended, self._ended_at_s = why, time.monotonic()
                self._watch()
            self._shut_all()

    def _shut_all(self) -> None:
        if self._group is not None:
            self._backend.abort(self._group)
        with socket_lock:
            for opened in self._appeared() if self._own is None else self._own:
                shut(opened, socket.SHUT_RD)

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
    def connected(self) -> bool:
        """Whether the others have met this rank here; NCCL meets in its first operation."""
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
        self._alive()
        try:
            work = self._group.alltoall_base(
                stage_out, stage_in, list(received_sizes), list(sent_sizes)
            )
        except RuntimeError as error:
            raise GroupEnded(self._ended or f"{self.name}: {backend_problem(error)}") from error
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
        """End exchanges that nobody will finish, and with them the group's connections.

        One that does not end is left behind. It may still write to its tensors.
        """
        with self._lock:
            self._shut_all()
        deadline_s = time.monotonic() + LEAVE_S
        for exchange in exchanges:
            work = exchange.work
            while not work.is_completed() and time.monotonic() < deadline_s:
                with contextlib.suppress(RuntimeError):  # why it failed, another one has told
                    work.wait(timedelta(seconds=LOOK_S))
            if not work.is_completed():
                _left_behind.append((self._group, work))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        """Start sending; returns the work to wait for before the tensor may change."""
        staged = self._backend.staged(tensor)
        self._alive()
        try:
            return self._group.send([staged], peer, tag), staged
        except RuntimeError as error:
            raise GroupEnded(f"{self.name}: send to {peer}: {backend_problem(error)}") from error

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Receive into ``tensor``; blocks.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        staged = self._backend.staged(tensor)
        self._run(lambda: self._group.recv([staged], peer, tag))
        if staged is not tensor:
            tensor.copy_(staged)

    def finish(self, work: Any) -> None:
        """Wait for what :meth:`send` started.

        Raises:
            GroupEnded: the peer is gone or the group was shut.
        """
        self._run(lambda: work[0])

    def _alive(self) -> None:
        ended = self.ended
        if ended is not None:
            raise GroupEnded(ended)

    def _run(self, start: Any, *, looks: bool = False) -> None:
        """Start an operation and wait for it; ``looks``: its wait may be given up and repeated."""
        self._alive()
        self._operation += 1
        try:
            work = start()
            if looks and self._backend.waits_can_hang:
                self._await(work)
            # Said each time: a receive would fall back on the timeout of connecting.
            work.wait(self._timeout)
            self._met = True
        except RuntimeError as error:
            raise GroupEnded(self._ended or f"{self.name}: {backend_problem(error)}") from error
        finally:
            self._operation += 1

    def _await(self, work: Any) -> None:
        """Wait until a collective is over, or leave it behind when the group has ended.

        Raises:
            GroupEnded: the group has ended and the operation does not notice.
        """
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not yet; why it failed is asked later
                work.wait(timedelta(seconds=LOOK_S))
            late = self._ended is not None and time.monotonic() - self._ended_at_s > LEAVE_S
            if late and not work.is_completed():
                _left_behind.append((self._group, work))
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

        timer = threading.Timer(UNBLOCK_S, look)
        timer.daemon = True
        timer.start()
