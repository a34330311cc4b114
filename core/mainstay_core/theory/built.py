"""Plans sparse snapshots of a profiled job with the code that plans them in a running job.

The units have their own sizes here, the cells of a stage share the copying, and the window is the
exact one of :mod:`mainstay_core.snapshots.windows`. So it may differ from MoEvement's algorithm 1,
which takes all units for equal and has one author for each state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.snapshots.duties import Author, divide
from mainstay_core.snapshots.orderings import Ordering, Score, order_units
from mainstay_core.snapshots.prices import UnitPrice, price_units
from mainstay_core.snapshots.retention import (
    Retention,
    WindowStatus,
    after_commit,
    begin_window,
)
from mainstay_core.snapshots.units import Position, Unit
from mainstay_core.snapshots.windows import Instalment, Window, plan_instalments, plan_length
from mainstay_core.theory.model_units import build_units
from mainstay_core.theory.profiles import JobProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAuthor:
    """The copies that one cell makes in a window.

    Attributes:
        position: whose state it is.
        instalments: one for each step of the window.
    """

    position: Position
    instalments: tuple[Instalment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltWindow:
    """A window of a whole job.

    Attributes:
        length: steps, the same for all authors.
        fits: whether each instalment leaves within a step.
        step_stall_s: what the dearest instalment leaves of a step to wait for, in the mean over
            the window; 0 if all fit.
        authors: by position, then by cell.
        reason: one sentence for people.
    """

    length: int
    fits: bool
    step_stall_s: float
    authors: tuple[BuiltAuthor, ...]
    reason: str

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all instalments of the window together."""
        return sum(i.size_bytes for author in self.authors for i in author.instalments)


def plan_built_window(
    profile: JobProfile, scores: Sequence[Score] = (), *, num_authors: int | None = None
) -> BuiltWindow:
    """Plan the window of a job whose cells share the copying of their stage.

    The accelerators of a stage in one pipeline are one cell. Each cell copies as fast as its part
    of a pipeline does, ``snapshot_bytes_per_s`` over the stages; with n cells the window is about
    an n-th as long.

    Args:
        profile: the job.
        scores: popularity of its experts, by the names of
            :func:`~mainstay_core.theory.model_units.build_units`; all equal if left out.
        num_authors: cells of a stage that copy; all pipelines if left out.
    """
    num_authors = num_authors or profile.shape.num_pipelines
    shares: list[tuple[Position, tuple[UnitPrice, ...]]] = []
    for position, units in _by_position(build_units(profile)).items():
        order = order_units(units, Ordering.POPULARITY, scores)
        prices = price_units(order, profile.types, with_compute=True)
        duties = divide(prices, _authors(position, num_authors))
        shares += [(position, duty.units) for duty in duties]
    rate = profile.snapshot_bytes_per_s / profile.shape.num_stages
    budget_bytes = int(profile.step_s * rate)
    plan = plan_length([units for _, units in shares], budget_bytes)
    authors = tuple(
        BuiltAuthor(position=position, instalments=plan_instalments(units, plan.length))
        for position, units in shares
    )
    waits_s = [
        max(0.0, max(a.instalments[number].size_bytes for a in authors) / rate - profile.step_s)
        for number in range(plan.length)
    ]
    return BuiltWindow(
        length=plan.length,
        fits=plan.fits,
        step_stall_s=sum(waits_s) / plan.length,
        authors=authors,
        reason=plan.reason,
    )


def _by_position(units: Sequence[Unit]) -> dict[Position, list[Unit]]:
    found: dict[Position, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.position, []).append(unit)
    return found


def _authors(position: Position, num_authors: int) -> list[Author]:
    """Return authors with names that sort by pipeline."""
    return [
        Author(
            slot=Slot(pod=PodUid(f"stage-{position.stage}-pipeline-{number:05}"), index=0),
            incarnation=Incarnation(f"{number:05}"),
        )
        for number in range(num_authors)
    ]


def list_replays(length: int, lag: int, num_windows: int) -> tuple[int, ...]:
    """Return the steps of a replay for each version at which a failure may strike.

    The windows are those of a running job: the next one begins when the one before is complete,
    and it is complete once all its copies have arrived and votes have said so. A replay computes
    every step since the first version of the newest complete window.

    Args:
        length: of each window, W.
        lag: steps from the end of a window until the vote that says that its copies have arrived.
        num_windows: windows over which versions are listed, from the first complete one on.
    """
    author = _authors(Position(stage=0), 1)[0]
    retention = Retention()
    replays: list[int] = []
    for version in itertools.count():
        if retention.complete is not None:
            if version >= (length + lag) * (num_windows + 1):
                break
            replays.append(version - retention.complete.first)
        if retention.open is None:
            window = Window(first=version, length=length)
            retention = begin_window(retention, window, [author])
        assert retention.open is not None, "a window was begun"
        window = retention.open.window
        covered = (window.first,) if version >= window.last + lag else ()
        retention, _ = after_commit(retention, version, {author: WindowStatus(covered=covered)})
    return tuple(replays)
