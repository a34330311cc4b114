"""Guards copy before anybody sends: an owner's device waits for what it has sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.core.plans import make_plan

from mainstay_core.rank.guarding import guard
from mainstay_core.reinitialisation.guards import Guard, guard_groups
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import GuardedDigest, SettleReport

PLAN = make_plan({0: ["a.1", "b.1", "c.1"], 1: ["d.1", "e.1", "f.1"]})
"""Members 0 and 1 are the first stage, 2 and 3 the inner one, 4 and 5 the last."""
ONE_FOR_BOTH = (Guard(end=0, index=2, owner=0), Guard(end=2, index=2, owner=4))
ONE_FOR_EACH = (Guard(end=0, index=2, owner=0), Guard(end=2, index=3, owner=5))
EACH_OTHERS = (Guard(end=0, index=4, owner=0), Guard(end=2, index=0, owner=4))
"""Of a pipeline whose ends guard each other."""


@dataclass
class World:
    """The groups of the guards, and what each device still waits for."""

    members: dict[int, tuple[int, ...]]
    met: dict[int, set[int]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Gradients that an owner has sent to a guard, and the guard has not taken."""
    copies: int = 0

    async def wait_for(self, holds: Any) -> None:
        async with self.changed:
            await self.changed.wait_for(holds)

    async def change(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class PlayedConnections:
    """Connections of a rank, whose groups stand until the plan changes."""

    def __init__(self, world: World) -> None:
        self._world, self._begun = world, set[int]()

    def begin_guard_group(self, end: int, members: tuple[int, ...]) -> tuple[int, bool]:
        is_new = end not in self._begun
        self._begun.add(end)
        assert self._world.members.setdefault(end, members) == members
        return end, is_new

    def healing(self, client: object) -> object:
        return client


class PlayedShell:
    """A rank whose device does nothing more before all that it has sent is received."""

    def __init__(self, world: World, index: int) -> None:
        self._world, self._index = world, index
        self.kept: list[int] = []

    async def connect(self, group: int) -> None:
        world = self._world
        world.met.setdefault(group, set()).add(self._index)
        await world.change()
        await world.wait_for(lambda: world.met[group] == {*world.members[group]})

    def make_heal_client(self) -> object:
        return object()

    async def copy_guarded(self, client: object, sources: Any, wanted: Any) -> GuardedDigest:
        del client
        (source,) = sources
        owner = int(source.address)
        sent = self._world.sent
        await self._world.wait_for(
            lambda: not any(number for (of, _), number in sent.items() if of == owner)
        )
        self._world.copies += 1
        return GuardedDigest(stage=wanted.guarded, masters="m", rest="r")

    async def give_guarded(self, group: int, peers: list[int]) -> None:
        for peer in peers:
            pair = self._index, self._world.members[group][peer]
            self._world.sent[pair] = self._world.sent.get(pair, 0) + 1
        await self._world.change()
        await asyncio.sleep(0)

    async def take_guarded(self, group: int, end: int, peer: int) -> None:
        del end
        pair = self._world.members[group][peer], self._index
        await self._world.wait_for(lambda: self._world.sent.get(pair))
        self._world.sent[pair] -= 1
        await self._world.change()

    def keep_guarded(self, ends: list[int]) -> None:
        self.kept = ends


@dataclass(frozen=True)
class PlayedState:
    """What :func:`guard` reads of a rank's state, in which no copy counts."""

    index: int
    guards: tuple[Guard, ...]
    plan: Plan = PLAN
    version: int = 3
    guarded: tuple[GuardedDigest, ...] = ()


@pytest.mark.parametrize("guards", [ONE_FOR_BOTH, ONE_FOR_EACH, EACH_OTHERS], ids=str)
def test_the_first_step_of_a_plan_ends_though_an_owner_that_has_sent_serves_nothing(
    guards: tuple[Guard, ...],
) -> None:
    reports = [
        SettleReport(index=m.index, valid=True, version=3, heal_address=str(m.index))
        for m in PLAN.members
    ]

    async def step() -> tuple[World, dict[int, tuple[GuardedDigest, ...]]]:
        groups = {group.end: group.members for group in guard_groups(guards).values()}
        world = World(groups)

        async def of(index: int) -> tuple[GuardedDigest, ...]:
            shell, connections = PlayedShell(world, index), PlayedConnections(world)
            state: Any = PlayedState(index, guards)
            kept = await guard(shell, state, connections, reports)  # type: ignore[arg-type]
            assert shell.kept == [copy.stage for copy in kept]
            return kept

        concerned = sorted({i for g in guards for i in (g.index, g.owner)})
        told = await asyncio.wait_for(asyncio.gather(*map(of, concerned)), 10)
        return world, dict(zip(concerned, told, strict=True))

    world, kept = asyncio.run(step())
    assert world.copies == len(guards)
    assert not any(world.sent.values())
    for index, copies in kept.items():
        assert [c.stage for c in copies] == sorted(g.end for g in guards if g.index == index)
