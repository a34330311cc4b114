"""States that a rank brings back to a job which went on without it: it tells that, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import adopted, order, pipeline, rank

from mainstay_core.rank import machine
from mainstay_core.rank.events import PlanSeen, SendFact
from mainstay_core.rank.state import RankState
from mainstay_core.wire.facts import Phase, StateRefused
from mainstay_core.wire.plan import Method, Plan


def refusals(state: RankState, plan: Plan) -> list[StateRefused]:
    """What a rank tells of its own state as it adopts a plan."""
    actions = machine.step(machine.saw_plan(state, plan), PlanSeen()).actions
    facts = [a.fact for a in actions if isinstance(a, SendFact)]
    return [fact for fact in facts if isinstance(fact, StateRefused)]


def left_out(**fields: Any) -> RankState:
    """The rank of b.1, which is at work in a plan that others have left meanwhile."""
    return rank("b.1", position=1, index=1, lineage=0, phase=Phase.PARKED, **fields)


def test_who_comes_back_with_the_lost_stages_true_state_tells_once_that_it_is_refused() -> None:
    without = replace(pipeline(3, 1), lineage=1)
    lives = ["a.1", "b.1", "c.1", "d.1", "e.1"]
    since = dict.fromkeys(("a.1", "c.1", "d.1", "e.1"), 1)
    back = replace(make_plan({0: lives}, quorum=4, since=since, lanes=1), lineage=1)

    (as_member,), (as_spare,) = refusals(left_out(), back), refusals(left_out(), without)

    for told in (as_member, as_spare):
        assert (told.stage, told.inner, told.step) == (1, 0, 8)
        assert told.evidence == "it is of lineage 0, and others have begun lineage 1 since"
    assert not refusals(adopted(left_out(), without), back), "it has told"


def test_only_a_state_that_others_went_on_without_is_told_to_be_refused() -> None:
    stayed = rank("a.1", index=0, lineage=0, phase=Phase.PARKED)

    assert not refusals(stayed, order(pipeline(3, 1), 1, lineage=1)), "it counts"
    assert not refusals(stayed, replace(pipeline(3, 1), lineage=1)), "all go back together"
    assert not refusals(left_out(), replace(pipeline(3), lineage=0)), "no lineage has begun"
    assert not refusals(left_out(valid=False), replace(pipeline(3, 1), lineage=1)), "it has none"


def test_whom_a_restart_of_all_moves_or_drops_was_not_left_behind() -> None:
    """The others' states of that lineage do not count either."""
    lives = ["a.1", "x.1", "b.1", "d.1", "e.1"]
    since = dict.fromkeys(("a.1", "x.1", "d.1", "e.1"), 1)
    moves = make_plan({0: lives}, quorum=3, since=since, lanes=1)
    for back in (moves, pipeline(3, 1)):
        again = replace(back, lineage=1, method=Method.RESTART)
        assert not refusals(left_out(), again)
        (later,) = refusals(left_out(), replace(again, lineage=2))
        assert later.evidence.endswith("others have begun lineage 2 since"), "one was missed"
        assert refusals(left_out(), replace(again, method=Method.JOIN))
