"""Makers of lost positions: what each of them copies, and from whom."""

from __future__ import annotations

from dataclasses import replace

from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import (
    MAKE,
    RULES,
    adopted,
    order,
    pipeline,
    rank,
    reports,
    settled,
)

from mainstay_core.rank import machine
from mainstay_core.rank.events import LoadState, ReportsGathered
from mainstay_core.rank.forks.makers import plan_making
from mainstay_core.rank.settle import settle
from mainstay_core.reinitialisation.sources import Policy


def test_all_cells_of_a_lost_stage_make_their_own_copy_by_turns() -> None:
    chains = {0: ["a.1", "b.2", "c.1"], 1: ["d.1", "e.2", "f.1"]}
    since = dict.fromkeys(("a.1", "c.1", "d.1", "f.1"), 1)
    plan = order(make_plan(chains, quorum=2, since=since, joining=["b.2", "e.2"]), 1)
    joiners = [m.index for m in plan.members if m.joining]
    told = reports(plan, 8, *joiners)
    rules = replace(RULES, outline=RULES.outline[:3])

    outcome = settle(plan, 1, told, fork_rules=rules)

    assert outcome.fork is not None
    assert [outcome.actions[i] for i in joiners] == [MAKE, MAKE]
    stages = [[m.index for m in members] for members in plan.positions]
    holders = {0: stages[0], 1: [], 2: stages[2]}
    turns = [plan_making(plan, outcome.fork, i, holders, told) for i in joiners]
    assert [[b.members for b in t.beside] for t in turns] == [
        [tuple(stages[0]), tuple(stages[2])],
        [tuple(reversed(stages[0])), tuple(reversed(stages[2]))],
    ]
    assert [b.position for b in turns[0].beside] == [0, 2]


def test_a_maker_without_a_source_says_so() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1)
    fork = settled(plan, told).fork
    assert fork is not None

    making = plan_making(plan, fork, 1, {0: [], 2: [2]}, told)

    assert [b.members for b in making.beside] == [(), (2,)]


def test_a_maker_that_loads_its_own_checkpoint_copies_nobody() -> None:
    plan = order(pipeline(2, 0), 0)
    told = [replace(report, durable=5) for report in reports(plan, 8, 0)]
    rules = replace(RULES, policy=Policy(stale_steps=9), after_lost_steps=0)
    maker = adopted(rank("a.2", valid=False, position=-1, fork_rules=rules), plan)

    making = machine.step(maker, ReportsGathered(tuple(told)))

    (load,) = [action for action in making.actions if isinstance(action, LoadState)]
    assert load.making is not None
    assert (load.making.stale, load.making.stale_history, load.making.beside) == (5, (), ())
