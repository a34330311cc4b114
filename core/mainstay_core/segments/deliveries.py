"""Follows one segment on its way to its holders."""

from __future__ import annotations

from collections.abc import Iterable

from mainstay_core.base.bounds import cut
from mainstay_core.base.ids import PodUid


class Delivery:
    """The answers of the holders to which a segment is sent.

    Args:
        holders: pods that are to confirm it.
    """

    def __init__(self, holders: Iterable[PodUid]) -> None:
        self._left = set(holders)
        self._problems: dict[PodUid, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether every holder has answered, or is gone."""
        return not self._left

    @property
    def why_not(self) -> str:
        """Why the segment is not at all its holders; empty if it is. It must be over."""
        assert self.is_over
        told = (f"{pod}: {why}" for pod, why in sorted(self._problems.items()))
        return cut("; ".join(told))

    def answered(self, holder: PodUid, why_not: str = "") -> None:
        """Take a holder's answer, or what became of it; an empty sentence confirms."""
        if holder in self._left:
            self._left.discard(holder)
            if why_not:
                self._problems[holder] = why_not
