"""Reads the lineage of another run from its report, for a run that makes the same forks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mainstay_cli.base.comparison import ReportedLineage, load_report, read_course
from mainstay_cli.base.exits import UsageError
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.words import count
from mainstay_core.job.spec import TrainingJob
from mainstay_core.wire.checkpoint_manifest import is_same_entry, shown
from mainstay_core.wire.repeated_lineage import lineage_identity, read_repeats


def load_lineage(path: Path, job: TrainingJob) -> tuple[dict[str, Any], ...]:
    """Return the forks that a report has, for a job that makes them again.

    Args:
        path: of the report.
        job: that is to be run.

    Raises:
        UsageError: the report cannot be read, has none, not all, or those of another job.
    """
    report = load_report(path)
    lineage = read_course(report).lineage or ReportedLineage()
    forks = tuple(report["lineage"]["forks"]) if lineage.forks else ()
    num_forks = lineage.num_forks or 0
    if report.get("exact"):
        raise UsageError(f"--repeat-lineage: {path}: the run is exact, there is no fork to repeat")
    if not forks or len(forks) < num_forks:
        raise UsageError(
            f"--repeat-lineage: {path}: has {len(forks)} of {count(max(1, num_forks), 'fork')}, "
            "and all of them are needed; its store, or an earlier run, had the others"
        )
    if job.spec.snapshots.enabled:
        raise UsageError(
            "--repeat-lineage: not together with snapshots in memory in this version; use "
            "spec.snapshots.enabled false"
        )
    if job.spec.checkpoint.resume_from:
        raise UsageError(
            "--repeat-lineage: begins from the seed; remove spec.checkpoint.resumeFrom"
        )
    config = job.to_job_config(JobUid("repeated"))
    theirs, ours = lineage.of, lineage_identity(config)
    names = sorted({*theirs, *ours})
    differing = [name for name in names if not is_same_entry(theirs.get(name), ours.get(name))]
    if differing:
        listed = "".join(
            f"\n  {shown(name)} is {shown(theirs.get(name, 'absent'))} in the report, "
            f"{shown(ours.get(name, 'absent'))} here"
            for name in differing
        )
        raise UsageError(f"--repeat-lineage: {path} is of another job:{listed}")
    try:
        known = read_repeats(replace(config, repeats=forks))
    except InvalidSpecError as error:
        raise UsageError(f"--repeat-lineage: {path}: {error}") from error
    copies = {
        source.version
        for fork in known
        for place in fork.made.positions
        for block in place.blocks
        for source in block.sources
        if source.version is not None
    }
    if copies and not job.spec.checkpoint.every_steps:
        raise UsageError(
            f"--repeat-lineage: {path}: a stage was loaded from its checkpoint of step "
            f"{min(copies)}, "
            "so this run has to keep the same ones; set spec.checkpoint.everySteps"
        )
    return forks
