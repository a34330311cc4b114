"""Decides when a fork of another run is due, who makes it again, and whose state is from before it.

A job that repeats a lineage loses nothing: at a fork's version its makers give up what they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.votes import SettleReport


def find_due(repeats: History, history: History, version: int) -> int | None:
    """Return the number of the fork that comes next before a step is computed; None: none does.

    Args:
        repeats: the forks that the job makes again.
        history: of the state.
        version: of the state.
    """
    number = len(history)
    is_next = number < len(repeats) and history == repeats[:number]
    return number if is_next and repeats[number].version == version else None


def positions_to_repeat(plan: Plan, version: int, history: History) -> frozenset[int]:
    """Return the positions that are made anew though members hold them: a fork is made again.

    Args:
        plan: which may order that.
        version: at which all go on.
        history: of the states there.
    """
    fork = plan.fork.repeats if plan.fork is not None else None
    if plan.fork is None or fork is None or fork.version != version or fork in history:
        return frozenset()
    return frozenset(plan.fork.positions)


def without_unmade(plan: Plan, reports: Sequence[SettleReport]) -> list[SettleReport]:
    """Return reports in which a state that is to be made anew does not count once others have it.

    A member may miss the meeting in which a fork of another run is made again. It has the state of
    before then, of the same version, and would pass for one that has made it.

    Args:
        plan: which may order to make a fork again.
        reports: of all members, by index.
    """
    fork = plan.fork.repeats if plan.fork is not None else None
    if plan.fork is None or fork is None:
        return list(reports)
    told = [r for r in reports if r.valid and r.lineage == plan.lineage]
    if not any(r.version == fork.version and fork in r.history for r in told):
        return list(reports)
    unmade = {
        r.index
        for r in told
        if plan.position_of(r.index) in plan.fork.positions
        and r.version <= fork.version
        and fork not in r.history
    }
    return [replace(r, valid=False) if r.index in unmade else r for r in reports]
