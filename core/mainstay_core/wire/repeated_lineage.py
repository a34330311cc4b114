"""Describes the lineage of one run as another run takes it, to make the same forks.

A report has all that it takes: the forks, and the job of which they are. The run that repeats them
loses nothing. It comes to the same version, makes the same positions anew of the same sources, and
has the same bits from there on. So anybody can show what an approximate recovery has led to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.checkpoint_manifest import identity_of
from mainstay_core.wire.reinitialisation import (
    Fork,
    ForkOutcome,
    History,
    MadeBlock,
    MadePosition,
    Outline,
    SourceKind,
    ToldFork,
)

_OF_THE_SAME = (SourceKind.GUARD, SourceKind.INNER_RANK, SourceKind.STALE_COPY)
"""Sources that have the very block which is lost."""
_ROUNDING = 1e-9
"""By which a sum of weights may differ from 1."""


def lineage_identity(config: JobConfig) -> dict[str, str]:
    """Return what two jobs must share so that one can make the forks of the other.

    A fork names stages and inner ranks, so these count beside what decides the bits.
    """
    shape = config.shape
    return dict(
        sorted(
            {
                **identity_of(config),
                "parallelism.stages": str(shape.stages),
                "parallelism.ranksPerStage": str(shape.ranks_per_stage),
                "pipeline.order": shape.order.value,
                "pipeline.cut": shape.cut.value,
            }.items()
        )
    )


def show_lineage_of(config: JobConfig, num_forks: int, forks: Sequence[Fork]) -> dict[str, Any]:
    """Return the lineage of a run as its report has it.

    Args:
        config: of the job.
        num_forks: how many forks the final state contains.
        forks: those of them that are known in full, the newest ones; with their outcomes, if these
            are known.
    """
    return {
        "num_forks": num_forks,
        "forks": [codec.encode(fork) for fork in forks],
        "of": lineage_identity(config) if num_forks else {},
    }


def read_repeats(config: JobConfig) -> History:
    """Return the forks that a job makes again, in order.

    Raises:
        InvalidSpecError: one is none that this job can make.
    """
    told = tuple(_read(fork, number) for number, fork in enumerate(config.repeats))
    forks = tuple(one.fork for one in told)
    for number, one in enumerate(told):
        problem = _problem_of(one.fork, forks[:number], config)
        problem = problem or _problem_of_outcome(one.outcome, config)
        if problem:
            raise InvalidSpecError(f"repeats[{number}]", problem)
    return forks


def read_outcomes(config: JobConfig) -> tuple[ForkOutcome | None, ...]:
    """Return by number of a fork that a job makes again what is known of what came of it.

    A report of an older release has nothing of it.

    Raises:
        InvalidSpecError: it cannot be read.
    """
    return tuple(_read(fork, number).outcome for number, fork in enumerate(config.repeats))


def _problem_of_outcome(outcome: ForkOutcome | None, config: JobConfig) -> str:
    """Return why what is said to have come of a fork is of no such job; empty if it may be."""
    shape = config.shape
    for place in outcome.states if outcome is not None else ():
        if place.stage >= shape.stages or place.inner >= shape.ranks_per_stage:
            return (
                f"has a digest of rank {place.inner} of stage {place.stage}, and the job has "
                f"{shape.stages} stages of {shape.ranks_per_stage}"
            )
    return ""


def _read(fork: Mapping[str, Any], number: int) -> ToldFork:
    try:
        return codec.decode(ToldFork, fork, f"repeats[{number}]")
    except MalformedError as error:
        raise InvalidSpecError(error.field, error.problem) from error


def _problem_of(fork: Fork, before: History, config: JobConfig) -> str:
    """Return why a job cannot make a fork again; empty if it can."""
    shape = config.shape
    if before and fork.version < before[-1].version:
        return f"is of step {fork.version}, the one before it of step {before[-1].version}"
    if fork.version > shape.steps:
        return f"is of step {fork.version}, and the job has {shape.steps}"
    if not fork.made.positions:
        return "makes nothing anew"
    places = [(place.stage, place.inner) for place in fork.made.positions]
    places += [(s.stage, s.inner) for p in fork.made.positions for b in p.blocks for s in b.sources]
    for stage, inner in places:
        if stage >= shape.stages or inner >= shape.ranks_per_stage:
            return (
                f"names rank {inner} of stage {stage}, and the job has {shape.stages} stages of "
                f"{shape.ranks_per_stage}"
            )
    made = [(place.stage, place.inner) for place in fork.made.positions]
    for place in fork.made.positions:
        if made.count((place.stage, place.inner)) > 1:
            return f"makes rank {place.inner} of stage {place.stage} more than once"
        for block in place.blocks:
            problem = _problem_of_block(block, place, made, fork.version, config)
            if problem:
                return f"stage {place.stage}, {block.block}: {problem}"
    return ""


def _problem_of_block(
    block: MadeBlock,
    place: MadePosition,
    made: Sequence[tuple[int, int]],
    version: int,
    config: JobConfig,
) -> str:
    """Return why a block cannot be made anew as a record says; empty if it can."""
    if block.is_exact and not config.guards:
        return (
            "was made anew of guards, and this job has none; set spec.recovery.approximate.guards"
        )
    for source in block.sources:
        if source.kind in _OF_THE_SAME and source.block != block.block:
            return f"a {source.kind.value} has the block {source.block}, not this one"
        is_stale = source.kind is SourceKind.STALE_COPY
        if is_stale != (source.version is not None):
            return f"a source is a {source.kind.value} of step {source.version}"
        if source.version is not None and source.version >= version:
            return f"a copy of step {source.version} is not older than the fork, of step {version}"
        is_own = (source.stage, source.inner) == (place.stage, place.inner)
        if is_stale and not is_own:
            return f"a copy of stage {source.stage} is not its own"
        if not is_stale and (source.stage, source.inner) in made:
            return f"is made of stage {source.stage}, which is made anew itself"
    weights = [s.weight for s in block.sources if s.kind is not SourceKind.INNER_RANK]
    if not weights:
        return "names no source"
    if len(block.norms_sq) == 1:
        return "has the norm of one stage; two are weighed by them"
    if abs(sum(weights) - 1) > _ROUNDING:
        return f"weights must add up to 1, not {sum(weights):g}"
    return ""


def problem_with_blocks(fork: Fork, outline: Outline) -> str:
    """Return which stage of a fork has other blocks in a job; empty if none has.

    Args:
        fork: of the job that is repeated.
        outline: the blocks of every stage of this job; empty if nobody has told them.
    """
    sources = [s for p in fork.made.positions for b in p.blocks for s in b.sources]
    stages = [place.stage for place in fork.made.positions] + [s.stage for s in sources]
    if max(stages) >= len(outline):
        return ""  # it is not told as a whole
    for place in fork.made.positions:
        theirs = [block.block for block in place.blocks]
        ours = [block.name for block in outline[place.stage]]
        if theirs != ours:
            return (
                f"stage {place.stage} has the blocks {', '.join(ours) or 'none'} here, the lineage "
                f"makes {', '.join(theirs) or 'none'}"
            )
    for source in sources:
        # What a guard has is a block of the end that it guards.
        is_its_own = source.kind is not SourceKind.GUARD
        if is_its_own and source.block not in {known.name for known in outline[source.stage]}:
            return f"stage {source.stage} has no block {source.block}"
    return ""
