"""Runs over traces: accounts that add up, and the closed form where failures are rare."""

from __future__ import annotations

import random

import pytest

from mainstay_core.theory import paper_jobs
from mainstay_core.theory.ettr import dense_recovery_s, ettr, sparse_recovery_s
from mainstay_core.theory.policies import DensePolicy, SparsePolicy, plan_moc
from mainstay_core.theory.runs import mean_ettr, simulate_run
from mainstay_core.theory.traces import draw_poisson

DENSE = DensePolicy(name="d", interval=10, snapshot_stall_s=5.0, step_s=2.0)
SPARSE = SparsePolicy(name="s", window=4, step_stall_s=0.1, step_s=2.0, period=4)


def test_a_run_without_failures_loses_its_stalls_alone() -> None:
    run = simulate_run(DENSE, 2.0, 20.0, (), 1000.0)

    assert run.done == pytest.approx(1000 / 2.5)
    assert run.ettr == pytest.approx(0.8)
    assert (run.num_failures, run.recovery_s, run.lost) == (0, 0.0, 0.0)


def test_a_failure_costs_its_downtime_and_its_replay() -> None:
    # At 60 s 24 steps are done, 4 of them since the last snapshot: 20 s down, 8 s of replay.
    run = simulate_run(DENSE, 2.0, 20.0, (60.0,), 1000.0)

    assert run.recovery_s == pytest.approx(28.0)
    assert run.done == pytest.approx((1000 - 28) / 2.5)


def test_a_failure_in_a_recovery_begins_it_anew() -> None:
    run = simulate_run(DENSE, 2.0, 20.0, (60.0, 70.0), 1000.0)

    assert run.recovery_s == pytest.approx(10 + 28)
    assert run.done == pytest.approx((1000 - 38) / 2.5)


def test_a_recovery_that_the_runs_end_cuts_off_counts_up_to_there() -> None:
    run = simulate_run(DENSE, 2.0, 20.0, (60.0, 5000.0), 70.0)

    assert run.num_failures == 1
    assert run.recovery_s == pytest.approx(10.0)
    assert run.done == pytest.approx(24.0)


def test_every_second_of_a_run_is_accounted_for() -> None:
    rng = random.Random(4)
    job = paper_jobs.TABLE_3["DeepSeek-MoE"]
    moc = plan_moc(job, (1 / 64,) * 64, 20.0, 0.2)
    for policy in (DENSE, SPARSE, moc):
        for _ in range(100):
            horizon_s = rng.uniform(100, 40_000)
            trace = draw_poisson(rng, rng.uniform(30, 5000), horizon_s)
            run = simulate_run(policy, 2.0, rng.uniform(0, 60), trace, horizon_s)
            spent_s = run.done * 2.0 + run.stalled_s + run.recovery_s
            assert spent_s == pytest.approx(horizon_s)
            assert 0 <= run.ettr <= 1


@pytest.mark.parametrize(
    ("policy", "overhead", "replay_s"),
    [
        (DENSE, 0.25, dense_recovery_s(10, 2.0)),
        (SPARSE, 0.05, sparse_recovery_s(4, 2.0)),
    ],
)
def test_runs_converge_to_the_closed_form_as_failures_get_rare(
    policy: DensePolicy | SparsePolicy, overhead: float, replay_s: float
) -> None:
    errors = []
    for mtbf_s, allowed in ((200.0, 0.02), (2_000.0, 0.002), (20_000.0, 0.0005)):
        closed = ettr(overhead, 20.0 + replay_s, mtbf_s)
        simulated = mean_ettr(policy, 2.0, 20.0, mtbf_s, 2000 * mtbf_s, range(5))
        errors.append(abs(simulated - closed))
        assert errors[-1] < allowed
    assert errors[-1] < errors[0]
