"""Gives stores the digests of units in committed steps, and asks for those of replayed ones."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.segments import frames
from mainstay_core.wire.segments import Holder
from mainstay_core.wire.unit_digests import UnitDigests
from mainstay_train.state.segment_reader import SegmentReader
from mainstay_train.state.store_connection import StoreConnection


class DigestClient:
    """A trainer's way to the digests of units in its pod's store, and in others.

    Args:
        store: connection to that of the pod.
        reader: asks those of other pods.
    """

    def __init__(self, store: StoreConnection, reader: SegmentReader) -> None:
        self._store, self._reader = store, reader

    def keep(self, told: UnitDigests, holders: Sequence[Holder]) -> None:
        """Have the store keep the digests of a step's units, and pass them on; nobody waits.

        Args:
            told: sealed.
            holders: pods that are to keep them too.

        Raises:
            StoreGone: the store cannot be asked.
        """
        self._store.send(frames.KeepDigests(digests=told, holders=tuple(holders)))

    def find(self, lineage: int, position: int, step: int) -> UnitDigests | None:
        """Return what the store of this pod knows of the units in a step; None if nothing.

        Raises:
            StoreGone: the store cannot be asked.
        """
        number = self._store.next_number()
        asked = frames.AskDigests(request=number, lineage=lineage, position=position, step=step)
        answer = self._store.ask(number, asked)
        assert isinstance(answer, frames.ToldDigests)
        return answer.digests

    def find_at(
        self, address: str, lineage: int, position: int, step: int, timeout_s: float
    ) -> UnitDigests | None:
        """Return what the store of another pod knows of them (:meth:`SegmentReader.digests`)."""
        return self._reader.digests(address, lineage, position, step, timeout_s)
