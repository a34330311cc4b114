"""An acceptor that hands over only connections that have proved to know the job's secret."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from mainstay_core.base.admission import Bounds
from mainstay_core.base.proofs import NONCE_BYTES, ListenerProof, Purpose, RefusedPeerError
from mainstay_net.acceptor import Accepted, Acceptor, Sockets, address_of


class Proved(NamedTuple):
    """A connection whose peer knows the job's secret."""

    socket: socket.socket
    """It does not block; nothing of what follows the proof was read."""
    purpose: Purpose
    address: str
    """Of the peer, without its port."""


class _Stranger(NamedTuple):
    """A connection that has proved nothing yet."""

    accepted: Accepted
    proof: ListenerProof


class Entrance:
    """The way into a listener for pods of the job. For one thread; nothing here blocks.

    It is driven as an :class:`Acceptor`: wait for :meth:`fileno` or :meth:`wait_s`, then call
    :meth:`turn`. Of a stranger no byte is read beyond the proof that is due next.

    Args:
        listener: listens already; closed by :meth:`close`.
        secret: of the job.
        purposes: for which pods may call.
        bounds: on connections that have proved nothing.
        sockets: opens and closes connections.
        clock: never jumps, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: str,
        purposes: Collection[Purpose],
        bounds: Bounds,
        sockets: Sockets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address_of(listener)
        """Where it listens, as ``host:port``; callers must have called this very address."""
        self._secret, self._purposes = secret, purposes
        self._acceptor = Acceptor(listener, self._drop, bounds, sockets, clock)
        self._strangers: dict[int, _Stranger] = {}

    @property
    def num_unproved(self) -> int:
        """Number of connections that have proved nothing."""
        return self._acceptor.num_unproved

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to do."""
        return self._acceptor.fileno()

    def wait_s(self) -> float | None:
        """Return after how many seconds there is something to do in any case; None: never."""
        return self._acceptor.wait_s()

    def turn(self) -> list[Proved]:
        """Take what has come, and return the connections that have proved themselves now."""
        proved: list[Proved] = []
        for key, _ in self._acceptor.selector.select(0):
            stranger = self._strangers.get(key.data)
            if stranger is not None and self._listen_to(stranger):
                purpose = stranger.proof.purpose
                assert purpose is not None
                proved.append(Proved(stranger.accepted.socket, purpose, stranger.accepted.address))
        for accepted in self._acceptor.turn():
            self._welcome(accepted)
        return proved

    def close(self) -> None:
        """Stop listening, and close every connection that has proved nothing."""
        self._acceptor.drop_all()
        self._acceptor.close()

    def _welcome(self, accepted: Accepted) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = ListenerProof(self._secret, nonce, self.address, self._purposes)
        self._strangers[accepted.key] = _Stranger(accepted, proof)
        with contextlib.suppress(OSError):
            accepted.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._acceptor.selector.register(accepted.socket, selectors.EVENT_READ, accepted.key)

    def _listen_to(self, stranger: _Stranger) -> bool:
        """Take what a stranger sends; return whether it is none any more."""
        accepted, proof = stranger
        try:
            data = accepted.socket.recv(proof.wanted)
            if not data:
                self._end(accepted, "")
                return False
            # A few bytes into an empty buffer: the kernel takes them whole.
            accepted.socket.sendall(proof.received(data))
        except BlockingIOError:
            return False
        except RefusedPeerError as error:
            with contextlib.suppress(OSError):
                accepted.socket.sendall(error.answer)
            self._end(accepted, str(error))
            return False
        except OSError:
            self._end(accepted, "")
            return False
        if proof.purpose is None:
            return False
        self._acceptor.proved(accepted.key)
        self._forget(accepted)
        return True

    def _end(self, accepted: Accepted, why: str) -> None:
        self._acceptor.ended(accepted.key, why and f"{why} ({accepted.address})")
        self._forget(accepted)
        self._acceptor.sockets.close(accepted.socket)

    def _drop(self, key: int) -> None:
        accepted = self._strangers[key].accepted
        self._forget(accepted)
        self._acceptor.sockets.close(accepted.socket)

    def _forget(self, accepted: Accepted) -> None:
        del self._strangers[accepted.key]
        self._acceptor.selector.unregister(accepted.socket)
