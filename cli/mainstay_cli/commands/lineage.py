"""``mainstay lineage`` and ``approximate``: a job's forks, and the permission for one more."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands.arguments import AS_JSON, JOB, RUNNING_JOB
from mainstay_cli.local import runs
from mainstay_cli.views.lineage import (
    describe_history,
    describe_prospects,
    describe_record,
    read_forks,
    read_lineage,
)
from mainstay_core.base import codec
from mainstay_core.wire.reinitialisation import LineagePage, describe_course

LINEAGE_HELP = """Show whether a job is what it would have been without failures: each stage that \
was made anew from others, and what each stage could be made anew from now, or why it could not.

Example: mainstay lineage demo; kubectl mainstay lineage llama-tiny"""
APPROXIMATE_HELP = """Allow a job that waits to make its lost stages anew from others, this once: \
it loses no step, but goes on in another way than it would have (approximately), and says so for \
ever. Its policy (recovery.allowApproximate) stays as it is. It is refused where every stage is \
held, and where a stage cannot be made anew.

Examples:

  mainstay approximate demo --dry-run

  kubectl mainstay approximate llama-tiny --stage 1 --yes"""


def show(job: JOB = None, as_json: AS_JSON = False) -> None:
    """Print the lineage of a job, running or ended.

    Raises:
        UsageError: there is no such job, or it has ended without a report.
        ApiError: the api does not answer, or refuses.
    """
    run = runs.find(job)
    page = read_lineage(asyncio.run(_fetch(run))) if run.is_running() else _of_report(run)
    if as_json:
        print(json.dumps(codec.encode(page), indent=1))
        return
    print(render(run.name, page))


def render(name: str, page: LineagePage) -> str:
    """Return a lineage as text: the course, each fork, and each stage's prospects."""
    lines = [f"{name}: {page.course}"]
    unknown = page.num_forks - len(page.forks)
    lines += [f"  {line}" for line in describe_history((), unknown)]
    for fork in page.forks:
        lines += [f"  {line}" for line in describe_history((fork,), 1)]
        lines += [f"    {line}" for line in describe_record(fork)]
    lines += describe_prospects(page)
    return "\n".join(lines)


def approximate(
    job: RUNNING_JOB,
    stage: Annotated[
        list[int] | None,
        typer.Option(help="A stage that may be made anew; all that are lost if left out.", min=0),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would come to.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Allow one approximate recovery, once the caller has seen what it comes to.

    Raises:
        UsageError: there is no such running job, or nobody can be asked.
        CliError: the api refused, with the reason why it would have no effect.
    """
    run = runs.find_running(job)
    told = asyncio.run(_allow(run, stage, dry_run=True))
    print(f"{run.name}: {told['would']}")
    if dry_run:
        return
    if not yes and not sys.stdin.isatty():
        raise UsageError("--yes: is missing; without a terminal nobody can be asked")
    if not yes and not typer.confirm("Allow it?"):
        print(f"{run.name}: nothing is allowed")
        return
    # What was shown is allowed, and no stage that was lost since.
    asyncio.run(_allow(run, list(told["stages"]), dry_run=False))
    print(f"{run.name}: allowed, for this recovery")


def _of_report(run: runs.Run) -> LineagePage:
    """Return what the report of an ended job says; nothing is to be made anew any more."""
    report = runs.read_report(run)
    since = report.get("approximate_since")
    forks, num_forks = read_forks(report)
    return LineagePage(
        exact=since is None,
        approximate_since=since,
        course=describe_course(since),
        num_forks=num_forks,
        forks=forks,
    )


async def _fetch(run: runs.Run) -> Any:
    async with run.connect() as api:
        return await api.fetch(run.job, "lineage")


async def _allow(run: runs.Run, stages: list[int] | None, *, dry_run: bool) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.allow_approximation(run.job, stages, dry_run=dry_run)
