"""``mainstay snapshots ls|verify``: what the pods of a running job hold, and whether it is good."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_cli.commands.arguments import AS_JSON, JOB
from mainstay_cli.local import runs
from mainstay_cli.views.snapshots import describe_check, describe_snapshots
from mainstay_core.base.words import count, printable_lines
from mainstay_core.wire.stores import STORE_STATUS_S

LS_HELP = """List what the pods of a running job hold of its state: windows, and for each position \
which losses it survives and how many steps a replay would take; then every store with its units, \
the versions of their states, and the steps whose gradients it has. It is what each store told \
within the last seconds.

Example: mainstay snapshots ls demo; kubectl mainstay snapshots ls llama-tiny"""
VERIFY_HELP = """Have every store read all its segments, compare the copies of each, and check the \
commits beside them. Training goes on. Names each damaged copy with its pod, each damaged commit \
with its pod, and each position that stores cannot make anew. Exit code 1 if there is one, or if a \
store does not answer in time.

Of two copies that differ nobody can tell which is damaged: both are named. A segment with one \
copy is compared with what the check before has read. A copy that a replay has found damaged is \
named until it is written again. A segment that its store finds no more, as the key in its memory \
has changed, is named and dropped.

Example: mainstay snapshots verify demo"""
POLL_S = 0.5
"""How often it is asked whether all stores have answered."""
SETTLED_S = 2 * STORE_STATUS_S
"""How long a position must stay without cover to be named. Stores tell one by one what they hold,
while windows come and go: for some seconds their words may not fit together. When the timeout ends
before that, those are named that have no cover then."""


def ls(job: JOB = None, as_json: AS_JSON = False) -> None:
    """Print what the stores of a job hold.

    Raises:
        UsageError: there is no such running job.
        CliError: the api refused: the job keeps no snapshots.
    """
    told = asyncio.run(_fetch(runs.find_running(job)))
    print(json.dumps(told, indent=1) if as_json else printable_lines(describe_snapshots(told)))


def verify(
    job: JOB = None,
    timeout: Annotated[
        float,
        typer.Option(min=1.0, max=86_400.0, help="Seconds within which all stores must answer."),
    ] = 60.0,
    as_json: AS_JSON = False,
) -> None:
    """Have the stores of a job checked, and print what was found.

    Raises:
        UsageError: there is no such running job.
        CliError: a copy is damaged, a position is not covered, a store did not answer, or the api
            refused.
    """
    found, told, bare = asyncio.run(_check(runs.find_running(job), timeout))
    if as_json:
        print(json.dumps({**found, "not_covered": bare}, indent=1))
    else:
        print(printable_lines("\n".join(describe_check(found))))
        for position in bare:
            print(
                f"  NOT COVERED: s{position['stage']}.i{position['inner']}: {position['why_not']}"
            )
    records = found.get("damaged_records", ())
    problems = [
        f"{count(len(found['damaged']), 'copy is', 'copies are')} damaged"
        if found["damaged"]
        else "",
        f"{count(len(records), 'commit is', 'commits are')} damaged" if records else "",
        f"{count(len(bare), 'position is', 'positions are')} not covered" if bare else "",
        f"no answer within {timeout:g} s from {', '.join(found['waiting'])} (see --timeout)"
        if found["waiting"]
        else "",
    ]
    if any(problems):
        raise CliError("; ".join(p for p in problems if p), ExitCode.FAILED)
    if not as_json:
        print(f"  all good; {told['summary']['coverage']}")


async def _fetch(run: runs.Run) -> dict[str, Any]:
    async with run.connect() as api:
        return dict(await api.fetch(run.job, "snapshots"))


async def _check(
    run: runs.Run, timeout_s: float
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return the outcome of a check, what the stores hold, and positions that stay uncovered."""
    ends_s = time.monotonic() + timeout_s
    async with run.connect() as api:
        await api.check_snapshots(run.job)
        found = dict(await api.fetch(run.job, "snapshots/check"))
        while found["waiting"] and time.monotonic() < ends_s:
            await asyncio.sleep(POLL_S)
            found = dict(await api.fetch(run.job, "snapshots/check"))
        told = dict(await api.fetch(run.job, "snapshots"))
        bare, named_s = _uncovered(told), min(ends_s, time.monotonic() + SETTLED_S)
        while bare:
            await asyncio.sleep(POLL_S)
            told = dict(await api.fetch(run.job, "snapshots"))
            before = {position["position"] for position in bare}
            bare, now_s = _uncovered(told), time.monotonic()
            stayed = [position for position in bare if position["position"] in before]
            if now_s >= named_s and (stayed or now_s >= ends_s):
                return found, told, stayed or bare
            if stayed:
                bare = stayed
            else:
                named_s = min(ends_s, now_s + SETTLED_S)  # the gaps are others
        return found, told, bare


def _uncovered(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the positions that stores cannot make anew."""
    return [position for position in told["positions"] if not position["is_covered"]]
