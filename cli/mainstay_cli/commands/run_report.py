"""``kubectl mainstay report``: the report of a job of a cluster, as local runs leave it.

A local run writes its REPORT.json itself; jobs of a cluster leave nothing on this machine.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import UsageError
from mainstay_cli.base.files import write_whole
from mainstay_cli.commands.arguments import JOB
from mainstay_cli.local import runs

HELP = """Print the report of a job (REPORT.json): how it ended or where it stands, the digests of \
every step, recoveries with their five times, events. mainstay report diff compares two.

Example: kubectl mainstay report llama-tiny --output tiny.json"""


def show(
    job: JOB = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it to this file instead.")
    ] = None,
) -> None:
    """Print the report of a job, or write it to a file.

    Raises:
        UsageError: there is no such job, or the file cannot be written.
        ApiError: the api does not answer, or refuses.
    """
    run = runs.find(job)
    report = asyncio.run(_fetch(run))
    text = json.dumps(report, indent=1)
    if output is None:
        print(text)
        return
    try:
        write_whole(output, text + "\n")
    except OSError as error:
        raise UsageError(f"--output: {output}: {error.strerror}") from error
    steps = report["steps"]["committed"]
    print(f"{run.name}: {report['state']}, {steps} steps committed; report written to {output}")


async def _fetch(run: runs.Run) -> dict[str, Any]:
    async with run.connect() as api:
        return dict(await api.fetch(run.job, "report"))
