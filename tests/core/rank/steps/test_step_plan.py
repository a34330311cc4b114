"""Who computes what in a step, against a twin that looks at everything for each type and lane."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.copies import Held, twin_kept, types_in

from mainstay_core.planning.partials import grow_all
from mainstay_core.rank.steps.step_plan import UNKNOWN, Maker, StepPlan, Supply, plan_step
from mainstay_core.wire.plan import Member, Partial, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a step is planned from."""

    plan: Plan
    shards_per_lane: int
    held: dict[int, tuple[Partial, ...]]
    healing: list[int]
    makers: dict[int, dict[int, Maker]]
    bad: list[int]
    tired: list[int]

    def planned(self) -> StepPlan:
        """What :func:`plan_step` says."""
        return plan_step(
            self.plan,
            self.shards_per_lane,
            self.held,
            self.healing,
            makers=self.makers,
            bad=self.bad,
            tired=self.tired,
        )


def twin(case: Case) -> StepPlan:
    """What :func:`plan_step` says, by its definition: of no use for a large quorum."""
    plan, shards_per_lane = case.plan, case.shards_per_lane
    fit = [c for c in plan.chains if not set(case.healing) & set(c.cells)]
    chains = [c for c in fit if c.replica not in case.tired] or fit or list(plan.chains)
    kept, counted = twin_kept(plan, case.held, case.makers, case.bad)
    todo: dict[int, list[int]] = {c.replica: [] for c in sorted(chains, key=lambda c: c.replica)}
    missing = [t for t in range(len(plan.suppliers)) if t not in counted]
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
    holdings = {m.index: tuple(kept[m.index]) for m in plan.members}
    makers = {
        i: {t: case.makers.get(i, {}).get(t, UNKNOWN) for p in kept[i] for t in types_in(p)}
        for i, partials in case.held.items()
        if partials
    }
    for chain in chains:
        for index in chain.cells:
            own = lists[chain.replica]
            holdings[index] = grow_all(holdings[index], own, shards_per_lane)
            made = {t: Maker(plan.quorum.id, chain.replica) for t in own}
            makers[index] = makers.get(index, {}) | made
    table = tuple(_supplies(plan, ms, holdings, shards_per_lane) for ms in plan.positions)
    return StepPlan(
        todo=lists,
        table=table,
        kept={i: tuple(kept[i]) for i, partials in case.held.items() if partials},
        holdings=holdings,
        makers=makers,
    )


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


def draw(rng: random.Random) -> Case:
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
    return Case(
        plan=plan,
        shards_per_lane=shards_per_lane,
        held=held,
        healing=healing,
        makers=draw_makers(rng, num_types, held),
        bad=[t for t in range(num_types) if rng.random() < 0.05],
        tired=[r for r in replicas if rng.random() < 0.1],
    )


def draw_makers(rng: random.Random, num_types: int, held: Held) -> dict[int, dict[int, Maker]]:
    """Of most types one chain has all copies; of some several have, or nobody knows."""
    usual = [Maker(rng.randint(1, 2), rng.randint(0, 2)) for _ in range(num_types)]
    odd = rng.choice((0.0, 0.1, 0.4))
    return {
        index: {
            t: usual[t] if rng.random() >= odd else Maker(rng.randint(1, 2), rng.randint(0, 2))
            for p in partials
            for t in types_in(p)
            if rng.random() >= odd / 4
        }
        for index, partials in held.items()
    }


@pytest.mark.parametrize("seed", range(10))
def test_a_step_equals_its_twin_whoever_is_lost_and_whatever_is_held(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        case = draw(rng)
        assert case.planned() == twin(case)
        empty = replace(case, held={}, healing=[], makers={}, bad=[], tired=[])
        assert plan_step(case.plan, case.shards_per_lane) == twin(empty)


@pytest.mark.parametrize("seed", range(4))
def test_all_copies_of_a_type_that_count_are_of_one_chain(seed: int) -> None:
    rng = random.Random(1000 + seed)
    for _ in range(150):
        case = draw(rng)
        step, makers = case.planned(), {}
        computed = {t: r for r, types in step.todo.items() for t in types}
        for table in step.table:
            for supply in table:
                for t in types_in(supply.partial):
                    maker = step.makers[supply.index].get(t, UNKNOWN)
                    assert makers.setdefault(t, maker) == maker
                    assert t not in case.bad or t in computed
                    if t in computed:
                        assert maker == Maker(case.plan.quorum.id, computed[t])


# Two replicas of two stages: members 0 (a) and 2 (b) are replica 0, 1 (c) and 3 (d) replica 1.
GRID = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, shards_per_lane=2)
NARROW = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, shards_per_lane=1)


def test_what_is_computed_again_counts_in_every_stage_also_where_an_old_copy_is_longer() -> None:
    """Stage 1 had finished type 1 when the chain was interrupted, stage 0 had not."""
    run, first = Partial(lane=0, first=0, last=1), Partial(lane=0, first=0, last=0)
    makers = {index: dict.fromkeys((0, 1), Maker(1, 0)) for index in (0, 2)}

    step = plan_step(GRID, 2, {0: (first,), 2: (run,)}, makers=makers)

    assert step.todo == {0: (0, 1), 1: (2, 3)}, "a sum cannot be taken apart"
    assert step.kept == {0: (), 2: ()}
    assert [table[0] for table in step.table] == [Supply(partial=run, index=i) for i in (0, 2)]


def test_copies_of_two_chains_are_not_mixed() -> None:
    own, other = Partial(lane=0, first=0, last=0), Partial(lane=1, first=1, last=1)
    held = {0: (own, other), 1: (other,), 2: (other,), 3: (own, other)}
    makers = {i: dict.fromkeys((0, 1), Maker(1, i % 2)) for i in range(4)}

    step = plan_step(NARROW, 1, held, makers=makers)

    assert step.todo == {0: (0,), 1: ()}
    assert step.kept == {0: (), 1: (other,), 2: (), 3: (other,)}, "the newest, then the last chain"


def test_a_chain_that_was_wrong_twice_is_passed_over_while_there_is_another() -> None:
    plan = make_plan({0: ["a.1"], 1: ["b.1"]}, shards_per_lane=1)
    assert plan_step(plan, 1, tired=[0]).todo == {1: (1, 0)}
    assert plan_step(plan, 1, tired=[0, 1]).todo == {0: (0,), 1: (1,)}


def test_a_partial_of_a_lane_that_the_job_does_not_have_is_of_no_use() -> None:
    """A peer's report may name any."""
    plan = make_plan({0: ["a.1"], 1: ["b.1"]}, shards_per_lane=2)
    foreign = (Partial(lane=9, first=18, last=19), Partial(lane=9, first=0, last=1 << 20))
    step = plan_step(plan, 2, {0: foreign})
    assert (step.todo, step.table) == (plan_step(plan, 2).todo, plan_step(plan, 2).table)
