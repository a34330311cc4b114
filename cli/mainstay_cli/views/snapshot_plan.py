"""Shows forecasts of snapshot policies, and comparisons with the paper, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.base.words import count, show_bytes
from mainstay_core.snapshots.schedule import WindowPlan
from mainstay_core.theory.built_memory import StoreNeed
from mainstay_core.theory.comparison import Comparison, Section
from mainstay_core.theory.forecasts import Forecast, Needs
from mainstay_core.theory.profiles import JobProfile


def describe_job(profile: JobProfile, needs: Needs) -> list[str]:
    """Return what a profile comes to, and what its snapshots take in host memory."""
    shape, model = profile.shape, profile.model
    return [
        (
            f"{profile.name}: {model.num_params / 1e9:.1f} billion parameters on "
            f"{count(shape.num_accelerators, 'accelerator')} ({count(shape.num_stages, 'stage')} x "
            f"{count(shape.num_pipelines, 'pipeline')} x {shape.expert_ways}), a step takes "
            f"{profile.step_s:.2f} s"
        ),
        (
            f"  algorithm 1: a window of {count(needs.window, 'step')}, {needs.num_active} of "
            f"{count(needs.num_units, 'unit')} in full at a time; its largest snapshot has "
            f"{show_bytes(round(needs.first_bytes))}, a dense one "
            f"{show_bytes(round(needs.dense_bytes))}"
        ),
        (
            f"  host memory, all pods together: copies {show_bytes(round(needs.copies_bytes))}, "
            f"logs of {count(needs.log_steps, 'step')} {show_bytes(round(needs.log_bytes))}"
        ),
    ]


def describe_built(window: WindowPlan, stores: Sequence[StoreNeed]) -> list[str]:
    """Return what snapshots as they are built come to, and what the largest store needs."""
    largest = max(stores, key=lambda store: (store.size_bytes, store.pod))
    return [
        f"  as built: {window.reason}",
        f"  host memory of the largest store: {largest.reason}",
    ]


def describe_forecasts(forecasts: Sequence[Forecast]) -> list[str]:
    """Return the lines of a table with one policy to a line."""
    rows = [["policy", "steps", "stall s", "recovery s", "ETTR", "simulated", "steps lost"]]
    rows += [
        [
            forecast.policy,
            str(forecast.interval),
            f"{forecast.stall_s:.3f}",
            f"{forecast.recovery_s:.1f}",
            "" if forecast.closed_ettr is None else f"{forecast.closed_ettr:.3f}",
            f"{forecast.ettr:.3f}",
            f"{forecast.lost_steps:.1f}" if forecast.lost_steps else "",
        ]
        for forecast in forecasts
    ]
    return [f"  {line}" for line in _align(rows)]


def describe_section(section: Section) -> list[str]:
    """Return the lines of a section: its title, its numbers, and what is to be said of them."""
    rows = [["", "paper", "ours", "off by", "allowed", ""]]
    rows += [_row(comparison) for comparison in section.rows]
    lines = [section.title, *(f"  {line}" for line in _align(rows))]
    return [*lines, *(f"  {note}" for note in section.notes), ""]


def _row(comparison: Comparison) -> list[str]:
    def show(value: float, sign: str = "") -> str:
        return f"{value:{sign}.{comparison.digits}f}"

    printed, allowed = comparison.printed, comparison.allowed
    least = ">= " if comparison.is_least else ""
    note = comparison.note if comparison.holds else f"TOO FAR OFF {comparison.note}"
    return [
        comparison.what,
        "" if printed is None else f"{least}{show(printed)}",
        show(comparison.ours),
        "" if printed is None else show(comparison.deviation, "+"),
        "" if allowed is None else show(allowed),
        note,
    ]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the first and the last column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        if row is rows[0] or not _is_number(row[-1]):
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit()
