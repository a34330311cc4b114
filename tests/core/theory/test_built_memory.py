"""Memory of stores: what a play of windows and logs needs at its peak, and no less."""

from __future__ import annotations

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.job.sizes.snapshot_sizes import max_log_steps
from mainstay_core.rank.windows import is_complete
from mainstay_core.snapshots.copies import CopyDemand, StorePod, plan_copies
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.units import Position
from mainstay_core.snapshots.windows import (
    PrintedWindow,
    Window,
    generate_schedule,
    plan_instalments,
)
from mainstay_core.theory.built_memory import LogDemand, plan_stores, window_bytes
from mainstay_core.wire.votes import SnapshotStatus

MIB = 1 << 20
A, B = PodUid("a"), PodUid("b")


def two_pods() -> tuple[list[CopyDemand], list[LogDemand]]:
    demands = [
        CopyDemand(position=Position(stage=stage), pod=pod, size_bytes=3 * MIB)
        for stage, pod in enumerate((A, B))
    ]
    logs = [
        LogDemand(position=Position(stage=0), pod=A, gradient_bytes=MIB, boundary_bytes=MIB // 2),
        LogDemand(position=Position(stage=1), pod=B, gradient_bytes=2 * MIB),
    ]
    return demands, logs


def test_a_store_holds_two_windows_of_its_own_and_of_others_and_all_logs_since() -> None:
    demands, logs = two_pods()
    pods = [StorePod(pod=pod, stages=(stage,)) for stage, pod in enumerate((A, B))]
    plan = plan_copies(pods, demands, peers=1, domains=2)

    first, second = plan_stores(plan, demands, logs, length=3, lag=1)

    assert (first.pod, first.windows_bytes, first.logs_bytes) == (A, 12 * MIB, 8 * 7 * MIB // 2)
    assert (second.pod, second.windows_bytes, second.logs_bytes) == (B, 12 * MIB, 8 * 3 * MIB)
    assert (
        first.reason == "12.0 MiB for two windows of 3 steps and 28.0 MiB for the logs of 8 steps"
    )


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_logs_of_so_many_steps_are_kept_at_most_and_one_less_is_replayed(
    length: int, lag: int
) -> None:
    window = complete = None
    most_kept = most_replayed = 0
    for step in range(20 * (length + lag)):
        if window is None:
            window = Window(first=step, length=length)
        if complete is not None:
            # A rank that is lost now is needed at this version; the step's log is there already.
            most_kept = max(most_kept, step + 1 - complete.first)
            most_replayed = max(most_replayed, step - complete.first)
        copied = step + 1 if step >= window.last + lag else window.first
        if is_complete(window, step, [SnapshotStatus(logged=True, copied=copied)]):
            complete, window = window, None

    assert most_kept == max_log_steps(length, lag)
    assert most_replayed == max_log_steps(length, lag) - 1


@pytest.mark.parametrize("length", range(1, 7))
def test_frozen_copies_take_what_the_papers_table_says(length: int) -> None:
    """MoEvement, table 6: over a dense copy, frozen ones take c (W - 1) / 2 of all parameters."""
    order = [
        UnitPrice(name=f"u{number}", full_bytes=12, compute_bytes=2)
        for number in range(10 * length)
    ]

    schedule = generate_schedule(order, PrintedWindow(length=length, num_active=10))

    frozen = sum(price.compute_bytes for _, frozen in schedule for price in frozen)
    assert frozen == 2 * len(order) * (length - 1) / 2


def test_a_windows_size_is_that_of_its_instalments() -> None:
    order = [UnitPrice(name=f"u{number}", full_bytes=12, compute_bytes=2) for number in range(6)]

    assert window_bytes(plan_instalments(order, 3)) == 32 + 28 + 24


def test_what_the_plan_does_not_hold_is_named() -> None:
    demands, logs = two_pods()
    plan = plan_copies([StorePod(pod=A, stages=(0,))], demands[:1], peers=0, domains=1)

    with pytest.raises(InvalidSpecError, match="demands: names stage 1 in the pod b"):
        plan_stores(plan, demands, [], length=1)
    with pytest.raises(InvalidSpecError, match="logs: names stage 1 in the pod b"):
        plan_stores(plan, demands[:1], logs, length=1)
