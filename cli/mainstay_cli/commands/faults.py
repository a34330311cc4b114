"""``mainstay faults``: break something in a running job, and see what became of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands.arguments import AS_JSON, JOB, RUNNING_JOB
from mainstay_cli.local import manifests, runs
from mainstay_cli.views.faults import at_text, state_text, target_text
from mainstay_core.base.words import printable_lines

app = typer.Typer(help="Inject faults into a running job; docs/faults.md.", no_args_is_help=True)

NUMBERS = ("replica", "stage", "inner", "spare")
FLIP_NUMBERS = ("type", "microBatch", "block", "operator", "output", "element", "bit")


@app.command(
    "inject",
    help="Break something in a running job: the next step when none is given. Refused when it "
    "could never fire.\n\n"
    "Examples:\n\n"
    "  mainstay faults inject demo --target replica=1,stage=0 --action kill-trainer\n\n"
    "  mainstay faults inject demo --target replica=0,stage=1 --action stop --for 5 "
    "--at-step 40 --phase reduce\n\n"
    "  mainstay faults inject demo --target replica=0,stage=0 --action flip --phase forward "
    "--flip operator=aten.mm,element=5,bit=30\n\n"
    "  mainstay faults inject demo --target process=redis --action flush\n\n"
    "  mainstay faults inject demo -f faults.yaml",
)
def inject(
    job: RUNNING_JOB,
    target: Annotated[
        str | None,
        typer.Option(
            help="replica=R,stage=S[,inner=I]; spare=N; or, of a local run only, process=api|redis."
        ),
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(
            help="kill-trainer, kill-pod, stop, slow, disconnect, flip; of a process kill, stop, "
            "flush."
        ),
    ] = None,
    at_step: Annotated[
        int | None, typer.Option(help="Step in which it fires, counted from 0.")
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="Action of the step: forward, reduce, VOTE ...")
    ] = None,
    delay_ms: Annotated[
        float | None, typer.Option(help="Milliseconds after the action (slow: per action).")
    ] = None,
    for_s: Annotated[
        float | None, typer.Option("--for", help="Seconds that a stop or a disconnect lasts.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="How many times slower.")] = None,
    steps: Annotated[int | None, typer.Option(help="For how many steps slower.")] = None,
    flip: Annotated[
        str | None,
        typer.Option(
            help="The wrong bit: element=E,bit=B[,operator=aten.mm][,block=..][,sticky=true] "
            "[,where=compute|wire|state|batch] and more; docs/faults.md."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="FAULTS.yaml, instead of all these.")
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    if file is not None:
        when = {"--at-step": at_step, "--phase": phase, "--delay-ms": delay_ms}
        how = {"--for": for_s, "--factor": factor, "--steps": steps, "--flip": flip}
        entries = _read_entries(file, {"--target": target, "--action": action, **when, **how})
    else:
        if target is None or action is None:
            raise UsageError("--target and --action are missing (or --file)")
        slow = action == "slow"
        at = {"step": at_step, "phase": phase, "delayMs": None if slow else delay_ms}
        entry = {
            "at": _given(at),
            "target": parse_target(target),
            "action": action,
            "forSeconds": for_s,
            "factor": factor,
            "steps": steps,
            "delayMs": delay_ms if slow else None,
            "flip": None if flip is None else parse_flip(flip),
        }
        entries = [_given(entry)]
    run = runs.find_running(job)
    listed = asyncio.run(_inject(run, entries))
    print(json.dumps(listed, indent=1) if as_json else render(listed))
    if not as_json and any(fault["action"] == "flip" for fault in listed):
        print(f"after its step `faults ls {run.name}` says whether a flip was put in")


@app.command(
    "ls",
    help="List the faults of a job, running or ended: where they fire, and what became of each.\n\n"
    "Example: mainstay faults ls demo",
)
def ls(job: JOB = None, as_json: AS_JSON = False) -> None:
    run = runs.find(job)
    running = run.is_running()
    listed = asyncio.run(_fetch(run)) if running else runs.read_report(run).get("faults", [])
    print(json.dumps(listed, indent=1) if as_json else render(listed))


def parse_target(text: str) -> dict[str, Any]:
    """Return a target as a faults file has it.

    Raises:
        UsageError: it is not ``key=value,...``, or a key is given twice.
    """
    return parse_pairs(text, "--target", NUMBERS)


def parse_flip(text: str) -> dict[str, Any]:
    """Return a flip as a faults file has it.

    Raises:
        UsageError: it is not ``key=value,...``, or a key is given twice.
    """
    found = parse_pairs(text, "--flip", FLIP_NUMBERS)
    said = found.get("sticky")
    return found if said not in ("true", "false") else found | {"sticky": said == "true"}


def parse_pairs(text: str, option: str, numbers: Sequence[str]) -> dict[str, Any]:
    """Return the fields that an option names; those of ``numbers`` are whole numbers if they can.

    Raises:
        UsageError: it is not ``key=value,...``, or a key is given twice.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise UsageError(f"{option}: {part!r} is not key=value, as in {numbers[0]}=1")
        if key in found:
            raise UsageError(f"{option}: {key} is given twice")
        found[key] = int(value) if key in numbers and value.isdecimal() else value
    return found


def render(listed: list[dict[str, Any]]) -> str:
    """Return faults as a table of text."""
    if not listed:
        return "the job has no faults"
    rows = [("fault", "action", "target", "at", "state")]
    rows += [
        (fault["id"], fault["action"], target_text(fault), at_text(fault), state_text(fault))
        for fault in listed
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    return printable_lines("\n".join(lines))


def _read_entries(file: Path, others: dict[str, Any]) -> list[Any]:
    """Return the entries of a faults file, beside which no other option may be given.

    Raises:
        UsageError: one is, or the file has no list.
    """
    beside = _given(others)
    if beside:
        raise UsageError(f"--file says all of its faults; leave {', '.join(beside)} out")
    entries = manifests.load_yaml(file)
    if not isinstance(entries, list):
        raise UsageError(f"{file}: expected a list of faults")
    return entries


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


async def _inject(run: runs.Run, entries: list[Any]) -> list[dict[str, Any]]:
    async with run.connect() as api:
        return await api.inject_faults(run.job, entries)


async def _fetch(run: runs.Run) -> list[dict[str, Any]]:
    async with run.connect() as api:
        return list(await api.fetch(run.job, "faults"))
