"""Decides whose states are of the course on which a quorum goes on, by the forks in them.

Lineages are counted. A store that fell back counts on from where it was, so two lineages that began
apart may have one number: one of a plan that the store has forgotten, and one of a plan that
followed from an older one. An old pod with the true state of a stage that was made anew meanwhile
may come back under such a number. What forks its state contains tells it from the others' states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mainstay_core.rank.forks.histories import history_at
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import History, MadePosition
from mainstay_core.wire.votes import SettleReport


def of_one_course(
    plan: Plan, reports: Sequence[SettleReport]
) -> tuple[list[SettleReport], frozenset[int]]:
    """Return reports in which a state of another course than the quorum's does not count.

    The course is that of the members that stayed, and of these of one that settled last: it has met
    with all others since. A state follows from the forks below its version, and if the course made
    its position anew at its very version, or at the next to which it may roll, from that fork: what
    has the position without it is what was given up as lost. Of forks of other positions there it
    need not know.

    Args:
        plan: the quorum's.
        reports: of all members, by index.

    Returns:
        The reports; and the indices of the members whose states do not count.
    """
    told = [r for r in reports if r.valid and r.lineage == plan.lineage]
    if not any(r.history for r in told):
        return list(reports), frozenset()
    newest = max(told, key=lambda r: (_has_stayed(plan, r), r.settled, len(r.history), -r.index))
    others = frozenset(r.index for r in told if not _is_of(plan, r, newest.history))
    counted = [replace(r, valid=False) if r.index in others else r for r in reports]
    return counted, others


def name_refused(plan: Plan, others: Collection[int]) -> str:
    """Return whose states do not count, as the end of a sentence; empty for nobody's."""
    if not others:
        return ""
    members = [plan.members[index] for index in sorted(others)]
    names = ", ".join(f"{m.slot} (stage {m.rank.stage})" for m in members)
    return f"; of another course, so that it does not count, is the state of {names}"


def _has_stayed(plan: Plan, report: SettleReport) -> bool:
    return report.settled >= plan.members[report.index].since


def _is_of(plan: Plan, report: SettleReport, history: History) -> bool:
    # A fork names the commit chain before it, so the last one tells of all that came before.
    mine, theirs = (history_at(h, report.version - 1)[-1:] for h in (report.history, history))
    if mine != theirs:
        return False
    place = plan.members[report.index].rank.position
    # A member with the mark of one more step would roll to the next version as it was.
    for version in (report.version, report.version + 1):
        own, others = (_made(h, version, place) for h in (report.history, history))
        if others is not None and own != others:
            return False
    return True


def _made(history: History, version: int, place: tuple[int, int]) -> MadePosition | None:
    """Return how a position was made anew last at a version; None if it was not."""
    made = [
        position
        for fork in history
        if fork.version == version
        for position in fork.made.positions
        if (position.stage, position.inner) == place
    ]
    return made[-1] if made else None
