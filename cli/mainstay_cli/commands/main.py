"""``mainstay``: the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mainstay_cli.base import comparison
from mainstay_cli.base.entry import run_app
from mainstay_cli.base.exits import ExitCode, UsageError
from mainstay_cli.commands import (
    chaos,
    checkpoints,
    dmr,
    faults,
    findings,
    lineage,
    local,
    operations,
    snapshots,
    status,
    timeline,
)
from mainstay_cli.commands.arguments import AS_JSON, JOB, RUNNING_JOB

EXIT_CODES = """
Exit codes:

  0    all is well

  1    the job failed, or two things that should be equal differ

  2    the command line, the job or the faults file cannot be used

  3    this machine cannot do it now: port in use, no Redis, too little memory or disk

  130  interrupted
"""

app = typer.Typer(
    name="mainstay",
    help="Keeps LLM pretraining running through failures: same step, same bits.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(local.app, name="local")
app.add_typer(faults.app, name="faults")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(snapshots.app, name="snapshots")
app.add_typer(dmr.app, name="dmr")
app.command("findings", help=findings.HELP)(findings.show)
app.command("timeline", help=timeline.HELP)(timeline.show)
app.command("lineage", help=lineage.LINEAGE_HELP)(lineage.show)
app.command("approximate", help=lineage.APPROXIMATE_HELP)(lineage.approximate)
app.command("drain", help=operations.DRAIN_HELP)(operations.drain)
app.command("chaos", help=chaos.HELP)(chaos.run)
report_app = typer.Typer(help="Compare the reports of two runs.", no_args_is_help=True)
app.add_typer(report_app, name="report")


@app.command(
    "status",
    help="Show a local job: step, quorum, ranks with slots and pids, recovery.\n\n"
    "Example: mainstay status demo --json",
)
def show_status(job: JOB = None, as_json: AS_JSON = False) -> None:
    status.show(job, as_json=as_json)


@app.command(
    "scale",
    help="Change the number of replicas of a running job, within its minReplicas and lanes. The "
    "bits stay the same. Down: whole replicas end between two steps; up: new pods are made and "
    "join; spares stay as many as they are.\n\n"
    "Example: mainstay scale demo --replicas 3",
)
def scale_job(
    job: RUNNING_JOB,
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas wanted.")],
) -> None:
    operations.scale(job, replicas)


@app.command(
    "suspend",
    help="Have a running job write a checkpoint and stand still, without pods, until mainstay "
    "resume. No step is lost, and the bits stay the same. The job needs checkpoint.everySteps.\n\n"
    "Example: mainstay suspend demo",
)
def suspend_job(job: RUNNING_JOB) -> None:
    operations.suspend(job, wanted=True)


@app.command(
    "resume",
    help="Have a suspended job go on: pods are made, and load the checkpoint.\n\n"
    "Example: mainstay resume demo",
)
def resume_job(job: RUNNING_JOB) -> None:
    operations.suspend(job, wanted=False)


@app.command(
    "sim",
    help="Run whole jobs in simulated time, one per seed: the real decisions under drawn faults, "
    "every invariant of the protocol checked after every event.\n\n"
    "Example: mainstay sim --seeds 0:10000; mainstay sim --seed 17 --trace",
)
def run_simulation(
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, FIRST:END without END [0:1000].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Run this one, and say what it is.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print its events.")] = False,
    kinds: Annotated[
        str, typer.Option("--faults", help="Kinds to draw from, separated by commas; all; or none.")
    ] = "all",
    approximate: Annotated[
        str,
        typer.Option(
            help="Jobs that lose whole stages, with permission to make them anew (on), without "
            "(off), or with a person's for one recovery (ahead); drawn: seeds draw that, too."
        ),
    ] = "drawn",
    jobs: Annotated[int, typer.Option(help="Processes; 0 takes one per core.", min=0)] = 0,
) -> None:
    # Imported here: all other commands together take no longer to import than the simulation.
    from mainstay_cli.commands import simulate

    draws = simulate.Draws(faults=kinds, approximate=approximate)
    if seed is not None and seeds is not None:
        raise UsageError("--seed runs one seed and --seeds many; give one of them")
    if trace and seed is None:
        raise UsageError("--trace: prints the events of one seed; name it with --seed")
    if seed is not None:
        held = simulate.run_one(seed, draws, trace=trace)
    else:
        number = jobs or simulate.default_jobs()
        held = simulate.run_many(simulate.parse_seeds(seeds or "0:1000"), draws, number)
    if not held:
        raise typer.Exit(ExitCode.FAILED)


@report_app.command(
    "diff",
    help="Compare the digests of two runs, step by step; exit code 1 if they differ.\n\n"
    "Example: mainstay report diff undisturbed.json disturbed.json",
)
def diff_reports(
    left: Annotated[Path, typer.Argument(help="REPORT.json of one run.")],
    right: Annotated[Path, typer.Argument(help="REPORT.json of the other.")],
) -> None:
    one, other = comparison.load_report(left), comparison.load_report(right)
    differences = comparison.compare_reports(one, other)
    if not differences:
        print(comparison.describe_equality(one, other))
        return
    print(f"first difference: {differences[0]}")
    for difference in differences[1:20]:
        print(f"                  {difference}")
    if len(differences) > 20:
        print(f"                  and {len(differences) - 20} more")
    raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Run the command line."""
    run_app(app, sys.argv[1:], "mainstay")


if __name__ == "__main__":
    main()
