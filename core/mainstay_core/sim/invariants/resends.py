"""Copies that stores send again, as far as they have not come where they were sent to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from mainstay_core.wire.segments import SegmentKey


class ListsHolders(Protocol):
    """A store that has a list of holders beside each segment."""

    def lists(self, key: SegmentKey, address: str) -> bool:
        """Whether a segment is there, and another store is on the list of its holders."""


class Resends:
    """The copies that were sent again to stores, by their addresses, and have not come."""

    def __init__(self) -> None:
        self._senders: defaultdict[SegmentKey, defaultdict[str, set[str]]]
        self._senders = defaultdict(lambda: defaultdict(set))
        """By segment and store: from whom it was to come."""

    def sent(self, sender: str, key: SegmentKey, address: str) -> None:
        """A store sends a segment again to another one."""
        self._senders[key][address].add(sender)

    def written(self, address: str, key: SegmentKey) -> None:
        """A segment is at a store, from whomever."""
        if key in self._senders:
            self._senders[key].pop(address, None)

    def replaced(self, key: SegmentKey) -> None:
        """A segment is written anew, with holders of its own."""
        self._senders.pop(key, None)

    def was_cut_off(
        self, key: SegmentKey, address: str, stores: Mapping[str, ListsHolders]
    ) -> bool:
        """Return whether a store lacks a segment since its sender is lost, and nobody knows it.

        A list of holders has all stores that the sender has chosen. Who got the segment with the
        list counts on those that did not get it any more.

        Args:
            key: of the segment.
            address: of the store that lacks it.
            stores: all that the plan names.
        """
        senders = self._senders[key][address] if key in self._senders else set()
        return bool(senders - stores.keys()) and any(
            store.lists(key, address) for other, store in stores.items() if other != address
        )
