"""``mainstay timeline``: what happened to a job and what was done about it."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

from mainstay_cli.commands.arguments import AS_JSON, JOB
from mainstay_cli.local import runs
from mainstay_cli.views.lineage import describe_exactness
from mainstay_cli.views.progress import one_line
from mainstay_core.base.words import count, printable_lines
from mainstay_core.wire.recoveries import STAGES, name_log

HELP = """Show what happened to a job: recoveries with reason and their five times.

Example: mainstay timeline demo; kubectl mainstay timeline llama-tiny"""


def show(job: JOB = None, as_json: AS_JSON = False) -> None:
    """Print the timeline of a job, running or ended.

    Raises:
        UsageError: there is no such job.
    """
    recoveries, events = _fetch(runs.find(job))
    if as_json:
        print(json.dumps({"recoveries": recoveries, "events": events}, indent=1))
        return
    print(render_events(events))
    print(render(recoveries))


def render_events(events: list[dict[str, Any]]) -> str:
    """Return events as text: time of day here, seconds since the first, what happened."""
    if not events:
        return "no events"
    first_s = float(events[0]["at_s"])
    return "\n".join(
        f"{datetime.fromtimestamp(event['at_s']):%H:%M:%S}  +{event['at_s'] - first_s:8.3f} s  "
        f"{event['type']:<8} {one_line(event['message'])}"
        for event in events
    )


def render(recoveries: list[dict[str, Any]]) -> str:
    """Return recoveries as text: method, exactness, five times, steps lost, and the reason."""
    if not recoveries:
        return "no recoveries"
    lines = []
    for number, recovery in enumerate(recoveries, 1):
        exact = describe_exactness(recovery)
        times = recovery.get("times") or recovery
        stages = "  ".join(f"{name} {_seconds(times.get(f'{name}_s'))}" for name in STAGES)
        later = _seconds(recovery.get("first_commit_after_s"))
        lines += [
            f"{number}. step {recovery.get('from_step', '?')}: {one_line(recovery.get('fault'))}",
            f"   {recovery.get('method')} ({exact}): {one_line(recovery.get('reason'))}",
            f"   {stages}",
            f"   next commit {later} later than normal, steps lost = {recovery.get('lost_steps')}",
            *(f"   {_replay_line(replay)}" for replay in recovery.get("replays", ())),
        ]
    return printable_lines("\n".join(lines))


def _replay_line(replay: dict[str, Any]) -> str:
    """Return how one position was made anew: kind, states, steps, cost."""
    damaged, log = replay["num_damaged"], name_log(replay["kind"])
    return (
        f"replayed s{replay['stage']}.i{replay['inner']} from {log}: states of "
        f"versions {replay['first']} to {replay['last']}, {count(replay['steps'], 'step')} of "
        f"{replay['planned_steps']} planned up to version {replay['version']} in "
        f"{replay['seconds']:.3f} s"
        + (f", {count(damaged, 'copy', 'copies')} found damaged" if damaged else "")
    )


def _fetch(run: runs.Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (recoveries, events), from the api while it lives and from the report afterwards."""
    if run.is_running():
        return asyncio.run(_fetch_live(run))
    report = runs.read_report(run)
    return list(report.get("recoveries", [])), list(report.get("events", []))


async def _fetch_live(run: runs.Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    async with run.connect() as api:
        recoveries = await api.fetch(run.job, "recoveries")
        events = await api.fetch(run.job, "events")
    return list(recoveries), list(events)


def _seconds(value: object) -> str:
    return f"{value:.3f} s" if isinstance(value, int | float) else "-"
