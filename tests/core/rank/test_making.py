"""A rank that takes part in a fork: its history afterwards, and who tells of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.rank.forks.pipelines import (
    adopted,
    commit,
    course,
    order,
    pipeline,
    rank,
    reports,
    settled,
)

from mainstay_core.base import codec
from mainstay_core.rank import machine
from mainstay_core.rank.events import (
    Applied,
    Apply,
    DropHeld,
    LoadState,
    PlanSeen,
    ReportsGathered,
    SendFact,
)
from mainstay_core.wire.facts import Settled
from mainstay_core.wire.plan import Partial


def test_all_members_have_one_history_and_chain_after_a_fork() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1)
    stays = adopted(rank("a.1", held=(Partial(lane=0, first=0, last=0),)), plan)
    maker = adopted(rank("b.2", valid=False, position=-1), plan)

    stayed = machine.step(stays, ReportsGathered(tuple(told)))
    making = machine.step(maker, ReportsGathered(tuple(told)))
    loads = [a for a in making.actions if isinstance(a, LoadState)]
    made = machine.step(making.state, machine.StateLoaded("made"))

    assert DropHeld() in stayed.actions
    assert loads[0].making is not None
    assert [b.position for b in loads[0].making.beside] == [0, 2]
    assert [b.expected for b in loads[0].making.beside] == ["state-0", "state-2"]
    states = (stayed.state, made.state)
    assert len({codec.dumps((s.history, s.commit_chain, s.lineage)) for s in states}) == 1
    assert stayed.state.history


def test_a_history_is_that_of_the_checkpoint_that_was_loaded() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, a={"version": 7})
    loading = machine.step(adopted(rank("c.1", position=2), plan), ReportsGathered(tuple(told)))

    exact = machine.step(loading.state, machine.StateLoaded("x", commit(3), "chain", ()))

    assert exact.state.history == ()


@pytest.mark.parametrize("rolls", [False, True])
def test_who_missed_a_fork_takes_its_history_though_the_plan_orders_none(rolls: bool) -> None:
    """Without it its state would be void at the next settle, and all would go back."""
    plan = replace(pipeline(7), lineage=1)
    knows = course(8, 1) | {"settled": 6}
    held = (Partial(lane=0, first=0, last=0),)
    behind: dict[str, Any] = {"version": 7, "mark": "q1-n", "certified_in": "q0-n"}
    mine = behind if rolls else {"held": held, "held_in": 1}
    told = reports(plan, 8, a={"settled": 5} | mine, b=knows, c=knows)
    state = adopted(rank("a.1", lineage=1, settled=5, **mine), plan)

    settling = machine.step(state, ReportsGathered(tuple(told)))

    if rolls:
        assert isinstance(settling.actions[-1], Apply)
        applied = Applied(digest="state-0", commit=commit(7, 1, 1, 3, 1, 1))
        settling = machine.step(settling.state, applied)
    assert settling.state.version == 8
    assert settling.state.history == knows["history"]
    assert settling.state.commit_chain == knows["chain"]
    assert settling.state.held == ()
    assert DropHeld() in settling.actions
    assert settled(plan, told).step.todo == {0: (0,)}, "it came through the stage that was lost"


@pytest.mark.parametrize("life", ["a.1", "c.1"])
def test_the_first_member_alone_tells_the_history_once_it_goes_on(life: str) -> None:
    plan = order(pipeline(2, 1), 1)
    position = 0 if life == "a.1" else 2
    state = machine.step(
        replace(rank(life), position=position, digest=f"state-{position}", newest=plan),
        PlanSeen(),
    ).state
    actions = machine.step(state, ReportsGathered(tuple(reports(plan, 8, 1)), ())).actions
    (told,) = (a.fact for a in actions if isinstance(a, SendFact) and isinstance(a.fact, Settled))

    if life != "a.1":
        assert told.history is None
        return
    assert told.history is not None
    assert (told.history.since, told.history.num_forks, told.history.made) == (8, 1, True)
    assert told.history.newest[0].made.reason.startswith("stage 1 is made anew from 0.25")


@pytest.mark.parametrize(
    ("ordered", "version", "made"),
    [
        pytest.param((1,), 8, True, id="it was made before the meeting failed"),
        pytest.param((1, 3), 8, True, id="another was lost meanwhile, and somebody held it"),
        pytest.param((3,), 8, False, id="it was made for an order before, and this is held"),
        pytest.param((1,), 9, False, id="all have gone on since"),
    ],
)
def test_a_repeated_order_that_finds_its_fork_made_is_told_as_made(
    ordered: tuple[int, ...], version: int, made: bool
) -> None:
    first = settled(order(pipeline(2, 1), 1), reports(order(pipeline(2, 1), 1), 8, 1))
    plan = order(pipeline(3), *ordered, lineage=2)
    knows = {"history": first.history, "commit_chain": first.commit_chain}
    state = rank("a.1", lineage=1, version=version, plan=order(pipeline(2), 1), **knows)
    told = {"history": first.history, "chain": first.commit_chain}
    everybody = reports(plan, version, **dict.fromkeys("abcde", told))

    actions = machine.step(adopted(state, plan), ReportsGathered(tuple(everybody), ())).actions

    (fact,) = (a.fact for a in actions if isinstance(a, SendFact) and isinstance(a.fact, Settled))
    assert fact.history is not None
    assert (fact.history.since, fact.history.num_forks, fact.history.made) == (8, 1, made)
