"""Who computes what in a step, against a twin that looks at everything for each type and lane."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import pytest
from tests.core.plans import make_plan

from mainstay_core.planning.partials import covers, grow_all
from mainstay_core.rank.step_plan import StepPlan, Supply, plan_step
from mainstay_core.wire.plan import Member, Partial, Plan

Held = Mapping[int, tuple[Partial, ...]]


def twin(plan: Plan, shards_per_lane: int, held: Held, healing: Collection[int]) -> StepPlan:
    """What :func:`plan_step` says, by its definition: of no use for a large quorum."""
    chains = [c for c in plan.chains if not set(healing) & set(c.cells)] or list(plan.chains)
    todo: dict[int, list[int]] = {c.replica: [] for c in sorted(chains, key=lambda c: c.replica)}
    missing = [
        t
        for t in range(len(plan.suppliers))
        if not all(
            any(covers(p, t) for m in members for p in held.get(m.index, ()))
            for members in plan.positions
        )
    ]
    orphans = [t for t in missing if plan.suppliers[t] not in todo]
    for t in missing:
        if t not in orphans:
            todo[plan.suppliers[t]].append(t)
    for t in orphans:
        todo[min(todo, key=lambda r: (len(todo[r]), r))].append(t)
    lists = {
        r: tuple(sorted(types, key=lambda t: (t // shards_per_lane != r, t)))
        for r, types in todo.items()
    }
    holdings = {m.index: held.get(m.index, ()) for m in plan.members}
    for chain in chains:
        for index in chain.cells:
            holdings[index] = grow_all(holdings[index], lists[chain.replica], shards_per_lane)
    table = tuple(_supplies(plan, ms, holdings, shards_per_lane) for ms in plan.positions)
    return StepPlan(todo=lists, table=table)


def _supplies(
    plan: Plan, members: Sequence[Member], holdings: Held, shards_per_lane: int
) -> tuple[Supply, ...]:
    own_lane = {i: c.replica for c in plan.chains for i in c.cells}
    found: list[Supply] = []
    for first in range(0, len(plan.suppliers), shards_per_lane):
        lane, t = first // shards_per_lane, first
        while t < first + shards_per_lane:
            offers = [
                Supply(partial=p, index=m.index)
                for m in members
                for p in holdings[m.index]
                if p.lane == lane and p.first == t and (t == first or p.last == t)
            ]
            best = min(
                offers, key=lambda s: (-s.partial.last, own_lane.get(s.index) != lane, s.index)
            )
            found.append(best)
            t = best.partial.last + 1
    return tuple(found)


def draw(rng: random.Random) -> tuple[Plan, int, dict[int, tuple[Partial, ...]], list[int]]:
    """A plan with lost lanes and followers, and what its members may hold."""
    lanes, stages, width = rng.randint(1, 5), rng.randint(1, 3), rng.choice((1, 1, 2))
    shards_per_lane = rng.randint(1, 4)
    positions = range(stages * width)
    replicas = sorted(rng.sample(range(lanes), rng.randint(1, lanes)))
    plan = make_plan(
        {r: [f"r{r}p{p}.1" for p in positions] for r in replicas},
        followers=[(f"f{n}.1", rng.choice(positions)) for n in range(rng.randint(0, 3))],
        ranks_per_stage=width,
        lanes=lanes,
        shards_per_lane=shards_per_lane,
    )
    num_types = lanes * shards_per_lane
    held = {
        m.index: grow_all(
            (), rng.sample(range(num_types), rng.randint(0, num_types)), shards_per_lane
        )
        for m in plan.members
        if rng.random() < 0.6
    }
    healing = [m.index for m in plan.members if rng.random() < 0.1]
    for index in healing:
        held.pop(index, None)
    return plan, shards_per_lane, held, healing


@pytest.mark.parametrize("seed", range(10))
def test_a_step_equals_its_twin_whoever_is_lost_and_whatever_is_held(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        plan, shards_per_lane, held, healing = draw(rng)
        expected = twin(plan, shards_per_lane, held, healing)
        assert plan_step(plan, shards_per_lane, held, healing) == expected
        assert plan_step(plan, shards_per_lane) == twin(plan, shards_per_lane, {}, ())


def test_a_partial_of_a_lane_that_the_job_does_not_have_is_of_no_use() -> None:
    """A peer's report may name any."""
    plan = make_plan({0: ["a.1"], 1: ["b.1"]}, shards_per_lane=2)
    foreign = (Partial(lane=9, first=18, last=19), Partial(lane=9, first=0, last=1 << 20))
    assert plan_step(plan, 2, {0: foreign[:1]}) == plan_step(plan, 2)
    with pytest.raises(AssertionError, match="has no supplier"):
        plan_step(plan, 2, {0: foreign})
