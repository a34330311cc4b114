"""Decides whether what an ordered fork would be made of is still there: guards and stale copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mainstay_core.job.config import MAX_FORKS
from mainstay_core.rank.forks.guard_copies import LeftGuards, by_block
from mainstay_core.rank.forks.histories import before_fork, is_made_once_more
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.reinitialisation.guards import guarded_blocks
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Position,
    plan_reinitialisation,
    with_stale,
)
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Fork, History


def left_of(
    rules: ForkRules,
    lost: Sequence[Position],
    version: int,
    durable: int,
    history: History,
    guards: Collection[LeftGuards],
) -> Left:
    """Return what is left of lost positions: what guards keep, and parts of the newest checkpoint.

    A part that is older than the policy allows does not count, as the ladder and the prospects say.
    Nor does one of the very version of a fork, which may be from before or after it.

    Args:
        rules: of the job.
        lost: the positions.
        version: at which all go on.
        durable: newest version on the disk; 0: there is none.
        history: of the states at the version.
        guards: whose copies of what ends alone have count.
    """
    left = Left(guards=by_block(rules.outline, guards))
    is_clear = not any(fork.version == durable for fork in history)
    is_young = 0 < version - durable <= rules.policy.stale_steps
    if not durable or not is_young or not is_clear:
        return left
    return with_stale(left, rules.outline, lost, durable)


def lacks_sources(
    plan: Plan,
    rules: ForkRules | None,
    positions: Collection[int],
    version: int,
    *,
    durable: int,
    history: History,
    guards: Collection[LeftGuards],
) -> bool:
    """Return whether an ordered fork cannot be made after all: a guard or a stale copy has gone.

    The coordinator goes by whom the last commit showed to guard, and by the checkpoints of which it
    has heard. What has become of them since then the trainers find out. They also know of all forks
    in their states, which a store that has lost the job does not: a full history gets no other.

    Args:
        plan: that orders it.
        rules: of the job.
        positions: numbers of those that are to be made anew.
        version: at which all go on.
        durable: newest version on the disk.
        history: of the states at the version.
        guards: whose copies of what ends alone have count.
    """
    width = plan.ranks_per_stage
    lost = [divmod(position, width) for position in positions]
    again = plan.fork.repeats if plan.fork is not None else None
    if again is not None:
        return not has_guards(again, guards, lost if again in history else None)
    if rules is None:
        return False
    if is_made_once_more(history, lost, version):
        return not has_guards(history[-1], guards, lost)
    if len(before_fork(history, "", lost, version)[0]) >= MAX_FORKS:
        return True
    if not rules.policy.stale_steps:
        return _lacks_guard(plan, rules, positions, guards)
    answer = plan_reinitialisation(
        rules.outline,
        lost,
        version=version,
        norms_sq={},
        left=left_of(rules, lost, version, durable, history, guards),
        policy=rules.policy,
        ranks_per_stage=width,
    )
    return isinstance(answer, NoSource)


def _lacks_guard(
    plan: Plan, rules: ForkRules, made: Collection[int], left: Collection[LeftGuards]
) -> bool:
    """Return whether an end cannot be made anew, as nobody has what it alone has."""
    guarded = {guards.end for guards in left}
    stages = {position // plan.ranks_per_stage for position in made}
    return any(s not in guarded and guarded_blocks(rules.outline, s) for s in stages)


def has_guards(
    fork: Fork, guards: Collection[LeftGuards], lost: Collection[Position] | None = None
) -> bool:
    """Return whether there is a guard of every end of which a fork takes what guards keep.

    Args:
        fork: that is made.
        guards: whose copies count.
        lost: the positions of it that are made now; None: all of them.
    """
    return not ends_without_guards(fork, guards, lost)


def ends_without_guards(
    fork: Fork, guards: Collection[LeftGuards], lost: Collection[Position] | None = None
) -> frozenset[int]:
    """Return the ends that lack such a guard; arguments likewise."""
    ends = frozenset(
        place.stage
        for place in fork.made.positions
        if any(b.is_exact for b in place.blocks)
        and (lost is None or (place.stage, place.inner) in lost)
    )
    return ends - {left.end for left in guards}
