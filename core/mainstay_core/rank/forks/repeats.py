"""Decides when a fork of another run is due, who makes it again, and whose state is from before it.

A job that repeats a lineage loses nothing: at a fork's version its makers give up what they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.reinitialisation.sources import norms_beside
from mainstay_core.reinitialisation.weights import Weighting, weigh
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import (
    Fork,
    ForkOutcome,
    History,
    MadeBlock,
    Outline,
    SourceKind,
)
from mainstay_core.wire.votes import Commit, SettleReport, Vote

OTHER_JOB = "it is of another model, data or device"


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


def differing_norms(fork: Fork, outline: Outline, commit: Commit | None) -> str:
    """Return what a fork of another run was weighed by, if this run has something else; or "".

    Args:
        fork: that comes next here.
        outline: the blocks of every stage here. One that the fork names, and there is not, is
            refused by others.
        commit: of the step that led to it; None at version 0.
    """
    if commit is not None and not commit.norms_sq:
        return ""
    names = [block.name for stage in outline for block in stage]
    told = dict(zip(names, commit.norms_sq, strict=False)) if commit is not None else {}
    for place in fork.made.positions:
        if not 0 < place.stage < len(outline) - 1:
            continue
        kinds = {block.name: block.kind for block in outline[place.stage]}
        for made in place.blocks:
            if not made.norms_sq or made.block not in kinds:
                continue
            theirs = tuple(made.norms_sq)
            ours = norms_beside(outline, place.stage, kinds[made.block], told)
            if theirs != ours:
                return (
                    f"it weighs what {made.block} is made of by squared gradient norms of "
                    f"{_and(theirs)}, and this run has {_and(ours)}"
                )
            problem = _other_weights(made, place.stage)
            if problem:
                return problem
    return ""


def _other_weights(made: MadeBlock, stage: int) -> str:
    """Return which weight of a block is not what its norms give; empty if all are."""
    right = weigh(Weighting.GRADIENT_NORM, *made.norms_sq)
    beside = [s for s in made.sources if s.kind is SourceKind.NEIGHBOUR]
    is_copied = len(beside) == 1
    for source in beside:
        share = right.before if source.stage < stage else right.after
        if source.weight != share and not (is_copied and share >= 0.5):
            return (
                f"it takes {source.weight:g} of stage {source.stage} for {made.block}, and its "
                f"norms give {share:g}"
            )
    return ""


def _and(pair: Sequence[float]) -> str:
    return " and ".join(f"{value!r}" for value in pair)


def differing_states(
    plan: Plan,
    outcomes: Sequence[ForkOutcome | None],
    history: History,
    version: int,
    votes: Sequence[Vote],
) -> str:
    """Return which state another run had after the fork at a version, if this one differs; or "".

    Args:
        plan: of the quorum.
        outcomes: of the forks that the job makes again, as far as they are known.
        history: of the states that have voted.
        version: of these.
        votes: by member index, of a step that would be committed: the states of a position agree.
    """
    number = len(history) - 1
    if not 0 <= number < len(outcomes) or history[number].version != version:
        return ""
    outcome = outcomes[number]
    for place in outcome.states if outcome is not None else ():
        position = place.stage * plan.ranks_per_stage + place.inner
        ours = votes[plan.positions[position][0].index].state
        if ours != place.masters:
            rank = f", rank {place.inner}" if plan.ranks_per_stage > 1 else ""
            return (
                f"the lineage to repeat has stage {place.stage}{rank} with the digest "
                f"{place.masters} after its fork at step {version}, and this run {ours}: "
                f"{OTHER_JOB}"
            )
    return ""
