"""The state of this trainer, as the threads that serve joiners of its quorum see it."""

from __future__ import annotations

from collections.abc import Callable

from mainstay_core.rank.serving import Wanted, may_copy
from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment
from mainstay_train.comm.connections import Connections
from mainstay_train.exact.optimizer import StageState
from mainstay_train.exact.portions import Portion

PartOf = Callable[[int, StageState], Portion | None]


class ServedState:
    """The state as the heal server's threads see it.

    The main thread says when its state is complete at a quorum's version, and when it
    no longer is; :mod:`mainstay_core.rank.serving` says why no lock is needed until then.

    Args:
        connections: of the trainer.
        part_of: returns what it has of an end's guarded blocks, by the end and its own state.
    """

    def __init__(self, connections: Connections, part_of: PartOf) -> None:
        self._connections, self._part_of = connections, part_of
        self._served: Wanted | None = None
        self._state: StageState | None = None
        self._complete: Moment | None = None
        """When the device has written it. What it is given later may wait for who asks."""

    def serve(self, served: Wanted | None, state: StageState | None) -> None:
        """Answer requests for ``served``, which ``state`` is; None: a new quorum settles."""
        complete = devices.moment(state.blocks[0].device) if state is not None else None
        with self._connections.changed:
            self._served, self._state, self._complete = served, state, complete
            self._connections.changed.notify_all()

    def state_at(
        self, quorum: str, position: int, version: int, guarded: int | None = None
    ) -> StageState | Portion | None:
        """Wait until the state is there, and written; None once this trainer is past the quorum.

        Args:
            quorum: in which it counts.
            position: whose it is.
            version: of it.
            guarded: the end whose guarded blocks are asked for instead; None also if they are not
                here.
        """
        wanted = Wanted(quorum, position, version)
        connections = self._connections

        def judged() -> bool | None:
            return may_copy(wanted, self._served, connections.adopted)

        with connections.changed:
            connections.changed.wait_for(lambda: judged() is not None)
            if not judged() or self._state is None or self._complete is None:
                return None
            state, complete = self._state, self._complete
            part = state if guarded is None else self._part_of(guarded, state)
        complete.wait()
        return part
