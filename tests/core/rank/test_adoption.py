"""Adopted plans of forks: which states of the lineages before count in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan
from tests.core.rank.forks.pipelines import adopted, order, pipeline, rank


@pytest.mark.parametrize(
    ("state", "since", "counts"),
    [
        pytest.param({"lineage": 0}, 0, True, id="a member that stayed"),
        pytest.param({"lineage": 1}, 0, True, id="one that settled in a fork that failed"),
        pytest.param({"lineage": 1, "settled": 0}, 0, False, id="one left out since that fork"),
        pytest.param({"lineage": 2, "settled": 0}, 0, False, id="one of a rival of this plan"),
        pytest.param({"lineage": 0, "settled": 0}, 0, False, id="one that was left out meanwhile"),
        pytest.param({"lineage": 0}, 1, False, id="one of a lineage that was void before"),
        pytest.param({"lineage": 0, "position": 2}, 0, False, id="one of another stage"),
        pytest.param({"lineage": 0, "valid": False}, 0, False, id="one with a bad state"),
    ],
)
def test_a_state_of_a_lineage_before_counts_if_its_rank_stayed(
    state: dict[str, Any], since: int, counts: bool
) -> None:
    plan = order(pipeline(3, 1), 1, lineage=2, since=since)

    after = adopted(rank("a.1", **state), plan)

    assert after.valid == counts
    if counts:
        assert after.lineage == 2


def test_a_state_that_counted_in_an_earlier_plan_of_a_fork_counts_though_that_failed() -> None:
    """It came back under the first one and has not settled in it: nobody has without it."""
    plan = order(pipeline(3, 1), 1, lineage=2)
    members = [replace(m, since=2) if m.index == 0 else m for m in plan.members]
    came_back = rank("a.1", lineage=1, settled=0, plan=order(pipeline(2, 1), 1))

    assert adopted(came_back, replace(plan, members=tuple(members))).valid


def test_a_rank_that_was_left_out_before_a_fork_returns_under_its_first_plan() -> None:
    """Nobody has gone another way yet. A planned plan may have dropped it, and is taken back."""
    taken_back = rank("a.1", lineage=0, settled=0)
    first = order(pipeline(3, 1), 1, lineage=1)

    assert adopted(taken_back, first).valid
    assert not adopted(rank("a.1", lineage=0, settled=0), order(first, 1, lineage=2)).valid


def test_an_old_pod_with_the_lost_stages_true_state_is_refused() -> None:
    lives = ["a.1", "b.1", "c.1", "d.1", "e.1"]
    since = dict.fromkeys(("a.1", "c.1", "d.1", "e.1"), 1)
    back = make_plan({0: lives}, quorum=3, since=since, lanes=1)
    true_state = rank("b.1", position=1, lineage=0)

    assert not adopted(true_state, order(back, 1, lineage=2)).valid, "the fork is not over"
    assert not adopted(true_state, replace(back, lineage=1)).valid, "it is over"


def test_without_an_order_no_state_of_another_lineage_counts() -> None:
    assert not adopted(rank("a.1", lineage=0), replace(pipeline(3), lineage=1)).valid
