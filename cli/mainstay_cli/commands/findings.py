"""``mainstay findings``: what checks by re-execution have found in a job."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import UsageError
from mainstay_cli.commands.arguments import AS_JSON, JOB
from mainstay_cli.local import runs
from mainstay_cli.views.progress import one_line
from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.wire.findings import FindingsPage, describe_counts

HELP = """List wrong results that a job's checks (spec.detection.dmr) and witnesses \
(spec.detection.witness) have found.

Example: mainstay findings demo; kubectl mainstay findings llama-tiny --last 5"""
MAX_SHOWN = 3
"""Findings in a status, the newest."""


def show(
    job: JOB = None,
    last: Annotated[int, typer.Option(help="Only so many, the newest.", min=1)] = 100,
    as_json: AS_JSON = False,
) -> None:
    """Print the findings of a job, running or ended.

    Raises:
        UsageError: there is no such job, or it has ended without a report.
    """
    told, is_checked = _fetch(runs.find(job))
    page = read_page(told)
    if as_json:
        print(json.dumps(codec.encode(page), indent=1))
        return
    print(render(page, last, is_checked=is_checked))


def read_page(told: Any) -> FindingsPage:
    """Return findings from the JSON of the api or of a report; none if it says nothing of them.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        return codec.decode(FindingsPage, told or {}, "findings")
    except MalformedError as error:
        raise UsageError(f"what is said of findings is not understood: {error}") from error


def render(page: FindingsPage, last: int, *, is_checked: bool) -> str:
    """Return findings as text: how many, then a line for each of the newest.

    Args:
        page: all that are known.
        last: at most so many lines.
        is_checked: whether the job executes anything twice.
    """
    if not is_checked and not page.counts:
        return (
            "nothing is checked: spec.detection.dmr.mode is Off, and there is no "
            "spec.detection.witness"
        )
    lines = [describe_counts(page)]
    lines += [
        f"{datetime.fromtimestamp(kept.told.at_s):%H:%M:%S}  {one_line(kept.told.describe())}"
        for kept in page.findings[-last:]
    ]
    return "\n".join(lines)


def describe_checks(job: dict[str, Any], told: Any) -> list[str]:
    """Return what a status says of a job's checks; nothing of one without.

    Args:
        job: as the api or a report shows it.
        told: its findings as JSON; None if there is nothing to say.
    """
    if not job.get("dmr_coverage"):
        return []
    page = read_page(told)
    lines = [f"checks: {describe_counts(page)}; {job['dmr_coverage']}"]
    return lines + [f"  {one_line(k.told.describe())}" for k in page.findings[-MAX_SHOWN:]]


def _fetch(run: runs.Run) -> tuple[Any, bool]:
    """Return (findings as JSON, whether the job has checks)."""
    if run.is_running():
        return asyncio.run(_fetch_live(run))
    report = runs.read_report(run)
    return report.get("findings"), bool(report.get("dmr_coverage"))


async def _fetch_live(run: runs.Run) -> tuple[Any, bool]:
    async with run.connect() as api:
        job = await api.fetch(run.job)
        return await api.fetch(run.job, "findings"), bool(job.get("dmr_coverage"))
