"""``mainstay dmr``: plans which operators of a stage are executed again, from its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mainstay_cli.base.exits import UsageError
from mainstay_cli.base.files import read_text, write_whole
from mainstay_cli.commands.arguments import AS_JSON
from mainstay_cli.views.dmr_plan import describe_choice, describe_plan
from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote
from mainstay_core.dmr.coverage import UncoveredError, verify_plan
from mainstay_core.dmr.plan import Plan, Policy, read_plan
from mainstay_core.dmr.profiles import Profile, read_profile
from mainstay_core.dmr.static import plan_checks
from mainstay_core.job.types import read_quantity

app = typer.Typer(
    help="Plan checks by re-execution (dual modular redundancy) from a stage's profile, and "
    "explain a plan (docs/dmr.md). Nothing executes these plans yet.",
    no_args_is_help=True,
)
PROFILE = Annotated[Path, typer.Argument(help="Profile of a stage, JSON; docs/dmr.md.")]


@app.command(
    "plan",
    help="Plan how and when each operator of a stage is executed again, and show the plan.\n\n"
    "Examples:\n\n"
    "  mainstay dmr plan examples/dmr-profile.json\n\n"
    "  mainstay dmr plan profile.json --policy paper --budget 2Gi --out plan.json",
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
    as_json: AS_JSON = False,
) -> None:
    stage = _load_profile(profile)
    most_bytes = None if budget is None else _read_budget(budget, stage)
    planned = plan_checks(stage, policy, most_bytes)
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


def _load_profile(path: Path) -> Profile:
    try:
        return read_profile(read_text(path, "PROFILE"))
    except InvalidSpecError as error:
        raise UsageError(f"{path}: {error}") from error


def _load_plan(path: Path, profile: Profile) -> Plan:
    """Return a plan that keeps the rule of coverage for a profile.

    Raises:
        UsageError: it is no plan, of another job, or refused by the rule.
        OSError: it cannot be read.
    """
    try:
        plan = read_plan(read_text(path, "PLAN"))
        verify_plan(profile, plan)
    except (InvalidSpecError, UncoveredError) as error:
        raise UsageError(f"{path}: {error}") from error
    return plan


def _read_budget(text: str, profile: Profile) -> int:
    try:
        size = read_quantity("--budget", text)
    except InvalidSpecError as error:
        raise UsageError(str(error)) from error
    if size > profile.budget_bytes:
        raise UsageError(
            f"--budget: is {quote(text)}, must be at most the profile's budget_bytes, "
            f"{profile.budget_bytes}"
        )
    return size
