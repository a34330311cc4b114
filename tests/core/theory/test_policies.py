"""Policies: what a step stalls, and what a failure replays or loses."""

from __future__ import annotations

import random

import pytest

from mainstay_core.theory import paper_jobs
from mainstay_core.theory.policies import DensePolicy, SparsePolicy, plan_moc

DEEPSEEK = paper_jobs.TABLE_3["DeepSeek-MoE"]
EQUAL = (1 / 64,) * 64


def sparse(window: int, lag: int = 0, period: int | None = None) -> SparsePolicy:
    return SparsePolicy(
        name="s",
        window=window,
        step_stall_s=0.1,
        step_s=2.0,
        period=window if period is None else period,
        lag=lag,
    )


def test_a_dense_policy_replays_what_follows_its_last_snapshot() -> None:
    policy = DensePolicy(
        name="d", interval=10, snapshot_stall_s=5.0, step_s=2.0, rollback_factor=1.5
    )

    assert policy.stall_s(0.0) == 0.5
    assert policy.replay_s(9.5) == pytest.approx(1.5 * 9.5 * 2)
    assert policy.replay_s(20.0) == 0.0
    assert policy.replay_s(23.0) == pytest.approx(9.0)
    assert policy.loses(23.0, 0.0) == 0.0


def test_a_sparse_policy_replays_one_to_two_windows_as_the_paper_says() -> None:
    rng = random.Random(2)
    for window in range(1, 9):
        replays = [sparse(window).replay_steps(rng.uniform(100, 10_000)) for _ in range(4000)]
        assert window <= min(replays)
        assert max(replays) <= 2 * window
        assert sum(replays) / len(replays) == pytest.approx(1.5 * window, rel=0.03)


@pytest.mark.parametrize(("window", "lag", "period"), [(3, 0, 3), (3, 1, 4), (5, 2, 7), (1, 4, 5)])
def test_a_sparse_policy_replays_from_the_newest_window_that_has_arrived(
    window: int, lag: int, period: int
) -> None:
    policy = sparse(window, lag, period)
    for tenths in range(400):
        done = tenths / 10
        loadable = [
            number * period for number in range(100) if number * period + window + lag <= done
        ]
        assert policy.replay_steps(done) == pytest.approx(done - max(loadable, default=0))


def test_moc_doubles_its_experts_each_time_half_of_what_is_left_of_its_budget_is_lost() -> None:
    moc = plan_moc(DEEPSEEK, EQUAL, 16.0, 0.2)

    assert [moc.num_experts(lost) for lost in (0, 8, 8.1, 12, 12.1, 14, 14.1, 100)] == [
        *(8, 8, 16, 16, 32, 32, 64, 64)
    ]


def test_mocs_stall_grows_with_its_experts_up_to_a_dense_snapshots() -> None:
    moc = plan_moc(DEEPSEEK, EQUAL, 16.0, 0.2)
    stalls = [moc.stall_s(lost) for lost in (0.0, 9.0, 13.0, 15.0)]

    assert stalls == sorted(stalls)
    assert stalls[0] == 0.2
    assert stalls[-1] == pytest.approx(12 * 16.4e9 / 21e9 - 2.9)


def test_moc_loses_the_tokens_since_each_experts_turn() -> None:
    moc = plan_moc(DEEPSEEK, EQUAL, 16.0, 0.2)
    # Eight turns: the experts of the last turn lose nothing, those of the turn before one step.
    assert moc.loses(100.0, 0.0) == pytest.approx(sum(range(8)) / 8)
    assert moc.loses(100.0, 15.0) == 0.0
    only_first = (1.0,) + (0.0,) * 63
    popular = plan_moc(DEEPSEEK, only_first, 16.0, 0.2)
    assert [popular.loses(float(done), 0.0) for done in range(8, 17)] == [*range(8), 0]
