"""Healing: a living cell's state, copied to a joiner while the others compute.

Parameters are only written by apply, apply needs the joiner's vote, and the
joiner votes after its copy is complete and its digest matches. So the source
needs no pause and no snapshot: a thread of it reads the state as it stands
(protocol section 7).
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from mainstay_core.base import codec
from mainstay_core.base.admission import Bounds
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import (
    FIRST_HEAD_BYTES,
    MAX_HEAD_BYTES,
    PREFIX,
    pack,
    pack_head,
    parse_head,
    parse_prefix,
)
from mainstay_core.base.proofs import Purpose
from mainstay_core.rank.serving import HealFailed, Wanted, copy_problem
from mainstay_net.acceptor import listen
from mainstay_net.caller import prove
from mainstay_net.entrance import Entrance
from mainstay_train.base import job_secret, network_cut
from mainstay_train.base.sockets import socket_lock
from mainstay_train.comm.group import foreign_sockets
from mainstay_train.exact import digests
from mainstay_train.exact.optimizer import StageState

logger = logging.getLogger(__name__)

BOUNDS = Bounds(total=128)
"""On connections that have proved nothing: joiners are few, and descriptors are the trainer's."""
MAX_SERVED = 64
"""Requests served at a time, a thread each. A source with more joiners would serve each of them too
slowly; whoever is turned away asks another source, or this one again under the next plan."""

StateAt = Callable[[str, int, int], StageState | None]
"""(quorum, position, version) -> the state once it is there; None if it never will be."""


def masters_digest(state: StageState) -> str:
    """Digest of all masters that a rank holds, by model-wide parameter name."""
    return state.masters_digest().whole.hex()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _state_digest(state: StageState) -> str:
    return digests.digest_tensors((f.id, f.tensor) for f in state.flats()).hex()


class _Registered:
    """Opens and closes connections that belong to no group."""

    def accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        # accept() and the registration must be one: a group that connects meanwhile
        # would take the new socket for its own and shut it with the group.
        with socket_lock:
            connection, peer = listener.accept()
            foreign_sockets.add(connection.fileno())
        return connection, (str(peer[0]), int(peer[1]))

    def close(self, connection: socket.socket) -> None:
        close_registered(connection)


class HealServer:
    """Serves this trainer's state to joiners of its quorum.

    One thread waits for all who call, and has them prove the job's secret. Each request of a
    joiner that has gets a thread, at most ``MAX_SERVED`` at a time.

    Args:
        address: local address to listen on.
        state_at: waits for the requested version of the requested quorum.
        on_serve: called when a part of the state is on its way.
    """

    def __init__(
        self, address: str, state_at: StateAt, on_serve: Callable[[], None] = lambda: None
    ) -> None:
        self._entrance = Entrance(
            listen(address), job_secret.read(), (Purpose.HEAL,), BOUNDS, _Registered()
        )
        self.address = self._entrance.address
        self._state_at = state_at
        self._on_serve = on_serve
        self._free = threading.BoundedSemaphore(MAX_SERVED)
        threading.Thread(target=self._accept, name="heal-server", daemon=True).start()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._entrance.fileno(), select.POLLIN)
        while True:
            wait_s = self._entrance.wait_s()
            poll.poll(None if wait_s is None else math.ceil(1000 * wait_s))
            for proved in self._entrance.turn():
                proved.socket.setblocking(True)
                if not self._free.acquire(blocking=False):
                    # Told by the end alone; the joiner asks the next source.
                    close_registered(proved.socket)
                    continue
                threading.Thread(
                    target=self._serve, args=(proved.socket,), name="heal-source", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except (OSError, RemoteProtocolError) as error:
            logger.warning("a heal request ended early: %s", error)
        finally:
            close_registered(connection)
            self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        head, _ = read_frame(connection, FIRST_HEAD_BYTES)
        wanted = codec.decode(Wanted, head)
        state = self._state_at(wanted.quorum, wanted.position, wanted.version)
        if state is None:
            connection.sendall(pack({"kind": "refused", "why": f"{wanted.quorum} is over here"}))
            return
        flats = state.flats()
        listing = [[f.id, str(f.tensor.dtype), f.tensor.numel()] for f in flats]
        head = {"kind": "state", "tensors": listing, "digest": _state_digest(state)}
        connection.sendall(pack_head(head))
        for number, flat in enumerate(flats):
            if number == 1:
                self._on_serve()
            connection.sendall(_bytes_of(flat.tensor))


def close_registered(connection: socket.socket) -> None:
    """Close a socket of :func:`open_registered` or of the server, and forget its number."""
    with socket_lock:
        foreign_sockets.discard(connection.fileno())
        connection.close()


def open_registered(peer: str, local: str) -> socket.socket:
    """Connect to ``host:port`` from ``local`` with a socket that belongs to no group."""
    host, _, port = peer.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket_lock:
        connection = socket.socket(family, socket.SOCK_STREAM)
        foreign_sockets.add(connection.fileno())
    try:
        network_cut.refuse()
        connection.bind((local, 0))
        connection.connect((host, int(port)))
    except OSError:
        close_registered(connection)
        raise
    return connection


def read_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view`` from the socket.

    Raises:
        OSError: the connection ended first.
    """
    while view.nbytes:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        view = view[count:]


def read_frame(
    connection: socket.socket, max_head: int = MAX_HEAD_BYTES
) -> tuple[dict[str, Any], int]:
    """Read a frame's head; returns it with the size of the body that follows.

    Raises:
        OSError: the connection ended first.
        RemoteProtocolError: it is no frame, or the head has more than ``max_head`` bytes.
    """
    prefix = bytearray(PREFIX.size)
    read_exactly(connection, memoryview(prefix))
    head_size, body_size = parse_prefix(bytes(prefix), max_head)
    head = bytearray(head_size)
    read_exactly(connection, memoryview(head))
    return parse_head(bytes(head)), body_size


class HealClient:
    """Copies a source's state into this rank's; :meth:`shutdown` ends it from any thread."""

    def __init__(self, local: str) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._ended: str | None = None

    def shutdown(self, why: str) -> None:
        """End a running copy."""
        with self._lock:
            self._ended = why
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def copy(
        self,
        state: StageState,
        *,
        peer: str,
        quorum: str,
        position: int,
        version: int,
        expected: str,
    ) -> str:
        """Copy and verify; returns the digest of the masters.

        Args:
            state: receives the bytes; void until this returns.
            peer: the source's heal address.
            quorum: the quorum in which the copy counts.
            position: the position whose state it is: by stage, then by inner rank.
            version: the settled version.
            expected: the masters' digest that the quorum's reports name; "" if none does.

        Raises:
            HealFailed: the source is gone, refuses, or sent other bits than announced.
        """
        try:
            connection = open_registered(peer, self._local)
            with self._lock:
                if self._ended is not None:
                    close_registered(connection)
                    raise HealFailed(self._ended)
                self._connection = connection
            try:
                request = {
                    "kind": "heal",
                    "quorum": quorum,
                    "position": position,
                    "version": version,
                }
                prove(connection, job_secret.read(), peer, Purpose.HEAL)
                connection.sendall(pack(request))
                announced = self._receive(connection, state)
            finally:
                with self._lock:
                    self._connection = None
                close_registered(connection)
        except (OSError, RemoteProtocolError) as error:
            raise HealFailed(self._ended or f"copy from {peer}: {error}") from error
        state.refresh()
        found, masters = _state_digest(state), masters_digest(state)
        problem = copy_problem(announced, found, masters, expected)
        if problem:
            raise HealFailed(f"the copy from {peer} {problem}")
        return masters

    @staticmethod
    def _receive(connection: socket.socket, state: StageState) -> str:
        head, _ = read_frame(connection)
        if head.get("kind") != "state":
            raise HealFailed(str(head.get("why", "refused")))
        flats = state.flats()
        listing = [[f.id, str(f.tensor.dtype), f.tensor.numel()] for f in flats]
        if head.get("tensors") != listing:
            raise HealFailed("the source's state has another shape")
        digest = head.get("digest")
        if not isinstance(digest, str):
            raise HealFailed("the source names no digest of its state")
        for flat in flats:
            size = flat.tensor.numel() * flat.tensor.element_size()
            if flat.tensor.device.type == "cpu":
                read_exactly(connection, _bytes_of(flat.tensor))
            else:
                staged = torch.empty(size, dtype=torch.uint8)
                read_exactly(connection, _bytes_of(staged))
                flat.tensor.copy_(staged.view(flat.tensor.dtype))
        return digest
