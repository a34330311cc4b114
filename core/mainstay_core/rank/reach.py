"""Computes which versions the positions of a quorum can reach, from what its members report.

A rank reaches its own version, and the next one if it holds the mark of a step that some report
shows to be certified (protocol section 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mainstay_core.rank.forks.orders import positions_to_make
from mainstay_core.rank.replays.boundary_stores import AnyStores
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import SettleReport


def certificates_of(reports: Iterable[SettleReport], lineage: int) -> set[tuple[int, str]]:
    """Return the steps that are certified, each with its quorum as text."""
    return {
        (r.version - 1, r.certified_in)
        for r in reports
        if r.valid and r.lineage == lineage and r.version > 0 and r.certified_in is not None
    }


def reach(report: SettleReport, lineage: int, certificates: set[tuple[int, str]]) -> frozenset[int]:
    """Return the versions that a member reaches; none if its state does not count."""
    if not report.valid or report.lineage != lineage:
        return frozenset()
    if report.mark is not None and (report.version, report.mark) in certificates:
        return frozenset({report.version, report.version + 1})
    return frozenset({report.version})


def reached_by_members(plan: Plan, reports: Sequence[SettleReport]) -> list[set[int]]:
    """Return by position the versions that its members among those who report reach."""
    certificates = certificates_of(reports, plan.lineage)
    found: list[set[int]] = [set() for _ in plan.positions]
    for report in reports:
        found[plan.position_of(report.index)] |= reach(report, plan.lineage, certificates)
    return found


def lost_positions(plan: Plan, reports: Sequence[SettleReport]) -> frozenset[int]:
    """Return the positions of which no report holds a state."""
    reached = reached_by_members(plan, reports)
    return frozenset(position for position, versions in enumerate(reached) if not versions)


def newest(
    plan: Plan, reports: Sequence[SettleReport], stores: AnyStores | None = None
) -> int | None:
    """Return the newest version that every position can reach from ``reports``, if any.

    A position of which no report holds a state reaches what ``stores`` can make anew. One that the
    plan orders to make of others reaches every version.
    """
    reached = reached_by_members(plan, reports)
    lost = lost_positions(plan, reports)
    if stores is not None:
        for position in lost:
            reached[position] |= stores.reach(position, lost)
    made = positions_to_make(plan, lost)
    held = [versions for position, versions in enumerate(reached) if position not in made]
    common: set[int] = set.intersection(*held) if held else set()
    if stores is not None and common and lost:
        # Whoever goes on needs the last commit: the next one continues its totals. And it needs the
        # history of forks, which no store has.
        told = {r.version for r in reports if r.valid and r.lineage == plan.lineage} | {0}
        known = {step + 1 for step, record in stores.records.items() if not record.forks}
        common &= told | known
    return max(common) if common else None
