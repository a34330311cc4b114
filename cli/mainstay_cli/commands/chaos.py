"""The command line of ``mainstay chaos``: options, and a table of verdicts that grows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mainstay_cli.base.exits import ExitCode, UsageError
from mainstay_cli.base.files import check_place, write_whole
from mainstay_cli.chaos.campaign import Campaign, Watcher, run_campaign, summarize, write_json
from mainstay_cli.chaos.flips import describe, keeps_promise, run_flips
from mainstay_cli.chaos.verdicts import Judgement, Verdict
from mainstay_cli.commands.local import Ui
from mainstay_core.base import codec
from mainstay_core.wire.flip_trials import MAX_FLIPS

HELP = (
    "Break a job in ways drawn from a seed: run it undisturbed, then with the faults packed into "
    "a few runs, and compare the digests of every step. A table has the verdict of each fault, "
    "and for a failing one the command that repeats it alone. What a run did not reach is tried "
    "again by itself.\n\n"
    "A run hangs when it takes longer than 60 s + 5 x the undisturbed run + 20 s per fault. Exit "
    "code 1 if anything differs, hangs, fails or never fires.\n\n"
    "Examples:\n\n"
    "  mainstay chaos examples/chaos.yaml --faults 40 --seed 1\n\n"
    "  mainstay chaos examples/chaos.yaml --faults 40 --seed 1 --only g7b\n\n"
    "  mainstay chaos examples/chaos.yaml --flips 200 --seed 1"
)
HEADINGS = ("run", "fault", "action", "target", "at", "fired on", "method", "lost", "next commit")
STYLES = {
    Judgement.EQUAL: "green",
    Judgement.NOT_REACHED: "yellow",
    Judgement.DIFFERS: "bold red",
    Judgement.FAILED: "bold red",
}


def run(
    file: Annotated[Path, typer.Argument(help="A TrainingJob in YAML.")],
    faults: Annotated[int, typer.Option(min=1, help="How many faults to draw.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed draws the same faults.")] = 0,
    runs_of: Annotated[int, typer.Option("--runs-of", min=1, help="Faults per run.")] = 8,
    only: Annotated[str | None, typer.Option(help="One fault, with what belongs to it.")] = None,
    run_number: Annotated[int | None, typer.Option("--run", help="One run of them.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the job's steps.")] = None,
    processes: Annotated[
        bool, typer.Option("--processes/--no-processes", help="Break the api and Redis, too.")
    ] = True,
    faults_file: Annotated[
        Path | None, typer.Option("--faults-file", help="FAULTS.yaml, instead of draws.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Where to write the verdicts (JSON).")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Empty directory for the runs; a temporary one if left out.")
    ] = None,
    hang_after: Annotated[
        float | None, typer.Option("--hang-after", min=1.0, help="Seconds after which a run hangs.")
    ] = None,
    flips: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_FLIPS,
            help="Draw so many wrong bits instead of faults, and compute a step with each, in one "
            "process.",
        ),
    ] = None,
    ui: Annotated[Ui, typer.Option(help="A live table in a terminal, or lines.")] = Ui.AUTO,
) -> None:
    check_place(report or Path(os.devnull), "--report")
    draws = {"--only": only, "--run": run_number}
    if flips is not None:
        of_runs = {"--steps": steps, "--faults-file": faults_file, "--out": out}
        _refuse("--flips", {**draws, **of_runs, "--hang-after": hang_after})
        _run_flips(file, flips, seed, report)
        return
    if faults_file is not None:
        _refuse("--faults-file", draws)
    campaign = Campaign(
        file=file,
        num_faults=faults,
        seed=seed,
        per_run=runs_of,
        only=only,
        run=run_number,
        steps=steps,
        processes=processes,
        faults=faults_file,
        out=out,
        hang_s=hang_after,
    )
    console = Console(highlight=False)
    # Lines in a pipe or a log may be as long as they are.
    lines = Console(highlight=False, width=None if console.is_terminal else 200)
    live = console.is_terminal and ui in (Ui.AUTO, Ui.LIVE)
    if live:
        with LiveTable(console) as table:
            result = run_campaign(campaign, table)
    else:
        result = run_campaign(campaign, Watcher() if ui is Ui.NONE else Lines(lines))
        if ui is not Ui.NONE:
            lines.print(table_of(result.verdicts))
    if report is not None:
        write_json(result, report)
    summarize(result, campaign, lambda text: print(text, flush=True))
    if not result.ok:
        raise typer.Exit(ExitCode.FAILED)


def _refuse(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that would have no effect beside another one."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UsageError(f"{', '.join(given)} would have no effect with {option}; leave it out")


def _run_flips(file: Path, num_flips: int, seed: int, report: Path | None) -> None:
    found = run_flips(file, num_flips, seed)
    if report is not None:
        write_whole(report, codec.dumps(found) + "\n")
    print("\n".join(describe(found)), flush=True)
    if not keeps_promise(found):
        raise typer.Exit(ExitCode.FAILED)


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """Return verdicts as a table."""
    table = Table(box=None, pad_edge=False)
    for heading in (*HEADINGS, "verdict"):
        table.add_column(heading, no_wrap=heading in ("run", "fault", "action", "verdict"))
    for verdict in verdicts:
        after_s = verdict.first_commit_after_s
        table.add_row(
            str(verdict.run),
            verdict.fault,
            verdict.action,
            verdict.target,
            verdict.at,
            verdict.fired_on or "-",
            verdict.method or "-",
            str(verdict.lost_steps),
            "-" if after_s is None else f"+{after_s:.2f} s",
            Text(verdict.judgement.value, style=STYLES[verdict.judgement]),
        )
    return table


class Lines(Watcher):
    """One line per run."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def starts(self, what: str) -> None:
        """Print what starts; seen at once, also through a pipe."""
        self._console.print(f"== {what}")
        self._console.file.flush()

    def judged(self, verdicts: Sequence[Verdict]) -> None:
        """Print what came of a run."""
        for judgement in Judgement:
            number = sum(verdict.judgement is judgement for verdict in verdicts)
            if number:
                self._console.print(f"   {number} {judgement}")
        for verdict in verdicts:
            if verdict.bad:
                self._console.print(f"   {verdict.fault}: {verdict.why}", markup=False)
                break
        self._console.file.flush()


class LiveTable(Watcher):
    """The verdicts so far, in place. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._verdicts: dict[str, Verdict] = {}
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(table_of(list(self._verdicts.values())), refresh=True)
        self._live.stop()

    def starts(self, what: str) -> None:
        """Show what runs under the table."""
        table = table_of(list(self._verdicts.values()))
        table.caption = f"running: {what}"
        table.caption_justify = "left"
        self._live.update(table, refresh=True)

    def judged(self, verdicts: Sequence[Verdict]) -> None:
        """Add to the table."""
        self._verdicts.update({verdict.fault: verdict for verdict in verdicts})
        self.starts("-")
