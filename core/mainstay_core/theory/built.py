"""Plans sparse snapshots of a profiled job with the code that plans them in a running job.

The units have their own sizes here, the cells of a stage share the copying, and the window is the
exact one of :mod:`mainstay_core.snapshots.windows`. So it may differ from MoEvement's algorithm 1,
which takes all units for equal and has one author for each state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.snapshots.duties import Author, Duty, divide
from mainstay_core.snapshots.orderings import Ordering, Score, order_units
from mainstay_core.snapshots.prices import price_units
from mainstay_core.snapshots.units import Position, Unit
from mainstay_core.snapshots.windows import Instalment, plan_instalments, plan_length
from mainstay_core.theory.model_units import build_units
from mainstay_core.theory.profiles import JobProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAuthor:
    """The copies that one cell makes in a window.

    Attributes:
        author: its name.
        position: whose state it is.
        instalments: one for each step of the window.
    """

    author: Author
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
    duties: list[tuple[Position, Duty]] = []
    for position, units in _by_position(build_units(profile)).items():
        order = order_units(units, Ordering.POPULARITY, scores)
        prices = price_units(order, profile.types, with_compute=True)
        authors = build_authors(position, num_authors)
        duties += [(position, duty) for duty in divide(prices, authors)]
    rate = profile.snapshot_bytes_per_s / profile.shape.num_stages
    budget_bytes = int(profile.step_s * rate)
    plan = plan_length([duty.units for _, duty in duties], budget_bytes)
    built = tuple(
        BuiltAuthor(
            author=duty.author,
            position=position,
            instalments=plan_instalments(duty.units, plan.length),
        )
        for position, duty in duties
    )
    waits_s = [
        max(0.0, max(a.instalments[number].size_bytes for a in built) / rate - profile.step_s)
        for number in range(plan.length)
    ]
    return BuiltWindow(
        length=plan.length,
        fits=plan.fits,
        step_stall_s=sum(waits_s) / plan.length,
        authors=built,
        reason=plan.reason,
    )


def _by_position(units: Sequence[Unit]) -> dict[Position, list[Unit]]:
    found: dict[Position, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.position, []).append(unit)
    return found


def build_authors(position: Position, num_authors: int) -> list[Author]:
    """Return the cells of a position, each on a pod of its own, by pipeline."""
    return [
        Author(
            slot=Slot(pod=PodUid(f"stage-{position.stage}-pipeline-{number:05}"), index=0),
            incarnation=Incarnation(f"{number:05}"),
        )
        for number in range(num_authors)
    ]
