"""Random histories: whatever is told, in whatever order, the invariants hold.

Nobody here behaves: facts come late, twice, from ended trainers and about old
quorums. ``PlayedPods.send`` checks the invariants after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError, RemoteProtocolError
from mainstay_core.base.ids import QuorumId
from mainstay_core.coordinator.events import DrainRequested, ScaleRequested, StepsCommitted
from mainstay_core.coordinator.leaving import leaving_members
from mainstay_core.coordinator.state import is_living
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Fact, FactKind
from mainstay_core.wire.plan import Plan


class Chaos:
    """Draws what happens next."""

    def __init__(self, world: Any, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.told: list[Fact] = []
        self.plans: list[Plan] = []
        self.num_pods = 0
        self.refused = 0

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            if self.world.state.terminal:
                return
            name = self.rng.choices(list(self.CHOICES), list(self.CHOICES.values()))[0]
            try:
                getattr(self, name)()
            except (RemoteProtocolError, InvalidSpecError):
                self.refused += 1
            if self.world.state.plan and self.world.state.plan not in self.plans:
                self.plans.append(self.world.state.plan)

    CHOICES = {  # noqa: RUF012 - a table, never written
        "new_pod": 3,
        "trainer_up": 10,
        "trainer_down": 3,
        "pod_gone": 1,
        "park": 2,
        "settle_one": 12,
        "settle_all": 4,
        "commit": 6,
        "repeat": 4,
        "tick": 5,
        "silence": 1,
        "finish": 0.3,
        "leave": 1.5,
        "drain": 0.5,
        "scale": 1,
        "flap": 2,
    }

    def tell(self, *facts: Fact) -> None:
        self.told += facts
        self.world.tell(*facts)

    def new_pod(self) -> None:
        living = [p for p in self.world.state.pods if not p.gone]
        if len(living) < self.world.state.shape.num_ranks + 2:
            self.num_pods += 1
            self.world.register(f"pod-{self.num_pods}", self.rng.choice((1, 2)))

    def slot(self, *, up: bool) -> Any:
        gone = {p.registration.pod for p in self.world.state.pods if p.gone}
        slots = [
            s
            for s in self.world.state.slots
            if (s.incarnation is not None) == up and s.slot.pod not in gone
        ]
        return self.rng.choice(slots) if slots else None

    def trainer_up(self) -> None:
        slot = self.slot(up=False)
        if slot is not None:
            self.world.up(slot.slot.pod, slot.slot.index)

    def trainer_down(self) -> None:
        slots = [self.slot(up=True) for _ in range(self.rng.choice((1, 1, 1, 2, 3)))]
        facts = [
            self.world.fact(
                FactKind.TRAINER_DOWN,
                s.slot.pod,
                s.slot.index,
                incarnation=s.incarnation,
                restarting=self.rng.random() < 0.5,
            )
            for s in slots
            if s is not None
        ]
        self.tell(*facts)

    def pod_gone(self) -> None:
        pods = [p.registration.pod for p in self.world.state.pods if not p.gone]
        if pods:
            self.world.pod_gone(*self.rng.sample(pods, min(len(pods), self.rng.choice((1, 1, 2)))))

    def some_plan(self) -> Plan | None:
        if not self.plans:
            return None
        return self.plans[-1] if self.rng.random() < 0.8 else self.rng.choice(self.plans)

    def about(self, kind: FactKind, **fields: Any) -> Fact | None:
        plan = self.some_plan()
        if plan is None:
            return None
        member = self.rng.choice(plan.members)
        return self.world.fact(
            kind,
            member.slot.pod,
            member.slot.index,
            incarnation=member.incarnation,
            quorum=plan.quorum,
            **fields,
        )

    def park(self) -> None:
        plan = self.some_plan()
        if plan is not None:
            suspects = tuple(m.slot for m in self.rng.sample(plan.members, 1))
            fact = self.about(FactKind.PARKED, suspects=suspects)
            assert fact is not None
            self.tell(fact)

    def settle_one(self) -> None:
        kind = self.rng.choice((FactKind.ADOPTED, FactKind.SETTLED))
        fact = self.about(kind, step=self.world.state.step)
        if fact is not None:
            self.tell(fact)

    def settle_all(self) -> None:
        if self.world.state.plan is not None:
            self.world.settle()

    def commit(self) -> None:
        plan = self.some_plan()
        if plan is not None:
            step = max(0, self.world.state.step - self.rng.choice((0, 0, 0, 1)))
            at = self.world.now_s
            self.world.send(
                StepsCommitted(step=step, quorum=plan.quorum, committed_at_s=at, step_s=0.1)
            )

    def repeat(self) -> None:
        if self.told:
            self.world.tell(self.rng.choice(self.told))

    def leave(self) -> None:
        pods = [p.registration.pod for p in self.world.state.pods if not p.gone]
        chosen = self.rng.sample(pods, min(len(pods), self.rng.choice((1, 1, 1, 2))))
        facts = [self.world.fact(FactKind.LEAVING, p, None, grace_s=30.0) for p in chosen]
        if facts:
            self.tell(*facts)

    def drain(self) -> None:
        pods = [p.registration.pod for p in self.world.state.pods]
        self.world.send(DrainRequested(pod=self.rng.choice([*pods, "nobody"])))

    def scale(self) -> None:
        shape = self.world.state.shape
        self.world.send(ScaleRequested(replicas=self.rng.randint(0, shape.lanes + 1)))

    def flap(self) -> None:
        """A trainer that has just come up ends again."""
        self.trainer_up()
        slot = self.slot(up=True)
        if slot is not None:
            fact = self.world.fact(
                FactKind.TRAINER_DOWN,
                slot.slot.pod,
                slot.slot.index,
                incarnation=slot.incarnation,
                restarting=True,
            )
            self.tell(fact)

    def tick(self) -> None:
        self.world.tick(after_s=self.rng.choice((0.1, 0.5, 5.0, 30.0)))

    def silence(self) -> None:
        pods = [p.registration.pod for p in self.world.state.pods]
        if pods:
            self.world.tick(**{self.rng.choice(pods): 20.0})

    def finish(self) -> None:
        fact = self.about(FactKind.FINISHED)
        if fact is not None:
            self.tell(fact)


@pytest.mark.parametrize("seed", range(60))
def test_invariants_hold_whatever_is_told(new_world: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    lanes = rng.randint(1, 4)
    replicas = rng.randint(1, lanes)
    world = new_world(
        ranks_per_pod=2,
        lanes=lanes,
        replicas=replicas,
        min_replicas=rng.randint(1, replicas),
        stages=rng.randint(1, 3),
        ranks_per_stage=rng.choice((1, 1, 2)),
        shards_per_lane=rng.choice((1, 2, 4)),
        startup_deadline_s=10_000.0,
    )
    chaos = Chaos(world, rng)
    chaos.run(250)
    world.stored()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks_per_stage", [1, 2])
def test_the_job_goes_on_once_faults_stop(
    new_world: Callable[..., Any], seed: int, ranks_per_stage: int
) -> None:
    """Protocol I5: with enough trainers up and everybody heard, all replicas are whole again."""
    rng = random.Random(1000 + seed)
    world = new_world(
        ranks_per_pod=2,
        replicas=2,
        lanes=2,
        stages=2,
        ranks_per_stage=ranks_per_stage,
        steps=10_000,
        startup_deadline_s=1e6,
        max_restarts=1000,
    )
    chaos = Chaos(world, rng)
    chaos.run(150)
    if world.state.terminal:
        return
    for i in range(4 * ranks_per_stage):
        world.register(f"fresh-{i}")
        world.up(f"fresh-{i}")
    for _ in range(12):
        world.tick(after_s=60.0)
        if world.state.phase in (JobPhase.RUNNING, JobPhase.RECOVERING):
            world.settle()
            world.commit()
    assert world.state.phase is JobPhase.RUNNING
    assert len(world.plan.chains) == world.state.wanted
    assert all(is_living(world.state, m) for m in world.plan.members)
    assert leaving_members(world.state) == (), "whoever leaves is out in bounded steps"
    plan = world.plan
    for _ in range(3):
        world.settle()
        world.commit()
        world.tick(after_s=60.0)
    assert world.plan is plan, "a plan without a cause"


def test_nonces_and_ids_are_never_used_twice(new_world: Callable[..., Any]) -> None:
    world = new_world(replicas=2, lanes=2, stages=2, ranks_per_pod=2, startup_deadline_s=1e6)
    chaos = Chaos(world, random.Random(7))
    chaos.run(600)
    quorums: list[QuorumId] = [p.quorum for p in chaos.plans]
    assert len({q.id for q in quorums}) == len({q.nonce for q in quorums}) == len(quorums) > 10
    assert [q.id for q in quorums] == sorted(q.id for q in quorums)
