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
from mainstay_core.base.words import printable
from mainstay_core.wire.reinitialisation import LineagePage, describe_course

LINEAGE_HELP = """Show whether a job is what it would have been without failures: each stage that \
was made anew from others, and what each stage could be made anew from now, or why it could not.

Example: mainstay lineage demo; kubectl mainstay lineage llama-tiny"""
APPROXIMATE_HELP = """Allow a job that waits to make its lost stages anew from others, this once: \
it loses no step, but goes on in another way than it would have (approximately), and says so for \
ever. Its policy (recovery.allowApproximate) stays as it is. It is refused where every stage is \
held, and where a stage cannot be made anew.

A job that has a trainer to spare does not wait, but goes back at once. With --ahead it is allowed \
before anything is lost: for the first recovery that would lose more than --after-lost-steps \
otherwise, and for no other. It is for losses of the stages that --stage names, or of any, and has \
no effect while recovery.allowApproximate is on. --withdraw takes back what is not used yet.

Examples:

  mainstay approximate demo --dry-run

  kubectl mainstay approximate llama-tiny --stage 1 --yes

  mainstay approximate demo --ahead --after-lost-steps 50

  mainstay approximate demo --withdraw"""


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
    lines = [f"{name}: {printable(page.course)}"]
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
        typer.Option(
            help="A stage that may be made anew; if left out all that are lost, with --ahead all. "
            "May be repeated.",
            min=0,
        ),
    ] = None,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Allow it for a loss that is still to come.")
    ] = False,
    after_lost_steps: Annotated[
        int | None,
        typer.Option(
            help="With --ahead: the most steps that the job gives up rather than use it; less than "
            "it has.",
            min=0,
        ),
    ] = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Take back what is not used yet.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would come to.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Allow one approximate recovery, once the caller has seen what it comes to.

    Raises:
        UsageError: there is no such running job, options contradict, or nobody can be asked.
        CliError: the api refused, with the reason why it would have no effect.
    """
    _check_options(stage, after_lost_steps, ahead=ahead, withdraw=withdraw, dry_run=dry_run)
    run = runs.find_running(job)
    if withdraw:
        print(f"{run.name}: {printable(asyncio.run(_withdraw(run))['withdrawn'])}")
        return
    told = asyncio.run(_allow(run, stage, after_lost_steps, dry_run=True))
    print(f"{run.name}: {printable(told['would'])}")
    if dry_run:
        return
    if not yes and not sys.stdin.isatty():
        raise UsageError("--yes: is missing; without a terminal nobody can be asked")
    if not yes and not typer.confirm("Allow it?"):
        print(f"{run.name}: nothing is allowed")
        return
    # What was shown is allowed, and no stage that was lost since. Ahead nothing is lost: each that
    # is named must be one that can be made anew, and what is left out stays so.
    stages = stage if ahead else list(told["stages"])
    asyncio.run(_allow(run, stages, after_lost_steps, dry_run=False))
    print(f"{run.name}: allowed, for {'one recovery' if ahead else 'this recovery'}")


def _check_options(
    stage: list[int] | None,
    after_lost_steps: int | None,
    *,
    ahead: bool,
    withdraw: bool,
    dry_run: bool,
) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: they do.
    """
    if withdraw and (stage or ahead or dry_run or after_lost_steps is not None):
        raise UsageError("--withdraw: takes back all that is not used yet; give no other option")
    if ahead and after_lost_steps is None:
        raise UsageError(
            "--after-lost-steps: is missing; with --ahead it says how many lost steps the job "
            "gives up rather (0: none)"
        )
    if after_lost_steps is not None and not ahead:
        raise UsageError("--after-lost-steps: goes with --ahead alone")


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


async def _allow(
    run: runs.Run, stages: list[int] | None, after_lost_steps: int | None, *, dry_run: bool
) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.allow_approximation(
            run.job, stages, dry_run=dry_run, after_lost_steps=after_lost_steps
        )


async def _withdraw(run: runs.Run) -> dict[str, Any]:
    async with run.connect() as api:
        return await api.withdraw_approximation(run.job)
