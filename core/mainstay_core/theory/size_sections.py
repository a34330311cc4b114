"""Compares bytes, windows and skewness with the MoEvement paper: figure 6, table 6, appendix D."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.snapshots.windows import PrintedWindow, generate_schedule
from mainstay_core.theory import paper_jobs, paper_tables
from mainstay_core.theory.comparison import Comparison, Section
from mainstay_core.theory.model_units import find_printed_window
from mainstay_core.theory.popularity import plan_alpha
from mainstay_core.theory.profiles import JobProfile
from mainstay_core.theory.sizes import (
    frozen_bytes_per_param,
    gemini_bytes_per_param,
    instalment_bytes,
    log_bytes,
)

FIGURE_6_UNITS = ("E1", "E2", "E3", "E4", "NE", "G")
PRINTED_WINDOWS_TABLE_7 = (3, 6, 4, 3, 3)
PRINTED_ALPHAS = {0.25: (0.0469, 4), 0.50: (0.0156, 4), 0.75: (0.0052, 4), 0.99: (0.000158, 6)}
"""By skewness: the printed parameter, and its digits behind the point (appendix D)."""
GB = 1e9


def compare_figure_6() -> Section:
    """Compare the snapshots of six equal units in a window of 3."""
    types = paper_jobs.FP16_FP32
    schedule = generate_schedule(FIGURE_6_UNITS, PrintedWindow(length=3, num_active=2))
    dense = instalment_bytes(types, len(FIGURE_6_UNITS), 0)
    rows = [Comparison(what="dense snapshot, bytes", printed=72, ours=dense, allowed=0, digits=0)]
    sizes = [instalment_bytes(types, len(active), len(frozen)) for active, frozen in schedule]
    rows += [
        Comparison(
            what=f"instalment {number + 1}, bytes", printed=printed, ours=ours, allowed=0, digits=0
        )
        for number, (printed, ours) in enumerate(zip((32, 28, 24), sizes, strict=True))
    ]
    below = 100 * (1 - sizes[0] / dense)
    rows.append(
        Comparison(
            what="first instalment below dense, %", printed=55, ours=below, allowed=1, digits=1
        )
    )
    return Section(title="Figure 6: a window of 3 over six equal units", rows=tuple(rows))


def compare_alphas() -> Section:
    """Compare the Dirichlet parameters of appendix D."""
    num_experts = paper_jobs.MODELS["DeepSeek-MoE"].num_experts
    rows = tuple(
        Comparison(
            what=f"alpha for skewness {skewness}",
            printed=printed,
            ours=plan_alpha(skewness, num_experts),
            allowed=0.5 * 10**-digits,
            digits=digits + 2,
        )
        for skewness, (printed, digits) in PRINTED_ALPHAS.items()
    )
    return Section(title=f"Appendix D: skewness of {num_experts} experts", rows=rows)


def compare_windows() -> Section:
    """Compare algorithm 1's windows with tables 3 and 7."""
    rows = []
    for job, printed in zip(paper_jobs.TABLE_7.values(), PRINTED_WINDOWS_TABLE_7, strict=True):
        ours = find_printed_window(job).length
        rows.append(
            Comparison(
                what=f"table 7, {job.name}",
                printed=printed,
                ours=ours,
                allowed=0 if ours == printed else None,
                digits=0,
                note="" if ours == printed else "no rate gives all five, see below",
            )
        )
    windows = {row.job: row.sparse.interval for row in paper_tables.TABLE_3}
    rows += [
        Comparison(
            what=f"table 3, {job.name}, {job.snapshot_bytes_per_s / GB:g} GB/s",
            printed=windows[job.name],
            ours=find_printed_window(job).length,
            allowed=0,
            digits=0,
        )
        for job in paper_jobs.TABLE_3.values()
    ]
    least, most = bound_rates(paper_jobs.TABLE_7["FP8/FP16/FP32+FP32"], 4)
    other_least, other_most = bound_rates(paper_jobs.TABLE_7["FP8/FP32/FP32+FP32"], 6)
    notes = (
        (
            f"Table 7 with one rate of {paper_jobs.TABLE_7_RATE_PER_PARAM} B per parameter and "
            f"second. FP8/FP16/FP32+FP32 has a window of 4 from {least:.2f} to {most:.2f} of "
            f"these, FP8/FP32/FP32+FP32 one of 6 from {other_least:.2f} to {other_most:.2f}."
        ),
        (
            "Table 3 with a rate for each model, as none is printed. 21 GB/s for all four gives 1, "
            "3, 6 and 6."
        ),
    )
    return Section(title="Algorithm 1: windows", rows=tuple(rows), notes=notes)


def bound_rates(job: JobProfile, window: int) -> tuple[float, float]:
    """Return between which rates algorithm 1 gives a window to a job.

    Args:
        job: its own rate does not count.
        window: above 1, and one that some rate gives.

    Returns:
        Bytes per parameter and second: the least rate, and that from which it is shorter.
    """
    return _least_rate(job, window), _least_rate(job, window - 1)


def _least_rate(job: JobProfile, window: int) -> float:
    """Return the least rate at which a window is no longer than this."""
    low, high = 0.0, job.types.full_bytes / job.step_s
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        trial = replace(job, snapshot_bytes_per_s=middle * job.model.num_params)
        if find_printed_window(trial).length <= window:
            high = middle
        else:
            low = middle
    return high


def compare_memory() -> Section:
    """Compare the host memory of table 6."""
    rows = []
    for row in paper_tables.TABLE_6:
        job = paper_jobs.TABLE_3[row.job]
        params = job.model.num_params / GB
        rows.append(
            Comparison(
                what=f"{row.job}: Gemini, B per parameter",
                printed=row.gemini / params,
                ours=gemini_bytes_per_param(job.types),
                allowed=0.05,
                digits=2,
            )
        )
        window = find_printed_window(job)
        most = frozen_bytes_per_param(job.types, 1 / window.length, window.length)
        share = window.num_active / job.model.num_units
        least = frozen_bytes_per_param(job.types, share, window.length)
        printed = (row.snapshots - row.gemini) / params
        rows.append(
            Comparison(
                what=f"{row.job}: frozen copies, c (W - 1) / 2 with W = {window.length}",
                printed=printed,
                ours=most,
                allowed=0.15 if window.length < 5 else None,
                digits=2,
                note=f"{least:.1f} with algorithm 1's {window.num_active} active units of "
                f"{job.model.num_units}",
            )
        )
    rows.append(_compare_log())
    notes = (
        (
            "c (W - 1) / 2 holds where the window divides the units evenly. Algorithm 1 rounds W "
            "up: its last instalment may hold few units, and then less is frozen, down to nearly "
            "c (W - 2) / 2. This covers QWen-MoE's 3.4 (3 to 4 with W = 5). DeepSeek-MoE's 3.2 is "
            "below what W = 6 can have (4 to 5); a window of 5 has it."
        ),
        (
            "Memory is planned from the job: batch, sequence, width and window, never as a share "
            "of what a host has."
        ),
    )
    return Section(title="Table 6: host memory", rows=tuple(rows), notes=notes)


def _compare_log() -> Comparison:
    row = paper_tables.TABLE_6[-1]
    job = paper_jobs.TABLE_3[row.job]
    num_steps = 2 * find_printed_window(job).length - 1
    ours = log_bytes(job.shape, job.types, num_steps) / GB
    return Comparison(
        what=f"{row.job}: log of {num_steps} steps, GB",
        printed=row.log,
        ours=ours,
        digits=1,
        note=f"{ours / row.log:.0f} times the printed one: batch x sequence x width "
        f"{job.shape.width} x {job.types.compute_bytes} B, both ways, over "
        f"{job.shape.num_stages - 1} borders",
    )
