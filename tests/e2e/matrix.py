"""The fault matrix: what is killed, in which phase, in which layout; and what must hold after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import Layout, local_job, make_job, run_disturbed, run_undisturbed

Expected = Callable[[Layout], tuple[Path, dict[str, Any]]]
"""Gives the corpus and the undisturbed report of a layout."""

ACTIONS = ("kill-trainer", "kill-pod")
PHASES = ("forward", "backward", "reduce", "vote", "apply")
LAYOUTS = tuple(
    Layout(stages=stages, ranks_per_pod=ranks_per_pod, shards_per_lane=shards_per_lane)
    for stages, ranks_per_pod, shards_per_lane in itertools.product((1, 2), (1, 2), (1, 4))
)
FIRST_FAULT = 6
STEPS_BETWEEN = 6


def pairwise_cases() -> list[tuple[Layout, list[tuple[str, str]]]]:
    """Return layouts with (action, phase) pairs so that every pair of values of any two of the
    five factors occurs: four layouts form an orthogonal array, each has every phase, and the
    actions alternate over phases and layouts.
    """
    layouts = [
        layout
        for layout in LAYOUTS
        if ((layout.stages == 2) + (layout.ranks_per_pod == 2) + (layout.shards_per_lane == 4)) % 2
        == 0
    ]
    return [
        (layout, [(ACTIONS[(i + j) % 2], phase) for j, phase in enumerate(PHASES)])
        for i, layout in enumerate(layouts)
    ]


def strict_cases() -> list[tuple[Layout, list[tuple[str, str]]]]:
    """Return two layouts whose trainers communicate without buffers, as by NCCL: of the two, each
    phase has one with each action.
    """
    layouts = [
        Layout(stages=2, ranks_per_pod=2, shards_per_lane=4, strict=True),
        Layout(stages=2, ranks_per_pod=1, shards_per_lane=1, strict=True),
    ]
    return [
        (layout, [(ACTIONS[(i + j) % 2], phase) for j, phase in enumerate(PHASES)])
        for i, layout in enumerate(layouts)
    ]


def faults_of(layout: Layout, kills: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return a faults file: one kill every few steps, going round the ranks."""
    places = (range(layout.lanes), range(layout.stages), range(layout.ranks_per_stage))
    ranks = list(itertools.product(*places))
    return [
        {
            "at": {"step": FIRST_FAULT + STEPS_BETWEEN * number, "phase": phase},
            # A stride that shares no factor with the ranks visits all of them.
            "target": dict(
                zip(("replica", "stage", "inner"), ranks[number * 5 % len(ranks)], strict=True)
            ),
            "action": action,
        }
        for number, (action, phase) in enumerate(kills)
    ]


def num_steps(num_faults: int) -> int:
    """Return the steps of a run that has room for so many faults, and a few after them."""
    return FIRST_FAULT + STEPS_BETWEEN * num_faults + 2


def check_disturbed_run(
    directory: Path,
    layout: Layout,
    kills: Sequence[tuple[str, str]],
    corpus: Path,
    undisturbed: dict[str, Any],
) -> None:
    """Run with faults and compare with the undisturbed run's report, step by step."""
    faults = faults_of(layout, kills)
    report = run_disturbed(directory, layout, num_steps(len(faults)), corpus, faults)
    steps, expected = report["digests"]["steps"], undisturbed["digests"]["steps"]
    assert len(steps) == num_steps(len(faults))
    # The undisturbed run may be longer: it is shared by runs with fewer faults.
    for step, (ours, theirs) in enumerate(zip(steps, expected, strict=False)):
        assert ours == theirs, f"step {step} differs"
    if len(steps) == len(expected):
        assert report["digests"]["final"] == undisturbed["digests"]["final"]
    assert report["steps"]["lost"] == 0
    recoveries = [r for r in report["recoveries"] if r["method"] not in ("start", "join")]
    assert len(recoveries) >= len(faults), report["recoveries"]
    assert all(recovery["exact"] for recovery in report["recoveries"])


def find_undisturbed(factory: pytest.TempPathFactory, steps: int) -> Expected:
    """Return what gives the corpus and the undisturbed report of a layout: each is run once."""
    corpus = write_corpus(factory.mktemp("corpus"))
    known: dict[str, dict[str, Any]] = {}

    def find(layout: Layout) -> tuple[Path, dict[str, Any]]:
        key = repr(layout.least)
        if key not in known:
            directory = factory.mktemp("undisturbed")
            known[key] = run_undisturbed(directory, layout.least, steps, corpus)
        return corpus, known[key]

    return find


def write_corpus(directory: Path) -> Path:
    """Write a small folder of text and return it."""
    for source in Path(__file__).parent.glob("*.py"):
        (directory / source.name).write_text(source.read_text())
    return directory


def check_stopped_rank(
    directory: Path, corpus: Path, layout: Layout, target: dict[str, int]
) -> dict[str, Any]:
    """Stop a rank, which only its silence tells; return the report, equal to an undisturbed one."""
    fault = {"at": {"step": 3, "phase": "backward"}, "target": target, "action": "stop"}
    for name in ("undisturbed", "disturbed"):
        (directory / name).mkdir()
    expected = run_undisturbed(directory / "undisturbed", layout.least, 8, corpus)
    job = make_job(layout, 8, corpus, detection={"heartbeatTimeoutSeconds": 3})
    with local_job(directory / "disturbed", job, [fault]) as run:
        report = run.report()
    assert report["digests"] == expected["digests"]
    assert report["steps"]["lost"] == 0
    assert "no sign of life" in report["recoveries"][0]["fault"]
    return report
