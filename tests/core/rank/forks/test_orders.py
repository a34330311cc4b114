"""Orders of forks: what they make anew, and when an exact state is loaded instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.rank.forks.pipelines import (
    LOAD,
    MAKE,
    RULES,
    STAY,
    commit,
    fork,
    order,
    pipeline,
    reports,
    settled,
)

from mainstay_core.rank.settle import settle


def test_without_an_order_nothing_is_made_anew() -> None:
    plan = replace(pipeline(2, 1), lineage=1)

    outcome = settled(plan, reports(plan, 8, 1))

    assert set(outcome.actions) == {LOAD}
    assert outcome.fork is None


def test_only_what_the_order_names_is_made_anew() -> None:
    plan = order(pipeline(2, 1, 3), 1)

    assert set(settled(plan, reports(plan, 8, 1, 3)).actions) == {LOAD}


def test_a_position_that_only_a_returning_rank_holds_is_not_lost_by_a_fork() -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, d={"settled": 0})

    outcome = settled(plan, told)

    assert outcome.version == 8
    assert outcome.actions == (STAY, MAKE, STAY, STAY, STAY)


def test_a_checkpoint_newer_than_a_fork_could_be_is_loaded() -> None:
    """Where no version is common to all others, nothing is made anew."""
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, a={"version": 7, "settled": 1})

    assert set(settled(plan, told).actions) == {LOAD}


@pytest.mark.parametrize(
    ("limit", "durable", "is_forked"),
    [(None, 0, True), (None, 3, False), (5, 3, False), (4, 3, True)],
)
def test_a_young_checkpoint_that_the_coordinator_had_not_heard_of_is_loaded(
    limit: int | None, durable: int, is_forked: bool
) -> None:
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, 8, 1, d={"durable": durable})

    outcome = settle(plan, 1, told, fork_rules=replace(RULES, after_lost_steps=limit))

    assert (outcome.fork is not None) == is_forked
    assert outcome.version == (8 if is_forked else durable)
    assert (MAKE in outcome.actions) == is_forked
    assert (set(outcome.actions) == {LOAD}) != is_forked


@pytest.mark.parametrize("durable", [0, 8])
@pytest.mark.parametrize("limit", [None, 0])
def test_at_a_version_that_is_an_exact_source_itself_nothing_is_made_anew(
    durable: int, limit: int | None
) -> None:
    """All others have come back to the seed, or to the checkpoint, in a restart."""
    plan = order(pipeline(2, 1), 1)
    told = reports(plan, durable, 1, d={"durable": durable})

    outcome = settle(plan, 1, told, fork_rules=replace(RULES, after_lost_steps=limit))

    assert (outcome.fork, outcome.history, outcome.version) == (None, (), durable)
    assert set(outcome.actions) == {LOAD}


def test_what_is_loaded_is_of_no_fork_and_its_commit_is_known() -> None:
    """The next window is planned from the commit that a member at the checkpoint's version has."""
    plan = order(pipeline(2, 1), 1)
    exact = {"version": 7, "durable": 7, "commit": commit(6), "history": (fork(7, "x"),)}

    outcome = settled(plan, reports(plan, 8, 1, a=exact))

    assert set(outcome.actions) == {LOAD}
    assert (outcome.version, outcome.history) == (7, ())
    assert outcome.commit == commit(6)
    assert outcome.unnoted == (commit(6),)
