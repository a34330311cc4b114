"""``mainstay status``: where a job stands, with ranks, slots and pids."""

from __future__ import annotations

import asyncio
import json
import textwrap
from typing import Any

from mainstay_cli.commands.findings import describe_checks
from mainstay_cli.commands.operations import describe_leaving
from mainstay_cli.local import runs
from mainstay_cli.views.lineage import describe_prospects, read_lineage
from mainstay_cli.views.progress import describe_crash, describe_recovery, one_line
from mainstay_cli.views.snapshots import describe_summary
from mainstay_core.base.words import count, printable, printable_lines
from mainstay_core.wire.reinitialisation import describe_course


def show(job: str | None, *, as_json: bool) -> None:
    """Print the status of a job; of one that has ended and left its api, how it ended.

    Raises:
        UsageError: there is no such job.
    """
    run = runs.find(job)
    status = asyncio.run(fetch(run)) if run.is_running() else _ended(run)
    print(json.dumps(status, indent=1) if as_json else render(status))


def render(status: dict[str, Any]) -> str:
    """Return a status as text, as a terminal may show it."""
    job = status["job"]
    quorum = job.get("quorum")
    where = f", quorum q{quorum['id']}" if quorum else ""
    step = job.get("step")
    committed = f", {count(step, 'step')} committed" if step is not None else ""
    lines = [f"{job['name']}: {job['state']}{committed}{where}"]
    if job.get("approximate_since") is not None:
        lines.append(f"  {describe_course(job['approximate_since'])}")
    lines += describe_checking(job.get("checking") or {})
    lines += [f"  {printable(taint['told'])}" for taint in job.get("tainted") or []]
    checkpoint = job.get("checkpoint") or {}
    if checkpoint.get("step"):
        lines.append(f"  newest checkpoint: step {checkpoint['step']}")
    if checkpoint.get("problem"):
        lines.append(f"  {printable(checkpoint['problem'])}")
    if job.get("reason"):
        lines.append(textwrap.indent(job["reason"].strip(), "  "))
    if job.get("replicas_wanted") is not None:
        lines.append(f"  whole: {job['replicas']} of {count(job['replicas_wanted'], 'replica')}")
    lines += [f"  {describe_leaving(leaving)}" for leaving in job.get("leaving", [])]
    lines += [f"  {describe_held_back(held)}" for held in job.get("held_back", [])]
    lines += describe_protections(job)
    if status.get("lineage"):
        lines += describe_prospects(read_lineage(status["lineage"]))
    if status.get("snapshots"):
        lines += [f"  {line}" for line in describe_summary(status["snapshots"])]
    lines += [f"  {line}" for line in describe_checks(job, status.get("findings"))]
    crash = describe_crash(job.get("crash"))
    lines += [textwrap.indent(crash, "  ")] if crash else []
    members = status.get("members") or []
    if members:
        lines.append(f"  {'rank':<10} {'slot':<28} {'pid':>8}  {'phase':<10} {'step':>6}")
    lines += [
        f"  {member['rank']:<10} {member['slot']:<28} {member['pid'] or '-':>8}  "
        f"{member['phase']:<10} {member['step']:>6}"
        for member in members
    ]
    lines += [f"  {describe_recovery(recovery)}" for recovery in status.get("recoveries", [])]
    return printable_lines("\n".join(lines))


def describe_protections(job: dict[str, Any]) -> list[str]:
    """Return what protects a job, and a line for each protection that it lacks."""
    protections = job.get("protections") or []
    if not protections:
        return []
    given = ", ".join(p["name"] for p in protections if p["given"])
    width = max(len(p["name"]) for p in protections)
    lacking = [f"    no {p['name']:<{width}}  {p['why']}" for p in protections if not p["given"]]
    return [f"  protected by ({job['entry']}): {given}", *lacking]


def describe_checking(checking: dict[str, Any]) -> list[str]:
    """Return what is checked, where anything is, and what is wanted from the next plan on."""
    wanted = checking.get("wanted")
    is_on = checking.get("mode", "Off") != "Off" or checking.get("witness_every_steps")
    told = [f"  checks in force: {checking['told']}"] if is_on or wanted else []
    return [*told, *([f"    wanted, from the next plan on: {wanted}"] if wanted else [])]


def describe_held_back(held: dict[str, Any]) -> str:
    """Return the line of a slot or domain that gets no place for a while."""
    return (
        f"{held['what']} is held back for {held['left_s']:.0f} s: it ended "
        f"{count(held['failures'], 'time')} in a row without a commit, "
        f"last: {one_line(held['reason'])}"
    )


async def fetch(run: runs.Run) -> dict[str, Any]:
    """Return what the api says of a job.

    Raises:
        ApiError: it does not answer, or refuses.
    """
    async with run.connect() as api:
        summary = await api.fetch(run.job, "summary")
        job = await api.fetch(run.job)
        # Of every stage: only where the job may make one anew, or one did.
        tells = job.get("approximate") or job.get("ahead")
        tells = tells or job.get("approximate_since") is not None
        return {
            "running": True,
            "job": job,
            "lineage": await api.fetch(run.job, "lineage") if tells else None,
            "members": await api.fetch(run.job, "members"),
            "recoveries": await api.fetch(run.job, "recoveries"),
            "snapshots": summary.get("stores"),
            "findings": summary.get("findings"),
            **run.describe_place(),
        }


def _ended(run: runs.Run) -> dict[str, Any]:
    """Return what the report of an ended run says; a run that was killed left none."""
    report = run.load_report()
    return {
        "running": False,
        "job": {
            "uid": run.job,
            "name": run.name,
            "state": report.get("state", "ended without a report"),
            "reason": report.get("reason", ""),
            "step": report.get("steps", {}).get("committed"),
            "approximate_since": report.get("approximate_since"),
            "tainted": report.get("tainted", []),
            "crash": report.get("crash"),
            "entry": report.get("entry"),
            "protections": report.get("protections", []),
            "dmr_coverage": report.get("dmr_coverage"),
        },
        "findings": report.get("findings"),
        "members": [],
        "recoveries": report.get("recoveries", []),
        **run.describe_place(),
    }
