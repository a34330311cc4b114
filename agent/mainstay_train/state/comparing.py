"""Compares a copy of a state with the states of all who have it: the second half of a heal.

Chunks do not travel again. A holder is asked for their digests, moments and computed copies among
them (:mod:`mainstay_train.state.heal` answers).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import pack
from mainstay_core.base.proofs import Purpose
from mainstay_core.rank.serving import HealFailed, Source, Wanted, disbelieved_part
from mainstay_net.caller import prove
from mainstay_train.base import job_secret
from mainstay_train.comm.registered import close_registered, open_registered, read_frame
from mainstay_train.state.chunks import CHUNK_BYTES, Chunk, shape_of

logger = logging.getLogger(__name__)

MAX_WHY = 200
"""Characters of what a source says that are told to people."""
COMPARES = "compares"
"""Field of a request: the joiner has a copy, and asks for digests alone."""


class Comparison:
    """Asks holders of a state for its digests, one after the other.

    Args:
        local: address to call from.
        changed: guards it; notified with everything that may end a wait.
        raise_if_ended: raises HealFailed once nobody wants the copy any more.
    """

    def __init__(
        self, local: str, changed: threading.Condition, raise_if_ended: Callable[[], None]
    ) -> None:
        self._local, self._changed, self._raise_if_ended = local, changed, raise_if_ended
        self._has_ended = False
        self._asked: set[socket.socket] = set()
        """The connections over which digests are asked for: one for each copy."""

    def end(self) -> None:
        """End a wait, and all later ones (any thread, with the guard held)."""
        self._has_ended = True
        self._changed.notify_all()
        for connection in self._asked:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def compare(self, chunks: Sequence[Chunk], holders: Sequence[Source], wanted: Wanted) -> None:
        """Compare a copy with the states of those who have it: moments and computed copies, too.

        Raises:
            HealFailed: no majority of them has what was copied.
        """
        own = [chunk.digest() for chunk in chunks]
        told: dict[str, list[str]] = {}
        for holder in holders:
            try:
                told[holder.slot] = self._digests_of(chunks, holder, wanted)
            except (OSError, RemoteProtocolError, HealFailed) as error:
                with self._changed:
                    self._raise_if_ended()
                logger.warning("the copy is not compared with %s: %s", holder.slot, error)
        number = disbelieved_part(own, told)
        if number is not None:
            differing = [slot for slot, digests in told.items() if digests[number] != own[number]]
            raise HealFailed(
                f"{chunks[number].flat.id} of the copy is not what {', '.join(differing)} has"
            )

    def _digests_of(self, chunks: Sequence[Chunk], holder: Source, wanted: Wanted) -> list[str]:
        """Return a holder's digests of all chunks; raises as :meth:`_ask` does.

        A thread asks: nothing but the network ends a connect to a node that is gone, and whoever
        waits for the digests may be wanted elsewhere before that.
        """
        found: list[list[str]] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                found.append(self._ask(chunks, holder, wanted))
            except BaseException as error:
                errors.append(error)  # raised where the digests are waited for
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=ask, name=f"heal-compare-{holder.slot}", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: found or errors or self._has_ended)
            self._raise_if_ended()
        if errors:
            raise errors[0]
        return found[0]

    def _ask(self, chunks: Sequence[Chunk], holder: Source, wanted: Wanted) -> list[str]:
        """Return a holder's digests of all chunks.

        Raises:
            OSError: the connection broke.
            RemoteProtocolError: the holder says something else.
            HealFailed: it refuses, or the copy is no longer wanted.
        """
        connection = open_registered(holder.address, self._local)
        try:
            with self._changed:
                self._raise_if_ended()
                self._asked.add(connection)
            prove(connection, job_secret.read(), holder.address, Purpose.HEAL)
            connection.sendall(pack({"kind": "heal", **codec.encode(wanted), COMPARES: True}))
            if hear(connection, "state").get("shape") != shape_of(chunks):
                raise HealFailed("its state has another shape")
            found = []
            for number in range(len(chunks)):
                connection.sendall(pack({"kind": "chunk", "number": number}))
                found.append(str(hear(connection, "digest").get("digest")))
            return found
        finally:
            with self._changed:
                self._asked.discard(connection)
            close_registered(connection)


def hear(connection: socket.socket, kind: str) -> dict[str, Any]:
    """Return the head of the next frame, which is of a kind and has no body.

    Raises:
        OSError: the connection broke.
        RemoteProtocolError: another frame came.
        HealFailed: the source refuses.
    """
    head, size = heard(connection, kind)
    if size:
        raise RemoteProtocolError(f"{kind} has a body of {size} bytes")
    return head


def heard(connection: socket.socket, kind: str) -> tuple[dict[str, Any], int]:
    """Return the head of the next frame, which is of a kind, and the size of its body.

    Raises:
        OSError: the connection broke.
        RemoteProtocolError: another frame came.
        HealFailed: the source refuses.
    """
    head, size = read_frame(connection, CHUNK_BYTES)
    if head.get("kind") == "refused":
        raise HealFailed(str(head.get("why"))[:MAX_WHY])
    if head.get("kind") != kind:
        raise RemoteProtocolError(f"not the {kind} that was asked for")
    return head, size
