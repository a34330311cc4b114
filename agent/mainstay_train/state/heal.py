"""Healing: a living cell's state, copied to a joiner while the others compute.

Parameters are only written by apply, apply needs the joiner's vote, and the
joiner votes after its copy is complete and its digest matches. So the source
needs no pause and no snapshot: a thread of it reads the state as it stands
(protocol section 7).
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import PREFIX, pack, pack_head, parse_head, parse_prefix
from mainstay_core.rank.serving import HealFailed, copy_problem
from mainstay_train.base import job_secret, network_cut
from mainstay_train.base.sockets import socket_lock
from mainstay_train.comm.group import foreign_sockets
from mainstay_train.exact import digests
from mainstay_train.exact.optimizer import StageState

logger = logging.getLogger(__name__)

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


class HealServer:
    """Serves this trainer's state to joiners of its quorum, one thread per request.

    Args:
        address: local address to listen on.
        state_at: waits for the requested version of the requested quorum.
        on_serve: called when a part of the state is on its way.
    """

    def __init__(
        self, address: str, state_at: StateAt, on_serve: Callable[[], None] = lambda: None
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen()
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._state_at = state_at
        self._on_serve = on_serve
        threading.Thread(target=self._accept, name="heal-server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            # accept() and the registration must be one: a group that connects meanwhile
            # would take the new socket for its own and shut it with the group.
            connection = _accept_registered(self._listener)
            threading.Thread(
                target=self._serve, args=(connection,), name="heal-source", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            request, _ = read_frame(connection)
            quorum, position = str(request["quorum"]), int(request["position"])
            if not job_secret.is_proved(request.get("proof", ""), "heal", quorum, position):
                # Said to a pod of the job that was given another secret; a stranger learns nothing.
                connection.sendall(pack({"kind": "refused", "why": "no proof of the job's secret"}))
                return
            state = self._state_at(quorum, position, int(request["version"]))
            if state is None:
                connection.sendall(pack({"kind": "refused", "why": f"{quorum} is over here"}))
                return
            flats = state.flats()
            listing = [[f.id, str(f.tensor.dtype), f.tensor.numel()] for f in flats]
            head = {"kind": "state", "tensors": listing, "digest": _state_digest(state)}
            connection.sendall(pack_head(head))
            for number, flat in enumerate(flats):
                if number == 1:
                    self._on_serve()
                connection.sendall(_bytes_of(flat.tensor))
        except (OSError, RemoteProtocolError, KeyError) as error:
            logger.warning("a heal request ended early: %s", error)
        finally:
            close_registered(connection)


def _accept_registered(listener: socket.socket) -> socket.socket:
    while True:
        select.select([listener], [], [])
        with socket_lock:
            connection, _ = listener.accept()
            foreign_sockets.add(connection.fileno())
        return connection


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


def read_frame(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """Read a frame's head; returns it with the size of the body that follows."""
    prefix = bytearray(PREFIX.size)
    read_exactly(connection, memoryview(prefix))
    head_size, body_size = parse_prefix(bytes(prefix))
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
                    "proof": job_secret.prove("heal", quorum, position),
                }
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
        if head["tensors"] != listing:
            raise HealFailed("the source's state has another shape")
        for flat in flats:
            size = flat.tensor.numel() * flat.tensor.element_size()
            if flat.tensor.device.type == "cpu":
                read_exactly(connection, _bytes_of(flat.tensor))
            else:
                staged = torch.empty(size, dtype=torch.uint8)
                read_exactly(connection, _bytes_of(staged))
                flat.tensor.copy_(staged.view(flat.tensor.dtype))
        return str(head["digest"])
