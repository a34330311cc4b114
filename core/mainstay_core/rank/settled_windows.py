"""Says what the reports of a settle tell of windows of snapshots, for all members alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Commit, SettleReport
from mainstay_core.wire.windows import WindowBasis


def find_basis(plan: Plan, ordered: Sequence[SettleReport]) -> WindowBasis:
    """Return what a report tells of the next window: the newest; the first of equal ones."""
    told = [r.basis for r in ordered if r.valid and r.lineage == plan.lineage and r.basis]
    return max(told, key=lambda basis: basis.version, default=WindowBasis())


def list_unnoted(
    basis: WindowBasis, version: int, last: Commit | None, known: Mapping[int, Commit]
) -> tuple[Commit, ...]:
    """Return the commits that led from a basis to a version.

    Args:
        basis: of the next window.
        version: at which all go on.
        last: the commit that led to it, if it is known.
        known: others, by step.
    """
    commits = dict(known)
    if last is not None:
        commits[version - 1] = last
    return tuple(commits[step] for step in sorted(commits) if basis.version <= step < version)


def find_kept_from(
    plan: Plan,
    reports: Sequence[SettleReport],
    replays: Mapping[int, Replay | BoundaryReplay],
) -> int:
    """Return from which version on segments are needed; 0 if a replay begins before that.

    A member that missed the votes on a window's last step learns so that it is complete. What a
    returning member has completed may be of steps that the others have given up since, and so may
    what one has completed that was a member all along and has not settled with them.
    """
    complete = max((r.kept_from for r in _settled_last(_list_stayed(plan, reports))), default=0)
    return complete if all(r.first_step >= complete for r in replays.values()) else 0


def is_outdated(plan: Plan, reports: Sequence[SettleReport], index: int) -> bool:
    """Return whether what a member knows of complete windows may be of steps that were given up.

    Who has stayed knows better than who was away, and of these who has settled last.
    """
    known = _settled_last(_list_stayed(plan, reports) or _list_counting(plan, reports))
    return bool(known) and index not in {report.index for report in known}


def _list_counting(plan: Plan, reports: Sequence[SettleReport]) -> list[SettleReport]:
    return [r for r in reports if r.valid and r.lineage == plan.lineage]


def _list_stayed(plan: Plan, reports: Sequence[SettleReport]) -> list[SettleReport]:
    counting = _list_counting(plan, reports)
    return [r for r in counting if r.settled >= plan.members[r.index].since]


def _settled_last(reports: Sequence[SettleReport]) -> list[SettleReport]:
    """Return the reports of those that settled last: they know what the others had told by then."""
    last = max((r.settled for r in reports), default=0)
    return [r for r in reports if r.settled == last]
