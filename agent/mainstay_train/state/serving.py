"""Decides when joiners of the quorum may copy this trainer's state."""

from __future__ import annotations

from typing import NamedTuple

from mainstay_train.comm.connections import Connections
from mainstay_train.exact.optimizer import StageState


class _Tag(NamedTuple):
    quorum: str
    position: int
    version: int


class ServedState:
    """The state as the heal server's threads see it.

    The main thread says when its state is complete at a quorum's version, and when it
    no longer is. It stays readable until then without a lock: apply needs the joiner's
    vote, which comes after its copy (protocol section 7).
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._tag: _Tag | None = None
        self._state: StageState | None = None

    def open(self, quorum: str, position: int, version: int, state: StageState) -> None:
        """``state`` is complete at ``version``: requests of this quorum are served."""
        with self._connections.changed:
            self._tag, self._state = _Tag(quorum, position, version), state
            self._connections.changed.notify_all()

    def close(self) -> None:
        """A new quorum settles: nothing is known to be complete."""
        with self._connections.changed:
            self._tag = self._state = None

    def state_at(self, quorum: str, position: int, version: int) -> StageState | None:
        """Wait until the state is there; None once this trainer has moved past the quorum."""
        wanted = _Tag(quorum, position, version)
        connections = self._connections

        def over() -> bool:
            adopted = connections.adopted
            return adopted is not None and adopted.quorum.id > _quorum_number(quorum)

        with connections.changed:
            connections.changed.wait_for(lambda: self._tag == wanted or over())
            return self._state if self._tag == wanted else None


def _quorum_number(quorum: str) -> int:
    return int(quorum.removeprefix("q").partition("-")[0])
