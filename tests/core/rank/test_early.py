"""When a reduction begins before all types are computed, against a cell that is played through."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.core.plans import make_plan
from tests.core.rank.test_settle import twin_partials

from mainstay_core.planning.partials import grow_all
from mainstay_core.rank.early import EarlyStart, early_start
from mainstay_core.rank.steps.step_plan import StepPlan, plan_step
from mainstay_core.wire.plan import Partial, Plan


def played(
    plan: Plan, step: StepPlan, index: int, shards_per_lane: int, held: Sequence[Partial]
) -> list[int] | None:
    """The types of the partial of which parts may be sent while the last type is computed.

    The cell is played type by type: what it supplies must be just what it computes, all but that
    one partial must be there before the last type begins, and that one must end with it.
    """
    where = plan.position_of(index)
    mine = [chain for chain in plan.chains if index in chain.cells]
    types = list(step.todo.get(mine[0].replica, ())) if mine else []
    supplied = [
        list(range(s.partial.first, s.partial.last + 1))
        for s in step.table[where]
        if s.index == index
    ]
    if not types or held or plan.ranks_per_stage > 1:
        return None
    before = twin_partials((), types[:-1], shards_per_lane)
    after = twin_partials((), types, shards_per_lane)
    if sorted(after) != sorted(supplied):
        return None
    unfinished = [partial for partial in supplied if partial not in before]
    assert len(unfinished) == 1
    assert unfinished[0][-1] == types[-1]
    return unfinished[0]


@pytest.mark.parametrize("seed", range(200))
def test_it_begins_exactly_where_parts_of_the_last_type_are_all_that_is_missing(seed: int) -> None:
    rng = random.Random(seed)
    stages, width, lanes = rng.randint(1, 2), rng.choice([1, 1, 1, 2]), rng.randint(1, 4)
    shards_per_lane = rng.randint(1, 3)
    replicas = sorted(rng.sample(range(lanes), rng.randint(1, lanes)))
    lives = iter(f"{letter}{n}.1" for n in range(9) for letter in "abcdefgh")
    chains = {r: [next(lives) for _ in range(stages * width)] for r in replicas}
    followers = [(next(lives), 0)] if rng.random() < 0.3 else []
    plan = make_plan(
        chains,
        followers=followers,
        ranks_per_stage=width,
        lanes=lanes,
        shards_per_lane=shards_per_lane,
    )
    held: dict[int, tuple[Partial, ...]] = {}
    if rng.random() < 0.4:
        for member in plan.members:
            some = rng.sample(range(lanes * shards_per_lane), rng.randint(0, shards_per_lane))
            held[member.index] = grow_all((), some, shards_per_lane)
    step = plan_step(plan, shards_per_lane, held)
    for member in plan.members:
        mine = held.get(member.index, ())
        start = early_start(plan, step, member.index, shards_per_lane, held=mine, connected=True)
        expected = played(plan, step, member.index, shards_per_lane, mine)
        found = start.partial and list(range(start.partial.first, start.partial.last + 1))
        assert found == expected, start.reason


def start_of(plan: Plan, index: int, **options: object) -> EarlyStart:
    given = {"held": (), "connected": True, **options}
    return early_start(plan, plan_step(plan, 2), index, 2, **given)  # type: ignore[arg-type]


TWO = {0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}


def test_an_undisturbed_cell_begins_with_the_last_type_of_its_lane() -> None:
    plan = make_plan(TWO, shards_per_lane=2)
    for index in range(4):
        replica = plan.members[index].rank.replica
        first = 2 * int(replica or 0)
        expected = Partial(lane=first // 2, first=first, last=first + 1)
        assert start_of(plan, index).partial == expected


def test_a_masked_step_begins_with_the_lost_replicas_last_type() -> None:
    plan = make_plan({0: ["a.1"]}, lanes=2, shards_per_lane=2)
    assert start_of(plan, 0).partial == Partial(lane=1, first=2, last=3)


@pytest.mark.parametrize(
    ("index", "options", "why"),
    [
        (4, {}, "computes nothing"),
        (0, {"held": (Partial(lane=0, first=0, last=0),)}, "holds types of the step already"),
        (0, {"connected": False}, "not connected yet"),
    ],
)
def test_a_cell_that_begins_late_says_why(index: int, options: dict, why: str) -> None:  # type: ignore[type-arg]
    plan = make_plan(TWO, followers=[("e.1", 1)], shards_per_lane=2)
    assert plan.members[4].rank.replica is None
    start = start_of(plan, index, **options)
    assert start.partial is None
    assert why in start.reason
    assert start_of(plan, 0).partial is not None


def test_cells_with_inner_ranks_begin_late() -> None:
    start = start_of(make_plan(TWO, ranks_per_stage=2, shards_per_lane=2), 0)
    assert start.partial is None
    assert "inner ranks" in start.reason
