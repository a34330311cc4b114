"""The settings by which an ordered fork is made: those of the order, where it names them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.rank.forks.pipelines import LOAD, MAKE, made_of, order, pipeline, reports, settled

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.rank.forks.makers import plan_making
from mainstay_core.wire.reinitialisation import ForkOrder, describe_fork

UNHEARD_OF = ApproximateConfig(optimizer_state="Best")


def test_an_order_is_carried_out_by_the_rules_that_it_names() -> None:
    """The job's policy may have changed since this rank was started."""
    how = ApproximateConfig(after_lost_steps=2, weights="Uniform", lr_boost=1.5, boost_steps=10)
    plan = order(pipeline(2, 1), 1)
    assert plan.fork is not None
    named = replace(plan, fork=replace(plan.fork, how=how))

    outcome = settled(named, reports(plan, 8, 1))

    assert made_of(outcome.fork) == [(1, [(0, 0.5), (2, 0.5)])]
    assert outcome.fork is not None
    assert (outcome.fork.lr_boost, outcome.fork.boost_steps) == (1.5, 10)
    young = reports(plan, 8, 1, a={"durable": 6})
    assert set(settled(named, young).actions) == {LOAD}, "two steps are not worth it"
    old = reports(plan, 8, 1, a={"durable": 5})
    assert settled(named, old).actions[1] is MAKE
    assert set(settled(plan, old).actions) == {LOAD}, "without a bound any checkpoint is"


def test_an_order_to_average_moments_is_recorded_and_whole_states_are_copied() -> None:
    plan = pipeline(2, 1)
    for name, copied in (("Zero", True), ("Average", False)):
        how = ApproximateConfig(optimizer_state=name)
        ordered = replace(plan, lineage=1, fork=ForkOrder(positions=(1,), since=0, how=how))
        told = reports(ordered, 8, 1)
        outcome = settled(ordered, told)
        assert outcome.fork is not None
        (place,) = outcome.fork.made.positions
        assert place.optimizer_state == name
        assert ("optimizer" in describe_fork(outcome.fork)) == (not copied)
        making = plan_making(ordered, outcome.fork, 1, {0: [0], 2: [2]}, told)
        assert [beside.wanted("q2-n", 8).masters_only for beside in making.beside] == [copied] * 2
    wrong = replace(order(plan, 1), fork=ForkOrder(positions=(1,), since=0, how=UNHEARD_OF))
    with pytest.raises(LocalProtocolError, match="with optimizer state 'Best'"):
        settled(wrong, reports(wrong, 8, 1))


def test_an_order_by_weights_that_there_are_not_is_refused() -> None:
    plan = order(pipeline(2, 1), 1)
    assert plan.fork is not None
    how = ApproximateConfig(weights="ByTaste")
    with pytest.raises(LocalProtocolError, match="orders a fork by weights 'ByTaste'"):
        settled(replace(plan, fork=replace(plan.fork, how=how)), reports(plan, 8, 1))
