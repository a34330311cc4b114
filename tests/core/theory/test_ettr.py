"""ETTR in closed form, and the intervals that follow from it."""

from __future__ import annotations

import random

import pytest

from mainstay_core.theory.ettr import (
    dense_recovery_s,
    ettr,
    plan_capped_interval,
    plan_interval,
    run_ettr,
    sparse_recovery_s,
)


def test_without_stalls_and_failures_all_time_trains() -> None:
    assert ettr(0.0, 0.0, 600.0) == 1.0
    assert ettr(0.25, 0.0, 600.0) == 0.8
    assert ettr(0.0, 150.0, 600.0) == 0.8


def test_expected_replays_are_half_an_interval_and_one_and_a_half_windows() -> None:
    assert dense_recovery_s(31, 2.9) == pytest.approx(44.95)
    assert dense_recovery_s(31, 2.9, 2.0) == pytest.approx(89.9)
    assert sparse_recovery_s(6, 2.9) == pytest.approx(26.1)


def test_the_share_of_a_run_and_the_closed_form_differ_by_the_square_of_the_recoveries_share() -> (
    None
):
    for share in (0.01, 0.02, 0.04):
        difference = ettr(0.1, share * 600, 600.0) - run_ettr(0.1, share * 43200, 43200)
        assert difference == pytest.approx(share**2 / 1.1, rel=0.05)


def ettr_of(
    interval: int, stall_s: float, step_s: float, mtbf_s: float, down_s: float, k: float
) -> float:
    recovery_s = down_s + dense_recovery_s(interval, step_s, k)
    return ettr(stall_s / (interval * step_s), recovery_s, mtbf_s)


def test_the_oracles_interval_is_the_best_of_all() -> None:
    rng = random.Random(5)
    for _ in range(200):
        stall_s, step_s = rng.uniform(0, 20), rng.uniform(0.5, 10)
        mtbf_s, down_s, k = rng.uniform(60, 20_000), rng.uniform(0, 300), rng.uniform(0.5, 5)
        best = max(
            ettr_of(interval, stall_s, step_s, mtbf_s, down_s, k) for interval in range(1, 3000)
        )
        interval = plan_interval(stall_s, step_s, mtbf_s, down_s, k)
        assert ettr_of(interval, stall_s, step_s, mtbf_s, down_s, k) == pytest.approx(
            best, abs=1e-12
        )


def test_snapshots_that_cost_nothing_are_taken_in_every_step() -> None:
    assert plan_interval(0.0, 2.0, 600.0, 20.0) == 1


def test_rollbacks_that_cost_nothing_want_no_snapshot_more_often_than_ever_asked() -> None:
    assert plan_interval(5.0, 2.0, 600.0, 20.0, rollback_factor=1e-9) > 1_000_000


@pytest.mark.parametrize(
    ("stall_s", "step_s", "cap", "interval"),
    [(0.0, 2.0, 0.03, 1), (6.0, 2.0, 0.03, 100), (6.01, 2.0, 0.03, 101)],
)
def test_a_cap_on_stalls_asks_for_the_shortest_interval_within_it(
    stall_s: float, step_s: float, cap: float, interval: int
) -> None:
    assert plan_capped_interval(stall_s, step_s, cap) == interval
