"""Plans a whole window: its length for all positions, and the instalments of every author.

It puts together what the other planners of this room decide, from nothing but the members, the
prices of their units in order, and the budget of a step. Every rank computes it alike where a
window begins, so who copies what is never told. A mask, a join or a chain made anew shows in the
next window: its authors are those that live where it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import MAX_MEMBERS, Count, Longest, Sentence
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import count
from mainstay_core.snapshots.duties import Author, Duty, divide
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.units import MAX_UNITS, Position
from mainstay_core.snapshots.windows import (
    MAX_LENGTH,
    Instalment,
    UnitNames,
    Window,
    least_length,
    plan_instalments,
    plan_length,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionState:
    """The units of a position in the window's order, and the living cells that hold them."""

    position: Position
    order: Annotated[tuple[UnitPrice, ...], Longest(MAX_UNITS)]
    authors: Annotated[tuple[Author, ...], Longest(MAX_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The instalments of one author in a window."""

    position: Position
    author: Author
    order: UnitNames
    """All units of its position, in the window's order; it stands in each copy's header."""
    instalments: Annotated[tuple[Instalment, ...], Longest(MAX_LENGTH)]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The instalments in which it copies something."""
        return tuple(i.number for i in self.instalments if i.full or i.compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """A window of a job, planned where it begins."""

    window: Window
    assignments: Annotated[tuple[Assignment, ...], Longest(MAX_MEMBERS)]
    """By position and author."""
    fits: bool
    """Whether every instalment fits into its step."""
    largest_bytes: Count
    """Of the dearest instalment."""
    reason: Sentence
    """One sentence for people."""


def plan_window(
    first: int,
    positions: Sequence[PositionState],
    budget_bytes: int,
    length: int | None = None,
) -> WindowPlan:
    """Return the window that begins at a version.

    Equal arguments give equal plans, in whatever order positions and authors are listed.

    Args:
        first: version at which it begins.
        positions: all of the job.
        budget_bytes: what a rank can copy in a step (:attr:`~.measures.Pace.budget_bytes`).
        length: of the window; None is ``Auto``: the least for which every instalment fits.

    Raises:
        InvalidSpecError: a position is listed twice or has no author, or the length is out of its
            range.
    """
    ordered = sorted(positions, key=lambda state: state.position)
    if len({state.position for state in ordered}) < len(ordered):
        raise InvalidSpecError("positions", "lists a position twice")
    duties = [(state, duty) for state in ordered for duty in divide(state.order, state.authors)]
    automatic = plan_length([duty.units for _, duty in duties], budget_bytes)
    chosen = automatic.length if length is None else length
    assignments = tuple(_assign(state, duty, chosen) for state, duty in duties)
    sizes = [i.size_bytes for one in assignments for i in one.instalments]
    largest = max(sizes, default=0)
    reason = f"{automatic.reason}; {count(len(duties), 'author')}"
    if length is not None:
        reason = f"a window of {count(length, 'step')} as asked; by itself {reason}"
    return WindowPlan(
        window=Window(first=first, length=chosen),
        assignments=assignments,
        fits=largest <= budget_bytes,
        largest_bytes=largest,
        reason=reason,
    )


def choose_length(positions: Sequence[PositionState], budget_bytes: int) -> int:
    """Return the length of :func:`plan_window`'s window, without its instalments.

    It depends on all positions: with 1,000 authors only this is worth computing on each rank.

    Args:
        positions: all of the job.
        budget_bytes: what a rank can copy in a step.
    """
    duties = [duty for state in positions for duty in divide(state.order, state.authors)]
    length, _ = least_length([duty.units for duty in duties], budget_bytes)
    return length


def assign(state: PositionState, author: Author, length: int) -> Assignment:
    """Return what one author copies in a window, as :func:`plan_window` does.

    Args:
        state: its position.
        author: one of the position's.
        length: of the window.
    """
    (duty,) = (d for d in divide(state.order, state.authors) if d.author == author)
    return _assign(state, duty, length)


def _assign(state: PositionState, duty: Duty, length: int) -> Assignment:
    return Assignment(
        position=state.position,
        author=duty.author,
        order=tuple(price.name for price in state.order),
        instalments=plan_instalments(duty.units, length),
    )
