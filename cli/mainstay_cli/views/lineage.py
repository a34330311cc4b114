"""Shows the course of a job: the stages that were made anew from others, and since when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mainstay_cli.base.comparison import read_course
from mainstay_cli.base.exits import UsageError
from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.words import printable
from mainstay_core.wire.checkpoint_manifest import shown
from mainstay_core.wire.reinitialisation import (
    Fork,
    LineagePage,
    Permission,
    ToldFork,
    describe_course,
    describe_fork,
)


def describe_exactness(recovery: Mapping[str, Any]) -> str:
    """Return whether a recovery left the job as it would have been, in the words of all surfaces.

    Args:
        recovery: as the api or a report shows it.
    """
    since = recovery.get("approximate_since")
    if recovery.get("exact") or since is not None:
        return describe_course(since)
    return "approximate"  # its stages are not made yet, or a version before has recorded it


def read_lineage(told: Any) -> LineagePage:
    """Return a lineage from the JSON of the api.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return codec.decode(LineagePage, told, "lineage")
    except MalformedError as error:
        raise UsageError(f"what the api says of the lineage is not understood: {error}") from error


def read_forks(report: Mapping[str, Any]) -> tuple[tuple[ToldFork, ...], int]:
    """Return the forks that a report has in full, and how many there were.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        course = read_course(report)
    except MalformedError as error:
        raise UsageError(f"what is said of the lineage is not understood: {error}") from error
    return course.forks, course.num_forks or len(course.forks)


def describe_history(forks: Sequence[Fork], num_forks: int) -> list[str]:
    """Return a line for each fork.

    Args:
        forks: those that are known in full, the newest ones.
        num_forks: how many there were.
    """
    unknown = num_forks - len(forks)
    earlier = [f"{unknown} earlier: not known in full here"] if unknown > 0 else []
    return earlier + [printable(describe_fork(fork)) for fork in forks]


def describe_record(fork: ToldFork) -> list[str]:
    """Return by which norms a fork was weighed, and what came of it, as far as that is known."""
    norms = {
        made.norms_sq: f"squared gradient norms {made.norms_sq[0]:.6g} of stage {place.stage - 1} "
        f"and {made.norms_sq[1]:.6g} of stage {place.stage + 1}"
        for place in fork.made.positions
        for made in place.blocks
        if len(made.norms_sq) == 2
    }
    lines = [f"weighed by {each}" for each in norms.values()]
    if fork.outcome is None:
        return lines
    made_here = {(place.stage, place.inner) for place in fork.made.positions}
    several = any(place.inner for place in fork.outcome.states)
    lines.append(f"committed in quorum {fork.outcome.quorum}, with masters of")
    for state in fork.outcome.states:
        rank = f", rank {state.inner}" if several else ""
        is_made = (state.stage, state.inner) in made_here
        lines.append(
            f"  stage {state.stage}{rank}: {state.masters}{' (made anew)' if is_made else ''}"
        )
    return list(map(printable, lines))


def describe_report(report: Mapping[str, Any]) -> list[str]:
    """Return since when a reported job is approximate, and by what; nothing of an exact one."""
    since = report.get("approximate_since")
    return [] if since is None else [describe_course(since), *describe_history(*read_forks(report))]


def describe_ahead(ahead: Permission | None, *, policy: bool) -> list[str]:
    """Return the line of a permission that is given ahead of a loss and not used yet.

    Args:
        ahead: the permission; None: there is none.
        policy: whether the job's policy allows all recoveries. It counts then.
    """
    if ahead is None:
        return []
    at = datetime.fromtimestamp(ahead.at_s, tz=UTC).isoformat(sep=" ", timespec="seconds")
    off = "; has no effect while recovery.allowApproximate is on" if policy else ""
    return [f"  permission: given by {shown(ahead.who)} at {at}, {ahead.describe()}{off}"]


def describe_prospects(page: LineagePage) -> list[str]:
    """Return what each stage could be made anew from, or why it could not; nothing if unasked."""
    if not page.stages:
        return []
    policy = "true" if page.allowed else "false"
    if page.allowed and page.after_lost_steps is not None:
        policy += f", approximateAfterLostSteps {page.after_lost_steps}"
    by = f"; {shown(page.permitted_by)} allows the next recovery" if page.permitted_by else ""
    head = f"  if every copy of a stage is lost (recovery.allowApproximate is {policy}{by}):"
    width = len(str(len(page.stages) - 1))
    return [
        *describe_ahead(page.ahead, policy=page.allowed),
        head,
        *(
            f"    stage {p.stage:>{width}}: {'from' if p.possible else 'no,'} {printable(p.reason)}"
            for p in page.stages
        ),
    ]
