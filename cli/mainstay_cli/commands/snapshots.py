"""``mainstay snapshots``: what snapshots would make of a job under failures, before it runs.

``ls`` and ``verify`` of a running job are in :mod:`mainstay_cli.commands.snapshot_copies`.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import ExitCode, UsageError
from mainstay_cli.base.files import read_text
from mainstay_cli.commands import snapshot_copies
from mainstay_cli.commands.arguments import AS_JSON
from mainstay_cli.views.snapshot_plan import (
    describe_built,
    describe_forecasts,
    describe_job,
    describe_section,
)
from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import count
from mainstay_core.snapshots.measures import MAX_PEERS
from mainstay_core.theory import paper_jobs
from mainstay_core.theory.built import plan_built_window
from mainstay_core.theory.built_memory import plan_built_stores
from mainstay_core.theory.built_replays import plan_built_policy
from mainstay_core.theory.forecasts import forecast_job, plan_needs
from mainstay_core.theory.paper import compare_paper
from mainstay_core.theory.profiles import JobProfile, read_profile
from mainstay_core.theory.traces import MAX_FAILURES, draw_poisson, read_trace

app = typer.Typer(
    help="Snapshots in memory: list and verify those of a running job (docs/snapshots.md), or plan "
    "them (docs/snapshots-theory.md).",
    no_args_is_help=True,
)
app.command("ls", help=snapshot_copies.LS_HELP)(snapshot_copies.ls)
app.command("verify", help=snapshot_copies.VERIFY_HELP)(snapshot_copies.verify)

MODELS = paper_jobs.TABLE_3 | paper_jobs.TABLE_7 | paper_jobs.FIGURE_11
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
MAX_LAG = 4096
"""Steps, as long as the longest window."""


@app.command(
    "plan",
    help="Forecast ETTR, stalls, recoveries and memory of a job with sparse snapshots, beside "
    "CheckFreq, Gemini and MoC: in closed form, and over simulated failures.\n\n"
    "--paper prints every number of the MoEvement paper beside ours, and why they differ; exit "
    "code 1 if one lies further off than it may.\n\n"
    "Examples:\n\n"
    "  mainstay snapshots plan --paper\n\n"
    "  mainstay snapshots plan --model DeepSeek-MoE --mtbf 1h,10m\n\n"
    "  mainstay snapshots plan --profile job.json --trace failures.csv --hours 6",
)
def plan(
    context: typer.Context,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's numbers beside ours; with --json alone.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="A job of the paper; DeepSeek-MoE if left out.", metavar="NAME"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A job of your own, JSON; docs/snapshots-theory.md.")
    ] = None,
    mtbf: Annotated[
        str, typer.Option(help="Mean times between failures, e.g. 2h,30m,90s.")
    ] = "2h,1h,30m,10m",
    trace: Annotated[
        Path | None, typer.Option(help="Failures as CSV with a column time_s, instead of --mtbf.")
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.01, max=100_000, help="Length of a simulated run.")
    ] = 12.0,
    runs: Annotated[
        int, typer.Option(min=1, max=10_000, help="Simulated runs for each of --mtbf.")
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="The first run's; the others count on.")] = 0,
    lag: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_LAG, help="Steps from a window's end until its copies have arrived."
        ),
    ] = 1,
    peers: Annotated[
        int, typer.Option(min=0, max=MAX_PEERS, help="Other pods that hold a copy.")
    ] = 2,
    as_json: AS_JSON = False,
) -> None:
    given = _given(context)
    if paper:
        if idle := [option for option in given if option not in ("--paper", "--json")]:
            raise UsageError(f"--paper has the paper's own jobs; leave {', '.join(idle)} out")
        _show_paper(as_json=as_json)
        return
    if trace and (idle := [o for o in given if o in ("--mtbf", "--runs", "--seed")]):
        raise UsageError(f"--trace has the failures of one run; leave {', '.join(idle)} out")
    job = _find_job(model, profile)
    horizon_s = hours * SECONDS["h"]
    window = plan_built_window(job)
    built = plan_built_policy(job, window, lag)
    forecasts = []
    for mtbf_s, traces_s, what in _failures(mtbf, trace, horizon_s, range(seed, seed + runs)):
        found = forecast_job(job, mtbf_s, traces_s, horizon_s, built)
        forecasts.append((mtbf_s, what, found))
    stores = plan_built_stores(job, window, lag=lag, peers=peers)
    if as_json:
        shown: dict[str, Any] = {"job": codec.encode(job), "needs": codec.encode(plan_needs(job))}
        shown |= {"window": window.reason, "stores": codec.encode(stores)}
        shown["forecasts"] = [
            {"mtbf_s": mtbf_s, "policies": codec.encode(found)} for mtbf_s, _, found in forecasts
        ]
        print(json.dumps(shown, indent=1))
        return
    print("\n".join(describe_job(job, plan_needs(job))))
    print("\n".join(describe_built(window, stores)))
    for _, what, found in forecasts:
        print(f"\n{what}")
        print("\n".join(describe_forecasts(found)))


def _given(context: typer.Context) -> list[str]:
    """Return the options that the user has given, in the order of the help."""
    sources = {
        p.opts[0]: context.get_parameter_source(p.name or "") for p in context.command.params
    }
    return [option for option, source in sources.items() if source and source.name != "DEFAULT"]


def _show_paper(*, as_json: bool) -> None:
    sections = compare_paper()
    if as_json:
        print(json.dumps(codec.encode(sections), indent=1))
    else:
        for section in sections:
            print("\n".join(describe_section(section)))
    rows = [row for section in sections for row in section.rows]
    judged = [row for row in rows if row.allowed is not None]
    far = [row for row in judged if not row.holds]
    if not as_json:
        print(
            f"{len(rows)} numbers; {len(judged) - len(far)} of {len(judged)} that are judged lie "
            "as near as they must"
        )
    if far:
        raise typer.Exit(ExitCode.FAILED)


def _find_job(model: str | None, profile: Path | None) -> JobProfile:
    if model is not None and profile is not None:
        raise UsageError("--model and --profile name one job each; give one of them")
    if profile is not None:
        try:
            return read_profile(read_text(profile, "--profile"))
        except InvalidSpecError as error:
            raise UsageError(f"{profile}: {error}") from error
    name = model or "DeepSeek-MoE"
    if name not in MODELS:
        raise UsageError(f"--model is {name!r}, must be one of {', '.join(MODELS)}")
    return MODELS[name]


def _failures(
    mtbf: str, trace: Path | None, horizon_s: float, seeds: range
) -> list[tuple[float, list[tuple[float, ...]], str]]:
    """Return mean time, traces and heading of each table.

    Raises:
        UsageError: a duration or the trace cannot be used.
    """
    if trace is not None:
        try:
            failures_s = read_trace(read_text(trace, "--trace"))
        except InvalidSpecError as error:
            raise UsageError(f"{trace}: {error}") from error
        within = [failure_s for failure_s in failures_s if failure_s < horizon_s]
        if not within:
            raise UsageError(f"{trace}: has no failure in the {horizon_s / 3600:g} h of --hours")
        heading = f"{trace.name}: {count(len(within), 'failure')} in {horizon_s / 3600:g} h"
        return [(horizon_s / len(within), [failures_s], heading)]
    found = []
    for part in mtbf.split(","):
        mtbf_s = _parse_duration(part)
        if len(seeds) * horizon_s / mtbf_s > MAX_FAILURES / 2:
            raise UsageError(
                f"--mtbf has {part.strip()!r}, which makes more than {MAX_FAILURES // 2} failures "
                f"in {count(len(seeds), 'run')} of {horizon_s / 3600:g} h; ask for fewer"
            )
        traces = [draw_poisson(random.Random(seed), mtbf_s, horizon_s) for seed in seeds]
        heading = f"a failure every {part.strip()}, {count(len(seeds), 'run')} of "
        found.append((mtbf_s, traces, f"{heading}{horizon_s / 3600:g} h"))
    return found


def _parse_duration(text: str) -> float:
    """Return seconds of a number with the unit s, m or h.

    Raises:
        UsageError: it is no such duration, or not above 0.
    """
    text = text.strip()
    try:
        seconds = float(text[:-1]) * SECONDS[text[-1:]]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"--mtbf has {text!r}, must be durations above 0 like 2h,30m,90s")
    return seconds
