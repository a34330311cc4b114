"""Has two replicas of a job go different ways under lineages of one number.

First one replica is cut off, and the other one loses an inner stage, which is made anew. Then all
of these are cut off, and the store falls back to before: it gives the lineage's number again, as
the first replica loses the same stage a step later. When that is about as far, all meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from mainstay_core.sim.stage import Stage
from mainstay_core.sim.trainers.trainer import Trainer
from mainstay_core.wire.plan import Plan

LONGEST_S = 30.0
"""After which all meet, however far they are."""
LOOKS_S = 0.02
"""Seconds between two looks at how far they are."""
STAGE = 1
"""Which both lose. It has two neighbours."""
TWO_WAYS = 2
"""Replicas that can part."""


def part_ways(
    world: Stage, rng: random.Random, until: Callable[[float, Callable[[], None]], None]
) -> None:
    """Have two replicas go different ways, in a job that has just these and has not forked.

    Args:
        world: in which that is played.
        rng: draws how far they are apart when they meet.
        until: has something end after some seconds, and the run not be calm before that.
    """
    plan = world.newest_plan
    if plan is not None and not plan.lineage and len(plan.chains) == TWO_WAYS:
        until(LONGEST_S, _Parting(world, plan, rng.choice((0, 1))).end)


class _Parting:
    """One such story, from a plan with two replicas on.

    Args:
        world: in which it is played.
        plan: in force.
        ahead: by how many steps the first replica is ahead of the other when they meet.
    """

    def __init__(self, world: Stage, plan: Plan, ahead: int) -> None:
        self._world, self._plan, self._ahead = world, plan, ahead
        first = [plan.members[index] for index in plan.chains[0].cells]
        self._first = {member.incarnation for member in first}
        self._nodes = {str(member.slot.pod) for member in first}
        self._made_at = self._met_at = 0
        """Versions at which the other replica has made the stage anew, and at which it waits."""
        self.pairs = self._around(self._nodes)
        """What is cut now."""
        self.is_over = False
        world.network.cut(self.pairs, reset=True)
        self._next: Callable[[], None] = self._lose_of_others
        self._look_again()

    def end(self) -> None:
        """Have all meet."""
        if not self.is_over:
            self.is_over = True
            self._world.network.mend(self.pairs)

    def _look_again(self) -> None:
        self._world.engine.schedule(LOOKS_S, None, self._look)

    def _look(self) -> None:
        if not self.is_over:
            self._next()
            self._look_again()

    def _lose_of_others(self) -> None:
        """The others have gone on without the first replica, and lose the stage."""
        plan = self._world.newest_plan
        if plan is not None and not self._first & {m.incarnation for m in plan.members}:
            self._kill_stage(plan)
            self._next = self._forget

    def _forget(self) -> None:
        """They have made it anew, and are cut off. The store knows nothing of it any more."""
        world, plan = self._world, self._world.newest_plan
        made = [t for t in self._members() if t.state.valid and t.state.history]
        if plan is None or len(made) < len(plan.members):
            return
        self._made_at = made[0].state.history[-1].version
        if min(t.state.version for t in made) < self._made_at + 2:
            return
        self._met_at = max(t.state.version for t in made)
        if not world.store.fall_back_to(self._plan.quorum):
            self.end()
            return
        world.checks.fell_back = True
        world.network.mend(self.pairs)
        others = set(world.pods) - self._nodes
        among = [(a, b) for a in sorted(others) for b in sorted(others) if a != b]
        self.pairs = [*self._around(others), *among]
        world.network.cut(self.pairs, reset=True)
        self._next = self._lose_of_first

    def _lose_of_first(self) -> None:
        """The first replica has gone on alone, by a step, and loses the stage."""
        plan, begun = self._world.newest_plan, self._made_at + 1
        if plan is None or not {m.incarnation for m in plan.members} <= self._first:
            return
        if all(t.state.plan is plan and t.state.version >= begun for t in self._members()):
            self._kill_stage(plan)
            self._next = self._meet

    def _meet(self) -> None:
        """It has made the stage anew, and is as far as it is to be."""
        made = [t.state for t in self._members() if t.state.valid and t.state.history]
        if made and max(state.version for state in made) >= self._met_at + self._ahead:
            self.end()

    def _members(self) -> list[Trainer]:
        plan, trainers = self._world.newest_plan, self._world.trainers
        members = plan.members if plan is not None else ()
        lives = (trainers.get(member.incarnation) for member in members)
        return [trainer for trainer in lives if trainer is not None and trainer.alive]

    def _kill_stage(self, plan: Plan) -> None:
        lost = {m.incarnation for m in plan.members if m.rank.stage == STAGE}
        for trainer in self._members():
            if trainer.incarnation in lost:
                trainer.kill()

    def _around(self, some: Collection[str]) -> list[tuple[str, str]]:
        """Return what leads from some nodes to all others, and back."""
        world = self._world
        others = [node for node in (*sorted(world.pods), *world.api_nodes) if node not in some]
        both = [(node, other) for node in sorted(some) for other in others]
        return [*both, *((other, node) for node, other in both)]
