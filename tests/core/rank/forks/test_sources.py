"""Sources of forks: checkpoints of a lost stage that are young enough to be loaded alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.core.rank.forks.pipelines import LOAD, MAKE, RULES, fork, order, pipeline, reports

from mainstay_core.rank.settle import Settlement, settle
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Fork, OptimizerState
from mainstay_core.wire.votes import SettleReport


def settled_with_copies(
    plan: Plan, told: Sequence[SettleReport], stale_steps: int, after: int = 0
) -> Settlement:
    """Settle a job whose stages may load checkpoints of theirs alone."""
    policy = Policy(stale_steps=stale_steps)
    rules = replace(RULES, policy=policy, after_lost_steps=after)
    return settle(plan, 1, told, fork_rules=rules)


def with_durable(told: Sequence[SettleReport], durable: int) -> list[SettleReport]:
    return [replace(report, durable=durable) for report in told]


def versions_of(fork: Fork | None) -> list[tuple[int, int | None]]:
    assert fork is not None
    return [(p.stage, s.version) for p in fork.made.positions for b in p.blocks for s in b.sources]


@pytest.mark.parametrize(
    ("lost", "stale_steps", "made"),
    [
        pytest.param((1,), 3, [(1, 5)], id="young enough: before its neighbours"),
        pytest.param((1,), 2, [(1, None), (1, None)], id="too old: its neighbours"),
        pytest.param((0,), 3, [(0, 5)], id="an end of the pipeline"),
        pytest.param((1, 2), 3, [(1, 5), (2, 5)], id="two side by side"),
    ],
)
def test_a_lost_stage_loads_its_own_checkpoint_while_the_others_stay(
    lost: tuple[int, ...], stale_steps: int, made: list[tuple[int, int | None]]
) -> None:
    plan = order(pipeline(2, *lost), *lost)

    outcome = settled_with_copies(plan, with_durable(reports(plan, 8, *lost), 5), stale_steps)

    assert outcome.version == 8
    assert [i for i, action in enumerate(outcome.actions) if action is MAKE] == list(lost)
    assert versions_of(outcome.fork) == made


def test_a_checkpoint_that_is_too_old_is_taken_by_no_stage_alone() -> None:
    """The newer one went from the disk after the coordinator looked: all go back together."""
    plan = order(pipeline(2, 0), 0)

    outcome = settled_with_copies(plan, with_durable(reports(plan, 8, 0), 5), 2)

    assert set(outcome.actions) == {LOAD}
    assert (outcome.version, outcome.fork) == (5, None)


@pytest.mark.parametrize("durable", [0, 8])
def test_without_a_checkpoint_left_all_go_back(durable: int) -> None:
    """It went from the disk after the coordinator looked, or it has the very version."""
    plan = order(pipeline(2, 0), 0)

    outcome = settled_with_copies(plan, with_durable(reports(plan, 8, 0), durable), 9)

    assert set(outcome.actions) == {LOAD}
    assert (outcome.version, outcome.fork) == (durable, None)


def test_a_checkpoint_of_a_forks_very_version_does_not_count() -> None:
    """Nobody knows whether it is from before or after the fork."""
    plan = order(pipeline(2, 1), 1)
    noted = {life: {"history": (fork(5, "layers.3"),)} for life in "acde"}
    told = with_durable(reports(plan, 8, 1, **noted), 5)

    assert versions_of(settled_with_copies(plan, told, 9).fork) == [(1, None), (1, None)]


def test_what_comes_whole_from_a_guard_or_a_checkpoint_averages_nothing() -> None:
    policy = Policy(stale_steps=9, optimizer_state=OptimizerState.AVERAGE)
    rules = replace(RULES, policy=policy, after_lost_steps=0)
    plan = order(pipeline(2, 0), 0)
    told = [replace(r, durable=6) for r in reports(plan, 8, 0)]
    outcome = settle(plan, 1, told, fork_rules=rules)
    assert outcome.fork is not None
    (place,) = outcome.fork.made.positions
    assert place.optimizer_state is OptimizerState.ZERO
