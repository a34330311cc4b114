"""Who guards what an end of the pipeline alone has: a function of the plan, with least movement."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.core.plans import make_plan

from mainstay_core.reinitialisation.guards import (
    Guard,
    choose_cells,
    ends_of,
    guard_groups,
    guarded_blocks,
    plan_guards,
)
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.reinitialisation import BlockOutline, Outline, Rule


def outline(stages: int) -> Outline:
    cut = [[BlockOutline(name=f"layers.{i}", kind="layer")] for i in range(stages)]
    cut[0].insert(0, BlockOutline(name="embedding", kind="embedding"))
    cut[-1].append(BlockOutline(name="head", kind="head"))
    return tuple(map(tuple, cut))


def plan_of(replicas: int, stages: int = 3, **since: int) -> Plan:
    lives = {r: [f"{chr(97 + stages * r + s)}.1" for s in range(stages)] for r in range(replicas)}
    every = {life: since.get(life[0], 1) for cells in lives.values() for life in cells}
    return make_plan(lives, since=every, lanes=replicas)


@pytest.mark.parametrize(
    ("stages", "ends"),
    [(1, ()), (2, ((0, 1), (1, 0))), (3, ((0, 1), (2, 1))), (5, ((0, 1), (4, 3)))],
)
def test_the_stage_beside_each_end_is_its_twin(
    stages: int, ends: tuple[tuple[int, int], ...]
) -> None:
    assert ends_of(stages) == ends


def test_what_has_no_like_block_in_the_twin_is_guarded_and_what_its_author_says() -> None:
    cut = outline(4)
    assert [guarded_blocks(cut, stage) for stage in range(4)] == [("embedding",), (), (), ("head",)]
    rules = {Rule.GUARD: ("embedding", "layers.0"), Rule.NO: ("embedding",)}
    for rule, names in rules.items():
        first = (cut[0][0], replace(cut[0][1], rule=rule))
        assert guarded_blocks((first, *cut[1:]), 0) == names
    never = (replace(cut[0][0], rule=Rule.NO), *cut[0][1:])
    assert guarded_blocks((never, *cut[1:]), 0) == ()


def test_a_guard_gets_its_gradient_from_its_own_chain() -> None:
    plan = plan_of(2)
    guards = plan_guards(plan, outline(3), 2)
    assert [(g.end, plan.members[g.index].rank.stage) for g in guards] == [(0, 1)] * 2 + [
        (2, 1)
    ] * 2
    for guard in guards:
        chain = plan.chain_of(guard.index)
        assert chain is not None
        assert chain.cells[guard.end] == guard.owner


def test_no_more_guard_than_there_are_cells_and_nobody_where_none_is_wanted() -> None:
    assert len(plan_guards(plan_of(1), outline(3), 2)) == 2
    assert plan_guards(plan_of(2), outline(3), 0) == ()
    assert plan_guards(plan_of(2), (), 2) == ()


@pytest.mark.parametrize(("stages", "shared"), [(2, True), (3, True), (4, False), (5, False)])
def test_ends_with_a_member_in_common_share_a_group_in_which_no_two_gradients_are_mixed_up(
    stages: int, shared: bool
) -> None:
    guards = plan_guards(plan_of(3, stages), outline(stages), 2)
    groups = guard_groups(guards)
    assert list(groups) == [0, stages - 1]
    assert (groups[0] == groups[stages - 1]) == shared
    assert [group.end for group in groups.values()] == ([0, 0] if shared else [0, stages - 1])
    for group in set(groups.values()):
        sent = [(g.owner, g.index) for g in guards if groups[g.end] == group]
        assert len(set(sent)) == len(sent), "messages of two ends would go the same way"
        assert group.members == tuple(sorted({index for pair in sent for index in pair}))
    assert guard_groups(()) == {}


def test_of_two_stages_each_guards_the_other() -> None:
    plan = plan_of(1, 2)
    found = [(g.end, plan.members[g.index].rank.stage) for g in plan_guards(plan, outline(2), 2)]
    assert found == [(0, 1), (1, 0)]


def cells(rng: random.Random) -> tuple[list[Member], dict[str, str]]:
    plan = plan_of(rng.randint(1, 6), 2)
    members = [replace(m, since=rng.randint(1, 4)) for m in plan.positions[1]]
    domains = {m.slot.pod: rng.choice(("", "x", "y", "z")) for m in members}
    return members, domains


def test_guards_are_in_the_most_domains_and_the_oldest_as_a_brute_force_says() -> None:
    rng = random.Random(1)
    for _ in range(500):
        members, domains = cells(rng)
        number = rng.randint(1, 4)

        def where(chosen: tuple[Member, ...], domains: dict[str, str] = domains) -> int:
            return len({domains[m.slot.pod] or m.slot.pod for m in chosen})

        def age(chosen: tuple[Member, ...]) -> list[tuple[int, str]]:
            return sorted((m.since, m.slot.pod) for m in chosen)

        sets = list(itertools.combinations(members, min(number, len(members))))
        most = max(map(where, sets))
        found = choose_cells(members, domains, number)
        assert where(found) == most
        if number == 1 or most == len(found):
            best = min((age(s) for s in sets if where(s) == most), key=lambda ages: ages)
            assert age(found) == best


def test_a_guard_that_stays_a_member_stays_one_unless_a_new_domain_comes() -> None:
    rng = random.Random(2)
    for _ in range(500):
        members, domains = cells(rng)
        number = rng.randint(1, 4)
        before = choose_cells(members, domains, number)
        gone = rng.choice(members)
        left = [m for m in members if m is not gone]
        after = choose_cells(left, domains, number)
        assert {m.slot for m in before} - {gone.slot} <= {m.slot for m in after}
        if number == 1:
            joiner = replace(gone, since=9)
            assert choose_cells([*left, joiner], domains, number)[:1] == (after or (joiner,))[:1]


def test_who_guards_is_planned_once_for_a_plan_and_again_for_other_guards() -> None:
    plan, cut, planned = plan_of(3), outline(3), []

    def guards_of(number: int, stages: Outline = cut) -> tuple[Guard, ...]:
        def plan_them() -> tuple[Guard, ...]:
            planned.append(number)
            return plan_guards(plan, stages, number)

        return plan.guards_by(stages, number, plan_them)

    assert guards_of(2) == plan_guards(plan, cut, 2)
    assert guards_of(2) is guards_of(2)
    assert planned == [2]
    assert guards_of(1) == plan_guards(plan, cut, 1)
    assert guards_of(1, ()) == ()
    assert planned == [2, 1, 1]
