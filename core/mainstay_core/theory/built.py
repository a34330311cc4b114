"""Plans windows of a profiled job with the code that plans them in a running job.

The units have their own sizes here, the cells of a stage share the copying, and the window is the
exact one of :mod:`mainstay_core.snapshots.windows`. So it may differ from MoEvement's algorithm 1,
which takes all units for equal and has one author for each state.
"""

from __future__ import annotations

from collections.abc import Mapping

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.snapshots.duties import Author
from mainstay_core.snapshots.orderings import Ordering, order_units
from mainstay_core.snapshots.prices import price_units
from mainstay_core.snapshots.schedule import PositionState, WindowPlan, plan_window
from mainstay_core.snapshots.units import Position, Unit
from mainstay_core.theory.model_units import build_units
from mainstay_core.theory.profiles import JobProfile


def plan_built_window(
    profile: JobProfile, scores: Mapping[str, int] | None = None, *, num_authors: int | None = None
) -> WindowPlan:
    """Plan the window of a job whose cells share the copying of their stage.

    The accelerators of a stage in one pipeline are one cell, on a pod of its own. Each cell copies
    as fast as its part of a pipeline does; with n cells the window is about an n-th as long.

    Args:
        profile: the job.
        scores: popularity of its experts, by the names of
            :func:`~mainstay_core.theory.model_units.build_units`; all equal if left out.
        num_authors: cells of a stage that copy; all pipelines if left out.
    """
    num_authors = num_authors or profile.shape.num_pipelines
    by_position: dict[Position, list[Unit]] = {}
    for unit in build_units(profile):
        by_position.setdefault(unit.position, []).append(unit)
    states = []
    for position, units in by_position.items():
        order = order_units(units, Ordering.POPULARITY, scores)
        states.append(
            PositionState(
                position=position,
                order=price_units(order, profile.types, with_compute=True),
                authors=build_authors(position, num_authors),
            )
        )
    return plan_window(0, states, int(profile.step_s * _cell_rate(profile)))


def step_stall_s(profile: JobProfile, plan: WindowPlan) -> float:
    """Return what a step waits for copies, in the mean over a window; 0 if all of them fit.

    Args:
        profile: the job.
        plan: its window.
    """
    waits_s = [
        max(
            one.instalments[number].size_bytes / _cell_rate(profile) - profile.step_s
            for one in plan.assignments
        )
        for number in range(plan.window.length)
    ]
    return sum(max(0.0, wait_s) for wait_s in waits_s) / plan.window.length


def build_authors(position: Position, num_authors: int) -> tuple[Author, ...]:
    """Return the cells of a position, each on a pod of its own, by pipeline."""
    return tuple(
        Author(
            slot=Slot(pod=PodUid(f"stage-{position.stage}-pipeline-{number:05}"), index=0),
            incarnation=Incarnation(f"{number:05}"),
        )
        for number in range(num_authors)
    )


def _cell_rate(profile: JobProfile) -> float:
    """Return the bytes that one cell copies in a second: a stage's part of a pipeline."""
    return profile.snapshot_bytes_per_s / profile.shape.num_stages
