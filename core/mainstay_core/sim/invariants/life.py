"""Says what checks look at in one life of a trainer."""

from __future__ import annotations

from typing import Protocol

from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.rank.state import RankState


class Life(Protocol):
    """One life of a trainer, as far as it is checked."""

    name: str
    alive: bool
    incarnation: Incarnation
    state: RankState
    tampered: bool
    """Whether its state was corrupted on purpose: a vote must find it."""
    was_tampered: bool
    was_wrong: bool
    """Whether it computed something wrong that no check of its own sees."""

    @property
    def quorum(self) -> QuorumId | None:
        """Adopted quorum."""

    @property
    def known_wrong(self) -> tuple[int, ...]:
        """Types that it holds, and of which its checks have found that they are wrong."""
