"""What follows from a plan is kept. A run in which all is decided and checked anew is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.core.plans import make_plan
from tests.core.sim.fork_mutants import draw_ends
from tests.core.sim.mutants import Mutant, applied

from mainstay_core.rank import machine as rank_machine
from mainstay_core.rank import settle, votes
from mainstay_core.sim import Scenario, draw, simulate
from mainstay_core.sim.scenarios.scenario import FORKING, IN_MEMORY, WITNESSED
from mainstay_core.wire.plan import Plan, follows


def _decide_anew(
    plan: Plan, function: object, others: tuple[object, ...], decide: Callable[[], Any]
) -> Any:
    del plan, function, others
    return decide()


(OWNER,) = (kind for kind in Plan.__mro__ if "follow" in vars(kind))
ANEW = Mutant("nothing that follows from a plan is kept", [(OWNER, "follow", _decide_anew)], ())


def test_a_plan_of_a_job_keeps_no_reports_and_no_votes() -> None:
    """They may be large, and a rank decides on them once."""
    assert not hasattr(settle.settle, "__wrapped__")
    assert not hasattr(votes.judge, "__wrapped__")
    before = rank_machine.settle, rank_machine.judge
    assert before == (settle.settle, votes.judge)
    simulate(draw(0))
    assert (rank_machine.settle, rank_machine.judge) == before


def test_what_follows_is_decided_anew_of_other_values_by_place_or_by_name() -> None:
    asked: list[list[int]] = []

    @follows
    def total(plan: Plan, numbers: list[int], more: Sequence[int] = ()) -> int:
        del plan
        asked.append([*numbers, *more])
        return sum(asked[-1])

    first_of_it = total

    @follows
    def total(plan: Plan, numbers: list[int]) -> int:
        del plan, numbers
        return -1

    plan, numbers, more = make_plan({0: ["a"]}), [1, 2], [3]
    assert first_of_it(plan, numbers) == 3
    assert total(plan, numbers) == -1, "another function of the same name"
    assert first_of_it(plan, numbers) == 3
    assert asked == [[1, 2]]
    numbers.append(4)
    assert first_of_it(plan, numbers) == 7
    assert first_of_it(plan, numbers=numbers, more=more) == 10
    more.append(5)
    assert first_of_it(plan, numbers=numbers, more=more) == 15


@pytest.mark.parametrize(
    "scenario",
    [
        *(draw(seed) for seed in range(3)),
        draw(1, kinds=IN_MEMORY),
        draw(1, kinds=WITNESSED),
        draw_ends(1, FORKING),
    ],
    ids=lambda s: f"{s.seed}",
)
def test_a_run_in_which_all_is_decided_and_checked_anew_is_the_same(scenario: Scenario) -> None:
    kept = simulate(scenario, tracing=True)
    with applied(ANEW):
        assert simulate(scenario, tracing=True) == kept
