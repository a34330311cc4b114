"""Accepts connections within bounds, without blocking and without a thread."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from mainstay_core.base.admission import Admission, Bounds

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted: a job's ranks call all at once. Who
finds no room is made to try again by their own kernel after a second."""
ACCEPTS_PER_TURN = 16
"""Then whoever has sent something has its turn, so that a flood cannot keep it waiting."""
NO_ROOM_PAUSE_S = 0.05
"""Before the next try when there was no descriptor: others may be given back meanwhile."""
TELL_EVERY_S = 60.0
"""Between two lines of the log about strangers: a line for each would fill the disk."""
SHARE_OF_DESCRIPTORS = 4
"""At most one in so many of the process's descriptors may be held by who has proved nothing."""
MIN_TOTAL = 8
"""Connections without a proof that there is always room for: fewer keep pods out of each other."""

_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CLOSED = frozenset({errno.EBADF, errno.EINVAL})


class Accepted(NamedTuple):
    """A connection that was accepted."""

    key: int
    """Its name for the acceptor."""
    socket: socket.socket
    """It does not block."""
    address: str
    """Of the peer, without its port."""
    port: int


class Sockets(Protocol):
    """Opens and closes the connections of a listener."""

    def accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        """Return a new connection and the peer's address and port.

        Raises:
            OSError: as of ``socket.accept``.
        """

    def close(self, connection: socket.socket) -> None:
        """Close a connection."""


class PlainSockets:
    """Opens and closes connections, and does nothing else."""

    def accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        connection, peer = listener.accept()
        return connection, (str(peer[0]), int(peer[1]))

    def close(self, connection: socket.socket) -> None:
        connection.close()


def listen(address: str, port: int = 0, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens on ``address``; port 0 takes a free one.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # With its protocol named, or asyncio leaves Nagle's algorithm on: 40 ms for every answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """Return where a socket listens, as ``host:port``: so plans and reports name it."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it is allowed to at most.

    A server may be told of fewer by its parent: 1024 is the default of shells.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # what was allowed before still is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit(bounds: Bounds) -> Bounds:
    """Return bounds that this process's limit of descriptors has room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return bounds
    share = max(MIN_TOTAL, soft // SHARE_OF_DESCRIPTORS)
    return replace(
        bounds,
        total=min(bounds.total, share),
        per_address=min(bounds.per_address, share),
        asked=min(bounds.asked, share),
    )


class Acceptor:
    """Accepts the connections of one listener. For one thread; nothing here blocks.

    Whoever drives it waits until :meth:`fileno` is readable or :meth:`wait_s` is over, then calls
    :meth:`turn`. Connections that have proved nothing are its own until :meth:`proved`.

    Args:
        listener: listens already; closed by :meth:`close`.
        drop: closes a connection whose time is over or whose place is needed, by its key.
        bounds: on connections that have proved nothing.
        sockets: opens and closes connections.
        clock: never jumps, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        drop: Callable[[int], None],
        bounds: Bounds,
        sockets: Sockets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sockets: Sockets = sockets or PlainSockets()
        self.selector = selectors.EpollSelector()
        """Of the listener; a subclass's connections join it."""
        self._listener, self._drop, self._clock = listener, drop, clock
        self._listener.setblocking(False)
        self._admission: Admission[int] = Admission(fit(bounds), clock())
        self._keys = itertools.count(1)
        self._resumes_at_s: float | None = None
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY)
        """A descriptor to give up when there is none left, to turn away who waits in the queue."""
        self._num_turned_away, self._told_at_s = 0, -TELL_EVERY_S
        self.selector.register(listener, selectors.EVENT_READ)

    @property
    def num_unproved(self) -> int:
        """Number of connections that have proved nothing."""
        return len(self._admission)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to do."""
        return self.selector.fileno()

    def wait_s(self) -> float | None:
        """Return after how many seconds there is something to do in any case; None: never."""
        times = (self._resumes_at_s, self._admission.next_deadline_s())
        due = min((time_s for time_s in times if time_s is not None), default=None)
        return None if due is None else max(0.0, due - self._clock())

    def turn(self) -> list[Accepted]:
        """Close what is late, and return the connections that were accepted now."""
        now_s = self._clock()
        self._give_up(self._admission.expired(now_s), [])
        if self._resumes_at_s is not None:
            if now_s < self._resumes_at_s:
                return []
            self._resumes_at_s = None
            self.selector.register(self._listener, selectors.EVENT_READ)
        return self._accept(now_s)

    def proved(self, key: int) -> None:
        """A connection has proved itself, and is the driver's alone from now on."""
        self._admission.proved(key)

    def asked(self, key: int) -> None:
        """A connection has sent a whole request, about which somebody else is asked."""
        self._give_up(self._admission.asked(key, self._clock()), [])

    def ended(self, key: int, why: str = "") -> None:
        """A connection has ended; with ``why`` it was turned away."""
        self._admission.ended(key)
        if why:
            self._turned_away(why)

    def close(self) -> None:
        """Stop listening. Connections that have proved nothing are closed by :meth:`drop_all`."""
        self.selector.close()
        self._listener.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def drop_all(self) -> None:
        """Close every connection that has proved nothing."""
        while len(self._admission):
            self._give_up(self._admission.make_room(), [])

    def _accept(self, now_s: float) -> list[Accepted]:
        accepted: list[Accepted] = []
        for _ in range(ACCEPTS_PER_TURN):
            pause_s = self._admission.pause_s(now_s)
            if pause_s > 0.0:
                self._pause(now_s + pause_s)
                break
            try:
                connection, (address, port) = self.sockets.accept(self._listener)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _CLOSED:
                    raise
                if error.errno in _NO_ROOM:
                    self._make_room(now_s, error, accepted)
                    break
                # The peer's error, accept(2) says: it was gone before its turn came.
                continue
            connection.setblocking(False)
            key = next(self._keys)
            accepted.append(Accepted(key, connection, address, port))
            self._give_up(self._admission.opened(key, address, now_s), accepted)
        return accepted

    def _give_up(self, keys: list[int], accepted: list[Accepted]) -> None:
        """Close connections. Of those that were accepted just now the driver has not heard yet."""
        for _ in keys:
            self._turned_away("it has proved nothing")
        for new in [each for each in accepted if each.key in keys]:
            accepted.remove(new)
            keys.remove(new.key)
            self.sockets.close(new.socket)
        for key in keys:
            self._drop(key)

    def _pause(self, until_s: float) -> None:
        self.selector.unregister(self._listener)
        self._resumes_at_s = until_s

    def _make_room(self, now_s: float, error: OSError, accepted: list[Accepted]) -> None:
        """Go on without descriptors: by those of strangers, else by turning away the next one."""
        self._turned_away(f"the process has no descriptor left ({error.strerror})")
        self._give_up(self._admission.make_room(), accepted)
        if self._reserve is not None:
            os.close(self._reserve)
            with contextlib.suppress(OSError):
                connection, _ = self.sockets.accept(self._listener)
                self.sockets.close(connection)
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            self._reserve = None
        self._pause(now_s + NO_ROOM_PAUSE_S)

    def _turned_away(self, why: str) -> None:
        self._num_turned_away += 1
        now_s = self._clock()
        if now_s - self._told_at_s >= TELL_EVERY_S:
            self._told_at_s = now_s
            logger.warning(
                "%s: %d connections were turned away so far, the last one because %s",
                address_of(self._listener),
                self._num_turned_away,
                why,
            )
