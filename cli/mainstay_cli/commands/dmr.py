"""``mainstay dmr``: profiles a stage, and plans which of its operators are executed again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mainstay_cli.base.exits import UsageError
from mainstay_cli.base.files import check_place, read_text, write_whole
from mainstay_cli.commands.arguments import AS_JSON, JOB
from mainstay_cli.local import manifests, profiling, runs
from mainstay_cli.views.dmr_plan import (
    describe_choice,
    describe_plan,
    describe_profile,
    describe_stages,
    describe_sweep,
)
from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import printable_lines, quote
from mainstay_core.dmr.coverage import UncoveredError, verify_plan
from mainstay_core.dmr.plan import Plan, Policy, read_plan
from mainstay_core.dmr.profiles import WHOLE_WAY, Profile, read_profile
from mainstay_core.dmr.static import plan_checks
from mainstay_core.job.types import read_quantity
from mainstay_core.wire.profiling import DEFAULT_STEPS, MAX_STEPS

MAX_BUDGET_BYTES = 2**53
DEFAULT_BUDGET = "1Gi"
SHOW_HELP = """Show how the checks of a job's stages are planned and executed, running or ended.

Example: mainstay dmr show demo; kubectl mainstay dmr show llama-tiny"""
MAX_WINDOW_S = 86_400.0

app = typer.Typer(
    help="Profile a stage of a job, plan checks by re-execution (dual modular redundancy) from "
    "that, explain a plan, and show which checks a job executes (docs/dmr.md).",
    no_args_is_help=True,
)
PROFILE = Annotated[Path, typer.Argument(help="Profile of a stage, JSON; docs/dmr.md.")]


@app.command(
    "profile",
    help="Record the operators of a stage: a process with torch takes a few micro-batches through "
    "it, on the job's device. It is alone, so the lengths of waits are told to it.\n\n"
    "Example: mainstay dmr profile examples/quickstart.yaml --stage 1 --window-s 0.002 "
    "--out profile.json",
)
def profile(
    job: Annotated[Path, typer.Argument(help="A TrainingJob in YAML.")],
    out: Annotated[Path, typer.Option(help="Write the profile into this file.")],
    stage: Annotated[int, typer.Option(min=0, help="Stage of the job.")] = 0,
    way: Annotated[
        str,
        typer.Option(
            help="Parts of the stage through which the micro-batches pass. With pipeline.order "
            "Swapped the first stage also has the way embedding-layers, the last one layers-head."
        ),
    ] = WHOLE_WAY,
    steps: Annotated[
        int, typer.Option(min=1, max=MAX_STEPS, help="Micro-batches; times are their median.")
    ] = DEFAULT_STEPS,
    window_s: Annotated[
        float,
        typer.Option(
            "--window-s",
            min=0.0,
            max=MAX_WINDOW_S,
            help="Seconds of each wait for another stage or replica, to plan for.",
        ),
    ] = 0.0,
    budget: Annotated[
        str,
        typer.Option(
            help="Memory of a rank that checks may retain, e.g. 2Gi; divided by the micro-batches "
            "that the stage has in flight.",
            metavar="QUANTITY",
        ),
    ] = DEFAULT_BUDGET,
) -> None:
    question = profiling.Wanted(
        stage=stage, way=way, steps=steps, window_s=window_s, budget_bytes=_read_budget(budget)
    )
    check_place(out, "--out")
    recorded = profiling.record(manifests.load_job(job), question)
    write_whole(out, codec.dumps(recorded) + "\n")
    print("\n".join([f"wrote {out}", *describe_profile(recorded)]))


@app.command(
    "plan",
    help="Plan how and when each operator of a stage is executed again, and show the plan.\n\n"
    "Examples:\n\n"
    "  mainstay dmr plan examples/dmr-profile.json\n\n"
    "  mainstay dmr plan profile.json --policy paper --budget 2Gi --out plan.json\n\n"
    "  mainstay dmr plan profile.json --out stage-0.json\n\n"
    "  mainstay dmr plan all.json --sweep half.json --sweep none.json",
)
def plan(
    profile: PROFILE,
    policy: Annotated[
        Policy, typer.Option(help="Ours, or the rules that SpareTrain's paper gives.")
    ] = Policy.OWN,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory that checks may retain, e.g. 2Gi; at most the profile's, which "
            "holds if left out.",
            metavar="QUANTITY",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan into this file, too.")] = None,
    replays: Annotated[
        bool,
        typer.Option(help="Whether segments of blocks are replayed together (SpareTrain's AGC)."),
    ] = True,
    sweep: Annotated[
        list[Path] | None,
        typer.Option(
            help="A profile of the same stage with another runtime.recomputeShare, to compare; "
            "may be given several times."
        ),
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    stage = _load_profile(profile)
    if sweep:
        if as_json or out is not None:
            raise UsageError("--sweep compares plans: leave --json and --out away")
        print("\n".join(_compare([profile, *sweep], policy, budget, replays=replays)))
        return
    most_bytes = None if budget is None else _read_budget(budget, stage)
    planned = plan_checks(stage, policy, most_bytes, replays=replays)
    text = codec.dumps(planned) + "\n"
    if out is not None:
        write_whole(out, text)
    print(text.rstrip() if as_json else "\n".join(describe_plan(stage, planned)))


@app.command(
    "explain",
    help="Check a plan against the rule of coverage, and explain it: share of operator time by "
    "method, what is exposed, what is naive and why.\n\n"
    "Example: mainstay dmr explain plan.json profile.json --operator 0/weight/3",
)
def explain(
    plan: Annotated[Path, typer.Argument(help="Plan that `mainstay dmr plan --out` has written.")],
    profile: PROFILE,
    operator: Annotated[
        str | None, typer.Option(help="Explain this one alone, e.g. 0/weight/3.")
    ] = None,
) -> None:
    stage = _load_profile(profile)
    planned = _load_plan(plan, stage)
    if operator is None:
        print("\n".join(describe_plan(stage, planned)))
        return
    choice = planned.choice_of.get(operator)
    if choice is None:
        raise UsageError(
            f"--operator is {quote(operator)}, must be one of the profile's, like "
            f"{next(iter(planned.choice_of), 'none: the profile has no operators')}"
        )
    print("\n".join(describe_choice(stage, planned, choice)))


@app.command("show", help=SHOW_HELP)
def show(job: JOB = None, as_json: AS_JSON = False) -> None:
    told = _fetch(runs.find(job))
    if as_json:
        shown = {"coverage": told.get("dmr_coverage"), "stages": told.get("checks", [])}
        print(json.dumps(shown, indent=1))
        return
    lines = describe_stages(told.get("dmr_coverage") or "", told.get("checks", []))
    print(printable_lines("\n".join(lines)))


def _fetch(run: runs.Run) -> dict[str, Any]:
    """Return a job as the api or its report shows it.

    Raises:
        UsageError: it has ended without a report.
    """
    if run.is_running():
        return asyncio.run(_fetch_live(run))
    return runs.read_report(run)


async def _fetch_live(run: runs.Run) -> dict[str, Any]:
    async with run.connect() as api:
        found: dict[str, Any] = await api.fetch(run.job)
        return found


def _compare(
    paths: Sequence[Path], policy: Policy, budget: str | None, *, replays: bool
) -> list[str]:
    """Return a table of the plans of several profiles.

    Raises:
        UsageError: they are not of one stage of one job.
    """
    profiles = [_load_profile(path) for path in paths]
    for path, profile in zip(paths, profiles, strict=True):
        for what in ("fingerprint", "stage", "way"):
            mine, first = getattr(profile, what), getattr(profiles[0], what)
            if mine != first:
                raise UsageError(
                    f"--sweep: {path} has {what} {mine}, must have {first} as {paths[0]}"
                )
    planned = []
    for path, profile in zip(paths, profiles, strict=True):
        most_bytes = None if budget is None else _read_budget(budget, profile)
        plan = plan_checks(profile, policy, most_bytes, replays=replays)
        planned.append((str(path), profile, plan))
    return describe_sweep(planned)


def _load_profile(path: Path) -> Profile:
    try:
        return read_profile(read_text(path, "PROFILE"))
    except InvalidSpecError as error:
        raise UsageError(f"{path}: {error}") from error


def _load_plan(path: Path, profile: Profile) -> Plan:
    """Return a plan that keeps the rule of coverage for a profile.

    Raises:
        UsageError: it cannot be read, is no plan, of another job, or refused by the rule.
    """
    try:
        plan = read_plan(read_text(path, "PLAN"))
        verify_plan(profile, plan)
    except (InvalidSpecError, UncoveredError) as error:
        raise UsageError(f"{path}: {error}") from error
    return plan


def _read_budget(text: str, profile: Profile | None = None) -> int:
    most = MAX_BUDGET_BYTES if profile is None else profile.budget_bytes
    try:
        size = read_quantity("--budget", text)
    except InvalidSpecError as error:
        raise UsageError(str(error)) from error
    if size > most:
        whose = "" if profile is None else "the profile's budget_bytes, "
        raise UsageError(f"--budget: is {quote(text)}, must be at most {whose}{most}")
    return size
