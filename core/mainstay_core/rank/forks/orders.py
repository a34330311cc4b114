"""Decides what a plan's order of a fork makes anew, and when an exact state is loaded instead."""

from __future__ import annotations

from collections.abc import Collection

from mainstay_core.rank.forks.histories import places_of
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import History


def positions_to_make(plan: Plan, lost: Collection[int]) -> frozenset[int]:
    """Return the positions that a plan orders to make anew, of those that nobody holds."""
    return plan.fork.made_with(lost, plan.ranks_per_stage) if plan.fork else frozenset()


def is_made(plan: Plan, history: History, version: int) -> bool:
    """Return whether some of what a plan orders was made at this version under a plan before it.

    Its quorum was interrupted before all had settled, and the order is repeated: nothing is left to
    make, and all go on from a fork nonetheless. What else was lost meanwhile somebody may hold.

    Args:
        plan: which may order one.
        history: of the state with which this rank goes on.
        version: at which all go on.
    """
    if plan.fork is None or not history or history[-1].version != version:
        return False
    ordered = {divmod(position, plan.ranks_per_stage) for position in plan.fork.positions}
    return not ordered.isdisjoint(places_of(history[-1]))


def goes_back(plan: Plan, rules: ForkRules | None, version: int, durable: int) -> bool:
    """Return whether an exact state is loaded, though the plan orders a fork.

    The coordinator orders forks by what it has been told, and the newest checkpoint may have become
    durable just before the fault. The trainers see the disk. At a version that is kept there, or
    can be made from the seed, nothing would be lost without a fork. A fork that is made again is
    made at its own version, and at no other.

    Args:
        plan: that orders it.
        rules: of the job.
        version: at which it would be forked.
        durable: newest version on the disk; 0: the seed's initial state, of which nobody has to be
            told.
    """
    if plan.fork is not None and plan.fork.repeats is not None:
        return version != plan.fork.repeats.version
    if rules is None:
        return False
    if version <= durable:
        return True
    if not durable:
        return False
    return rules.after_lost_steps is None or version - durable <= rules.after_lost_steps
