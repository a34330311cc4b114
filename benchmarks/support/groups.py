"""Makes process groups of ranks that all live on this machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm.group import Group

ADDRESS = "127.0.0.1"
LOOK = timedelta(seconds=0.05)
"""Between two looks whether a group that meets has been shut."""


class StoreMeeting:
    """Ranks that have no quorum meet at a store of torch's.

    Args:
        store: ``host:port`` of it.
    """

    def __init__(self, store: str) -> None:
        host, _, port = store.rpartition(":")
        self._store = TCPStore(host, int(port), None, False, wait_for_workers=False)

    def meet(
        self, key: str, body: bytes, size: int, ended: Callable[[], str | None]
    ) -> list[bytes]:
        """Give this rank's bytes and return those of all."""
        number = self._store.add(f"{key}/number", 1) - 1
        self._store.set(f"{key}/{number}", body)  # type: ignore[arg-type]  # bytes are taken
        keys = [f"{key}/{n}" for n in range(size)]
        while True:
            why = ended()
            if why:
                raise GroupEnded(why)
            if self._store.check(keys):
                return [self._store.get(each) for each in keys]
            try:
                self._store.wait(keys, LOOK)
            except RuntimeError:
                continue

    def wake(self) -> None:
        """Do nothing: it looks again and again."""


def make_group(name: str, store: str, rank: int, size: int, timeout_s: float = 120.0) -> Group:
    """Return a gloo group that is not connected yet.

    Args:
        name: the same for all of its ranks, and new for each group of a store.
        store: ``host:port`` of the store where its ranks meet.
        rank: of this process.
        size: number of ranks.
        timeout_s: of one operation.
    """
    return Group(
        name=name,
        meeting=StoreMeeting(store),
        rank=rank,
        size=size,
        address=ADDRESS,
        backend="gloo",
        timeout_s=timeout_s,
    )
