"""Makes process groups of ranks that all live on this machine."""

from __future__ import annotations

from mainstay_train.comm.group import Group

ADDRESS = "127.0.0.1"


def make_group(name: str, store: str, rank: int, size: int, timeout_s: float = 120.0) -> Group:
    """Return a gloo group that is not connected yet.

    Args:
        name: the same for all of its ranks, and new for each group of a store.
        store: ``host:port`` of the rendezvous store.
        rank: of this process.
        size: number of ranks.
        timeout_s: of one operation.
    """
    return Group(
        name=name,
        store=store,
        rank=rank,
        size=size,
        address=ADDRESS,
        backend="gloo",
        timeout_s=timeout_s,
    )
