"""The segments that a simulated replay reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mainstay_core.planning.program import Action
from mainstay_core.sim import terms
from mainstay_core.sim.trainers.segment_client import Wait
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, SegmentKey


class Keeper(Protocol):
    """The keeper of segments of a trainer that replays."""

    async def read(self, wait: Wait, key: SegmentKey, holders: Sequence[Holder]) -> terms.UnitTerm:
        """Read a segment from the first holder whose copy is good."""

    async def read_new(
        self,
        wait: Wait,
        plan: Plan,
        key: SegmentKey,
        holder: Holder,
        why: Callable[[], str],
    ) -> terms.UnitTerm:
        """Read what a holder gets in this quorum."""

    def why_full(self, keys: Sequence[SegmentKey]) -> str:
        """Return why some of these are not kept; empty if all are, or may be."""

    def write_again(self, plan: Plan, key: SegmentKey, content: str) -> None:
        """Write what a replayed stage sends into the own store."""

    async def reach(self, action: Action) -> None:
        """A place before an action of a replay's program."""

    async def point(self, name: str) -> None:
        """A place after an action of a replay."""

    async def applied(self) -> None:
        """A replayed step is applied."""


class ReplaySegments:
    """The segments that a replay reads and writes in one quorum.

    Args:
        keeper: keeps the segments of the trainer that replays.
        wait: how long the trainer waits for a store.
        plan: under which it replays.
    """

    def __init__(self, keeper: Keeper, wait: Wait, plan: Plan) -> None:
        self._keeper, self._wait, self._plan = keeper, wait, plan
        self._written: list[SegmentKey] = []

    async def read(self, key: SegmentKey, holders: Sequence[Holder]) -> terms.UnitTerm:
        """Read a segment from the first holder whose copy is good."""
        return await self._keeper.read(self._wait, key, holders)

    async def read_new(self, key: SegmentKey, holder: Holder) -> terms.UnitTerm:
        """Read what a holder gets in this quorum."""
        return await self._keeper.read_new(self._wait, self._plan, key, holder, self.why_full)

    def why_full(self) -> str:
        """Return why something that was written is not kept; empty if all is, or may be."""
        return self._keeper.why_full(self._written)

    def write(self, key: SegmentKey, content: str) -> None:
        """Write what a replayed stage sends into the own store."""
        self._written.append(key)
        self._keeper.write_again(self._plan, key, content)

    async def hook(self, action: Action) -> None:
        """A place before an action of the program."""
        await self._keeper.reach(action)

    async def point(self, name: str) -> None:
        """A place after an action of a replay."""
        await self._keeper.point(name)

    async def applied(self) -> None:
        """A replayed step is applied."""
        await self._keeper.applied()
