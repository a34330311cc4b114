"""Compares sparse snapshots as they are built with those of the MoEvement paper."""

from __future__ import annotations

from mainstay_core.theory import paper_jobs, paper_tables
from mainstay_core.theory.built import plan_built_window
from mainstay_core.theory.built_replays import list_replays, plan_built_policy
from mainstay_core.theory.comparison import Comparison, Section
from mainstay_core.theory.ettr import sparse_recovery_s
from mainstay_core.theory.replay_lengths import plan_replay_length

MTBF_10_MIN_S = 600.0
NUM_WINDOWS = 20
"""Windows over which replays are averaged; they are all alike."""


def compare_built() -> Section:
    """List windows and replays of tables 3 and 7 as the code of a running job plans them."""
    rows = []
    windows = {row.job: row.sparse.interval for row in paper_tables.TABLE_3}
    windows |= {row.job: row.sparse.interval for row in paper_tables.TABLE_7}
    for job in (*paper_jobs.TABLE_3.values(), *paper_jobs.TABLE_7.values()):
        for num_authors in sorted({1, job.shape.num_pipelines}):
            plan = plan_built_window(job, num_authors=num_authors)
            rows.append(
                Comparison(
                    what=f"{job.name}: W, authors of a stage {num_authors}",
                    printed=windows[job.name],
                    ours=plan.window.length,
                    digits=0,
                    note=plan.reason,
                )
            )
    for row in paper_tables.TABLE_3:
        if row.mtbf_s == MTBF_10_MIN_S:
            job = paper_jobs.TABLE_3[row.job]
            policy = plan_built_policy(job, plan_built_window(job), lag=0)
            formula_s = sparse_recovery_s(row.sparse.interval, job.step_s)
            rows.append(
                Comparison(
                    what=f"{job.name}: replay of a lost stage, s",
                    printed=row.sparse.recovery_s * row.mtbf_s / paper_jobs.RUN_S,
                    ours=policy.mean_replay_s,
                    digits=1,
                    note=f"{formula_s:.1f} by the formula",
                )
            )
    notes = (
        (
            "Units have their own sizes: the rest of a layer is larger than any expert, and each "
            "stage plans for itself, so one author can need a longer window than algorithm 1. With "
            "the cells of a stage sharing the copying it is shorter."
        ),
        (
            "A replay by boundary logs has no bubbles and spares the weight gradients of frozen "
            "units. Half of the interrupted step is added. Here copies arrive without delay."
        ),
    )
    return Section(title="Windows and replays as they are built", rows=tuple(rows), notes=notes)


def compare_replay_lengths() -> Section:
    """List the length of replays by window and lag, of windows as they are built."""
    rows = []
    for window in (1, 2, 3, 4, 5, 6, 8):
        for lag in (0, 1, 2, 4):
            replays = list_replays(window, lag, NUM_WINDOWS)
            planned = plan_replay_length(window, lag, window + lag)
            rows.append(
                Comparison(
                    what=f"W = {window}, lag {lag}: mean steps",
                    printed=None if lag else 1.5 * window,
                    ours=sum(replays) / len(replays) + 0.5,
                    allowed=None if lag else 0,
                    digits=1,
                    note=f"{planned.least:g} to {planned.most:g}, mean planned {planned.mean:g}",
                )
            )
    notes = (
        (
            "The lag is the time from a window's end until all know that its copies have arrived. "
            "The next window begins then, so that stores hold two at most: 3/2 (W + lag)."
        ),
        f"Ours is counted over {NUM_WINDOWS} windows, with half of the step that was interrupted.",
    )
    return Section(title="Length of a replay, in steps", rows=tuple(rows), notes=notes)
