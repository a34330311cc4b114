"""Describes the lineage of one run as another run takes it, to make the same forks.

A report has all that it takes: the forks, and the job of which they are. The run that repeats them
loses nothing. It comes to the same version, makes the same positions anew of the same sources, and
has the same bits from there on. So anybody can show what an approximate recovery has led to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.checkpoint_manifest import identity_of
from mainstay_core.wire.reinitialisation import Fork, History


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


def show_lineage_of(config: JobConfig, num_forks: int, forks: History) -> dict[str, Any]:
    """Return the lineage of a run as its report has it.

    Args:
        config: of the job.
        num_forks: how many forks the final state contains.
        forks: those of them that are known in full, the newest ones.
    """
    return {
        "num_forks": num_forks,
        "forks": codec.encode(forks),
        "of": lineage_identity(config) if num_forks else {},
    }


def read_repeats(config: JobConfig) -> History:
    """Return the forks that a job makes again, in order.

    Raises:
        InvalidSpecError: one is none that this job can make.
    """
    forks = tuple(_read(fork, number) for number, fork in enumerate(config.repeats))
    for number, fork in enumerate(forks):
        problem = _problem_of(fork, forks[:number], config)
        if problem:
            raise InvalidSpecError(f"repeats[{number}]", problem)
    return forks


def _read(fork: Mapping[str, Any], number: int) -> Fork:
    try:
        return codec.decode(Fork, fork, f"repeats[{number}]")
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
    return ""
