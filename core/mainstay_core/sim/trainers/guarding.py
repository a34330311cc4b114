"""A trainer as a guard of what ends of the pipeline alone have, and for who guards its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from mainstay_core.rank import events
from mainstay_core.rank.serving import Sources, Wanted
from mainstay_core.rank.session import RankSession
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.engine import Awaited
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.sim.trainers.connections import Connections
from mainstay_core.sim.trainers.heal import HealClient
from mainstay_core.wire.votes import Commit, GuardedDigest

TAG = "guarded"


class GuardingTrainer(RankSession[Connections]):
    """A session with copies of what ends alone have."""

    world: Surroundings
    name: str
    cell: Compute | None
    copies: dict[int, str]
    """By the stage of the end."""
    given: dict[int, str]
    """Reduced gradients of the ends in the step at hand."""

    @abstractmethod
    async def point(self, name: str) -> None:
        """Pass a place in the code where a fault may strike."""

    @abstractmethod
    def made_cell(self) -> Compute:
        """Return the cell of the adopted plan's position."""

    async def give_guarded(self, group: Any, peers: Sequence[int]) -> None:
        for peer in peers:
            group.send(self.made_cell().reduced, peer, TAG)
        await self.point("reduce-half")
        for peer in peers:
            await Awaited(group.finish(peer, TAG))

    async def take_guarded(self, group: Any, end: int, peer: int) -> None:
        self.given[end] = await Awaited(group.receive(peer, TAG))

    async def copy_guarded(
        self, client: HealClient, sources: Sources, wanted: Wanted
    ) -> GuardedDigest:
        end = wanted.guarded
        assert end is not None
        self.copies[end] = await Awaited(client.copy(sources, wanted, ""))
        await self.point("healed")
        return GuardedDigest(stage=end, masters=self.copies[end], rest="")

    def keep_guarded(self, ends: Collection[int]) -> None:
        self.copies = {end: copy for end, copy in self.copies.items() if end in ends}

    def own_guarded(self) -> GuardedDigest | None:
        cell = self.made_cell()
        own = GuardedDigest(stage=cell.stage, masters=terms.part(cell.params), rest="")
        return own if cell.has_own else None

    def tell_void_guard(self, action: events.TellVoidGuard) -> None:
        self.warn(f"its copy of stage {action.end} is void")
        self.world.checks.void_guard(self.name, action.end)

    def apply_guarded(self, commit: Commit) -> tuple[GuardedDigest, ...]:
        """Apply a step to all copies that count; return their digests after it."""
        told = []
        for end in [copy.stage for copy in self.state.guarded]:
            self.copies[end] = terms.part_applied(self.copies[end], self.given[end], commit.scale)
            told.append(GuardedDigest(stage=end, masters=self.copies[end], rest=""))
        return tuple(told)

    def served(self, guarded: int | None) -> str:
        """Return the state, or what is there of what guards keep of an end, as it is now."""
        if self.cell is None:
            return ""
        if guarded is None:
            return self.cell.params
        is_own = guarded == self.cell.stage
        return terms.part(self.cell.params) if is_own else self.copies.get(guarded, "")
