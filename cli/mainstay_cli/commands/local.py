"""``mainstay local``: run a job on this machine."""

from __future__ import annotations

import enum
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from mainstay_cli.base import state_dir
from mainstay_cli.base.exits import CliError, ExitCode, UsageError
from mainstay_cli.commands import demo
from mainstay_cli.commands.findings import describe_checks
from mainstay_cli.local import checkpoint_files, manifests
from mainstay_cli.local import run as local_run
from mainstay_cli.local.repeated import load_lineage
from mainstay_cli.views.faults import describe_missed
from mainstay_cli.views.lineage import describe_report
from mainstay_cli.views.live import LiveProgress
from mainstay_cli.views.progress import PlainProgress, describe_crash, describe_recovery
from mainstay_cli.views.sizes import describe_sizes
from mainstay_core.base.words import count, show_bytes
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job.sizes.snapshot_traffic import describe_traffic

app = typer.Typer(help="Run jobs on this machine, no cluster needed.", no_args_is_help=True)


VERSION = Annotated[
    int | None,
    typer.Option(
        help="With --resume: the step of the checkpoint to go on from, as the newest exact one of "
        "a run that is approximate since then. mainstay checkpoints ls DIR names them.",
        min=1,
    ),
]


RESUME = Annotated[
    Path | None,
    typer.Option(
        help="Go on from the newest good checkpoint of an earlier run: its state directory, a "
        "directory of checkpoints, or one of them. Replicas, stages and ranks per pod may differ.",
        metavar="DIR",
    ),
]
REPEAT = Annotated[
    Path | None,
    typer.Option(
        help="REPORT.json of another run of this job that is approximate: make the same stages "
        "anew at the same steps, without any loss. Both runs have equal digests.",
        metavar="REPORT",
    ),
]


class Ui(enum.StrEnum):
    """A way to show a running job in the terminal."""

    AUTO = "auto"
    LIVE = "live"
    PLAIN = "plain"
    NONE = "none"


UI = Annotated[
    Ui,
    typer.Option(
        help="What to print: live is a table in place (pods, ranks, phases, recoveries, events; "
        "lines where there is no terminal), plain is lines, none only what goes wrong, auto is "
        "live in a terminal."
    ),
]


@app.command(
    "run",
    help="Run a TrainingJob to its end: Redis, the api and the pods as processes of this "
    "machine, all of which end with this command.\n\n"
    "Examples:\n\n"
    "  mainstay local run examples/quickstart.yaml\n\n"
    "  mainstay local run examples/demo.yaml --faults examples/demo-faults.yaml "
    "--report report.json\n\n"
    "  mainstay local run longer.yaml --resume ~/.mainstay/jobs/demo\n\n"
    "  mainstay local run again.yaml --repeat-lineage report.json\n\n"
    "  mainstay local run examples/quickstart.yaml --dry-run",
)
def run(
    file: Annotated[Path, typer.Argument(help="A TrainingJob in YAML.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the job, instead of metadata.name.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state-dir", help="Where the run keeps its things [~/.mainstay/jobs/NAME]."),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(help="FAULTS.yaml: what to break, where and when.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Where to write the report (JSON), too.")
    ] = None,
    ui: UI = Ui.AUTO,
    resume: RESUME = None,
    version: VERSION = None,
    repeat_lineage: REPEAT = None,
    api_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the api; 0 is any free one.")
    ] = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the api answering after the end, until Ctrl-C.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Start nothing: check FILE, and print what each rank would hold in memory and "
            "send in a step. By formulas for the built-in model; blocks of your own are measured "
            "by one micro-batch.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print JSON, all in bytes.")
    ] = False,
) -> None:
    _check_options(
        dry_run,
        as_json=as_json,
        report=report,
        resume=resume,
        version=version,
        repeat_lineage=repeat_lineage,
    )
    job_file = manifests.load_job(file, name)
    if dry_run:
        _load_faults(job_file, faults)
        _print_sizes(job_file, as_json=as_json)
        return
    directory = state or state_dir.home() / "jobs" / job_file.job.metadata.name
    if resume is not None:
        job_file = checkpoint_files.resume_job(job_file, resume, directory, _warn, version)
    points = _load_faults(job_file, faults)
    repeats = () if repeat_lineage is None else load_lineage(repeat_lineage, job_file.job)
    options = local_run.RunOptions(
        state_dir=directory, api_port=api_port, report=report, keep=keep, repeats=repeats
    )
    with _progress(ui) as progress:
        _log_warnings(progress)
        result = local_run.run_job(job_file, points, options, progress)
    summarize(result, directory, progress)
    if result.state != "complete":
        raise CliError(f"the job {result.state}: {result.reason}", ExitCode.FAILED)


@app.command(
    "demo",
    help="Train, kill a pod and a trainer with -9, go on in the same step, and compare the bits "
    "with an undisturbed run. Exit code 1 if they differ.\n\n"
    "Example: mainstay local demo",
)
def run_demo() -> None:
    progress = PlainProgress(every_steps=5)
    _log_warnings(progress)
    demo.run(progress)


def _check_options(
    dry_run: bool,
    *,
    as_json: bool,
    report: Path | None,
    resume: Path | None,
    version: int | None,
    repeat_lineage: Path | None,
) -> None:
    """Refuse options that would have no effect."""
    if repeat_lineage and (dry_run or resume):
        other = "--dry-run, which runs nothing" if dry_run else "--resume: it begins from the seed"
        raise UsageError(f"--repeat-lineage: cannot be together with {other}; omit one of them")
    if version is not None and resume is None:
        raise UsageError("--version: is for --resume DIR, whose checkpoint it chooses")
    if as_json and not dry_run:
        raise UsageError("--json: is for --dry-run; a run writes its report with --report")
    if dry_run and report:
        raise UsageError("--report: there is none of a --dry-run; use --json for its numbers")
    if dry_run and resume:
        raise UsageError(
            "--resume: a --dry-run reads no checkpoint, and sizes are the same; omit it"
        )


def _load_faults(file: manifests.JobFile, faults: Path | None) -> tuple[FaultPoint, ...]:
    if faults is None:
        return ()
    return manifests.load_faults(faults, file.job)


def _print_sizes(file: manifests.JobFile, *, as_json: bool) -> None:
    # Imported here: what assigns types to replicas needs scipy, which a run does not.
    from mainstay_cli.local import sizes

    found = sizes.compute_sizes(file)
    how = "measured" if found.is_measured else "computed"
    if as_json:
        ranks = [rank.as_json() for rank in found.ranks]
        told: dict[str, Any] = {"sizes": how, "ranks": ranks}
        if found.store is not None:
            told["snapshots"] = asdict(found.store)
        if found.waiting_bytes:
            told["checks"] = {"waiting_bytes": found.waiting_bytes}
        print(json.dumps(told, indent=1))
        return
    by = "by one micro-batch through each block" if found.is_measured else "by formulas"
    print(f"what each rank holds, and sends in a step, {how} {by}:")
    for line in describe_sizes(found.ranks):
        print(f"  {line}")
    if found.store is not None:
        print(
            f"spec.snapshots.memory: each pod gives {show_bytes(found.store.memory_bytes)} to "
            f"snapshots and logs; it needs room for {show_bytes(found.store.least_bytes)}, and is "
            f"expected to hold up to {show_bytes(found.store.expected_bytes)} while nobody is lost"
        )
        if found.store.problem:
            print(found.store.problem)
        print(
            f"spec.snapshots.replay: a lost state is made anew from logs of {found.store.log}, as "
            f"{found.store.log_reason}"
        )
        print(f"spec.snapshots: {describe_traffic(found.store.traffic)}")
    if found.waiting_bytes:
        print(
            f"spec.detection.dmr.memory: checks that wait keep up to "
            f"{show_bytes(found.waiting_bytes)} in each rank beside that; on a GPU none waits"
        )
    if found.compiles:
        print(
            "runtime.compile is Blocks: activations are those of blocks that are not compiled; "
            "compiled ones keep others, and a block's gradients in fp32 until they are added"
        )


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _progress(ui: Ui) -> PlainProgress:
    if ui in (Ui.AUTO, Ui.LIVE) and sys.stdout.isatty():
        return LiveProgress()
    return PlainProgress(quiet=ui is Ui.NONE)


def summarize(result: local_run.RunResult, directory: Path, progress: PlainProgress) -> None:
    """Print how a run went."""
    steps = result.report.get("steps", {})
    progress.say(
        f"{result.state}: {count(steps.get('committed', 0), 'step')} committed, "
        f"{steps.get('redone', 0)} redone, {steps.get('lost', 0)} lost, "
        + count(len(result.recoveries), "recovery", "recoveries")
    )
    for line in describe_report(result.report):
        progress.say(f"  {line}")
    for recovery in result.recoveries:
        progress.say(f"  {describe_recovery(recovery)}")
    for line in describe_checks(result.report, result.report.get("findings")):
        progress.say(f"  {line}")
    for line in describe_missed(result.report.get("faults", [])):
        progress.warn(line)
    for key, value in (result.report.get("digests", {}).get("final") or {}).items():
        progress.say(f"  {key:<9} {value}")
    crash = describe_crash(result.report.get("crash"))
    if crash:
        progress.say(crash)
    progress.say(f"report: {directory / 'report.json'}")


class _WarningHandler(logging.Handler):
    def __init__(self, progress: PlainProgress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.warn(record.getMessage())


def _log_warnings(progress: PlainProgress) -> None:
    """Show our own modules' warnings as the progress shows warnings."""
    logger = logging.getLogger("mainstay_cli")
    logger.handlers = [_WarningHandler(progress)]
    logger.propagate = False
