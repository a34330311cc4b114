"""The check whether what a plan orders to be made anew has sources when the quorum settles.

The coordinator orders a fork by the commits and checkpoints of which it has been told. The newest
commit may have died with those who had to tell it. Then all go on at a newer version than it knew,
at which a stale copy may be too old.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.reinitialisation.guards import ends_of, guarded_blocks
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Position,
    plan_reinitialisation,
    policy_of,
    with_stale,
)
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Fork, History


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Copies of lost positions that are left, and the course of the states beside them."""

    durable: int
    """Newest version on the disk."""
    histories: Collection[History]
    """Those of the states at the version at which all go on, of several courses if these met."""
    guarded: Collection[int]
    """Ends of the pipeline of which members guard what these alone have."""


def have_sources(
    plan: Plan, rules: ForkRules, kept: Collection[int], version: int, remains: Remains
) -> bool:
    """Return whether all that a plan's fork makes anew can be made, whatever the course.

    Args:
        plan: that orders the fork.
        rules: of the job; those of the order go before them.
        kept: numbers of the positions whose state members have.
        version: at which all go on.
        remains: of the other positions.
    """
    assert plan.fork is not None
    width, outline = plan.ranks_per_stage, rules.outline
    gone = set(plan.fork.positions).difference(kept)
    lost = {divmod(position, width) for position in plan.fork.made_with(gone, width)}
    how = plan.fork.how
    policy = policy_of(how, rules.policy) if how is not None else rules.policy
    guards = {
        (name, 0): twin
        for end, twin in ends_of(len(outline))
        if end in remains.guarded
        for name in guarded_blocks(outline, end)
    }
    is_young = 0 < version - remains.durable <= policy.stale_steps

    def has_sources(history: History) -> bool:
        if history and history[-1].version == version and lost <= _places(history[-1]):
            # It is repeated as it was begun. What guards gave must come from guards again.
            return _guarded_ends(history[-1], lost) <= set(remains.guarded)
        left = Left(guards=guards)
        if remains.durable and is_young and all(f.version != remains.durable for f in history):
            left = with_stale(left, outline, lost, remains.durable)
        answer = plan_reinitialisation(
            outline,
            lost,
            version=version,
            norms_sq={},
            left=left,
            policy=policy,
            ranks_per_stage=width,
        )
        return not isinstance(answer, NoSource)

    return not lost or all(map(has_sources, remains.histories))


def _places(fork: Fork) -> set[Position]:
    return {(place.stage, place.inner) for place in fork.made.positions}


def _guarded_ends(fork: Fork, lost: Collection[Position]) -> set[int]:
    """Return the ends of which a fork makes a lost position with what guards have."""
    return {
        place.stage
        for place in fork.made.positions
        if (place.stage, place.inner) in lost and any(block.is_exact for block in place.blocks)
    }
