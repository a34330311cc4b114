"""Room in the memory of a pod's store, as a trainer asks for it."""

from __future__ import annotations

from typing import NamedTuple

from mainstay_core.base.errors import MainstayError


class StoreFull(MainstayError):  # noqa: N818 - a state, not a failure
    """The pod's store has no room for a segment."""


class Room(NamedTuple):
    """A place in the arena for one segment, until it is written or given back."""

    memory: memoryview
    """Writable bytes, as many as were asked for."""
    number: int
    """Its name for the store."""


class AskedRoom(NamedTuple):
    """Room that the store was asked for."""

    number: int
    size: int
