"""Looks into the stores of a running job's pods, as their trainers do: in the same memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.harness import LocalJob

from mainstay_core.segments.frames import SOCKET_NAME
from mainstay_core.wire.segments import SegmentKey, SegmentKind
from mainstay_train.state.segments import SegmentClient

Orders = dict[int, dict[str, int]]
"""By first version of a window the place of each unit in its order."""


@contextmanager
def store_of(job: LocalJob, pod: str) -> Iterator[SegmentClient]:
    """A connection to a pod's store, as its trainers have one: they write into the same memory."""
    (socket,) = job.state_dir.glob(f"pods/{pod}*/{SOCKET_NAME}")
    with tempfile.TemporaryDirectory(prefix="s") as short:
        # The path of a Unix socket has a bound, and a test's directory may be long.
        link = Path(short) / "pod"
        link.symlink_to(socket.parent)
        client = SegmentClient(str(link / socket.name), 0, "test", "127.0.0.1")
        try:
            yield client
        finally:
            client.shutdown("done")


def pods_of(job: LocalJob) -> list[str]:
    """Return the names of the pods that have a rank, in order."""
    members = [m for m in job.fetch("members") if m["rank"] != "spare"]
    return sorted({str(member["slot"]).partition("/")[0] for member in members})


def versions_of(client: SegmentClient) -> set[int]:
    """Return the versions of which a store has a copy of some unit."""
    return {version for unit in client.report(0).units for version in unit.states}


def orders_of(client: SegmentClient, position: int) -> Orders:
    """Return the orders of the windows of which a store has copies of a position."""
    found: Orders = {}
    for unit in client.report(0).units:
        if unit.position != position:
            continue
        for version in unit.states:
            key = SegmentKey(
                lineage=0,
                position=position,
                unit=unit.unit,
                kind=SegmentKind.STATE,
                version=version,
            )
            with client._reading(key) as segment:
                if segment is not None:
                    of_window = found.setdefault(segment.header.window, {})
                    of_window[unit.unit_name] = segment.header.place
    return found


def has_changed(orders: Orders) -> bool:
    """Return whether a unit has another place in one window than in another."""
    places: dict[str, set[int]] = {}
    for order in orders.values():
        for unit, place in order.items():
            places.setdefault(unit, set()).add(place)
    return any(len(different) > 1 for different in places.values())
