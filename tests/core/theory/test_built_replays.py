"""Replays and stores of profiled jobs, planned with the code of running ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mainstay_core.job.sizes.snapshot_sizes import max_log_steps
from mainstay_core.theory import paper_jobs
from mainstay_core.theory.built import plan_built_window
from mainstay_core.theory.built_memory import plan_built_stores
from mainstay_core.theory.built_replays import BuiltPolicy, list_replays, plan_built_policy
from mainstay_core.theory.profiles import JobProfile
from mainstay_core.theory.replay_lengths import plan_replay_length

JOBS = [*paper_jobs.TABLE_3.values(), *paper_jobs.TABLE_7.values()]
DEEPSEEK = paper_jobs.TABLE_3["DeepSeek-MoE"]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_replay_takes_its_steps_without_bubbles_less_a_third_of_what_is_frozen(
    job: JobProfile, lag: int
) -> None:
    plan = plan_built_window(job)
    policy = plan_built_policy(job, plan, lag)
    bubbles = len(job.times.stage_s[0]) - 1
    passes_s = job.step_s * job.times.num_micro_batches / (job.times.num_micro_batches + bubbles)

    assert len(policy.replays_s) == plan.window.length + lag
    for number, replay_s in enumerate(policy.replays_s):
        steps = plan.window.length + lag + number
        assert replay_s <= passes_s * steps * (1 + 1e-9)
        assert replay_s >= passes_s * (steps - (plan.window.length - 1) / 3) * (1 - 1e-9)
        # Once all units are active, one more step takes a whole one.
        assert replay_s - policy.replays_s[0] == pytest.approx(passes_s * number)


def test_a_window_of_one_step_freezes_nothing() -> None:
    job = paper_jobs.TABLE_3["GPT-MoE"]
    policy = plan_built_policy(job, plan_built_window(job), lag=0)
    passes_s = job.step_s * job.times.num_micro_batches / (job.times.num_micro_batches + 2)

    assert policy.window == 1
    assert policy.replays_s == (pytest.approx(passes_s),)


def test_updates_of_a_replay_are_counted() -> None:
    job = replace(DEEPSEEK, times=replace(DEEPSEEK.times, update_s=0.5))
    plan = plan_built_window(DEEPSEEK)
    with_updates = plan_built_policy(job, plan, lag=0).replays_s
    without = plan_built_policy(DEEPSEEK, plan, lag=0).replays_s

    assert [a - b for a, b in zip(with_updates, without, strict=True)] == pytest.approx(
        [0.5 * (plan.window.length + number) for number in range(plan.window.length)]
    )


def test_a_policy_replays_from_the_newest_complete_window() -> None:
    policy = BuiltPolicy(
        name="b", window=3, lag=1, step_stall_s=0.0, step_s=2.0, replays_s=(8.0, 10.0, 12.0, 14.0)
    )

    assert policy.replay_s(3.5) == 7.0
    assert [policy.replay_s(float(done)) for done in range(4, 13)] == [
        *(8.0, 10.0, 12.0, 14.0),
        *(8.0, 10.0, 12.0, 14.0),
        8.0,
    ]
    assert policy.replay_s(9.25) == 10.5
    assert policy.mean_replay_s == 12.0


@pytest.mark.parametrize(("length", "lag"), [(1, 0), (3, 0), (4, 2), (7, 1)])
def test_logs_are_kept_for_the_longest_replay(length: int, lag: int) -> None:
    replays = list_replays(length, lag, 5)

    assert max(replays) + 1 == max_log_steps(length, lag)
    assert max(replays) + 1 == plan_replay_length(length, lag, length + lag).most


def test_stores_keep_both_windows_of_all_who_copy_to_them() -> None:
    plan = plan_built_window(DEEPSEEK)
    stores = plan_built_stores(DEEPSEEK, plan, lag=1, peers=2)
    alone = plan_built_stores(DEEPSEEK, plan, lag=1, peers=0)

    size = sum(i.size_bytes for one in plan.assignments for i in one.instalments)

    assert len(stores) == len(alone) == DEEPSEEK.shape.num_stages
    assert sum(store.windows_bytes for store in alone) == 2 * size
    assert sum(store.windows_bytes for store in stores) == 3 * 2 * size
    border = 512 * 2048 * 2048 * 2
    assert sorted({store.logs_bytes for store in stores}) == [16 * border, 2 * 16 * border]
