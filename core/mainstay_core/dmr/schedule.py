"""Says what a trainer does of a plan: which checks wait, and for what, and which recomputes check.

Trainers execute single operators again while they wait for other stages, and compare the recomputes
of whole blocks with their forwards. Whatever a schedule does not name is executed again at once. So
no schedule leaves anything unchecked; a plan that asks for more than trainers can do is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.base.words import quote
from mainstay_core.dmr.coverage import verify_rule
from mainstay_core.dmr.plan import Method, Plan, read_plan, sum_totals
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.static import plan_checks

FIELD = "spec.detection.dmr.plan"
NEXT_RECV_B = "NEXT_RECV_B"
"""The wait behind a passage of the first stage: it waits for the gradient of another micro-batch,
and so in a wait that is the RECV_B of that one."""
STAGE = "{stage}"
"""Stands in the path of a plan's file for the number of the stage."""


class RefusedPlanError(MainstayError):
    """A plan that trainers cannot carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A check that waits."""

    window: str | None
    """In which it is executed at the latest; None: in whichever the dynamic planner has time."""
    expected_s: float
    """Of one execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The part of a plan that is not executed at once."""

    later: Mapping[str, Later]
    """By operator."""
    piggyback: frozenset[int]
    """Blocks, by their number in the model, whose recompute is compared with their forward."""
    shares: str
    """How operator time is checked, by method, for people."""


def schedule_of(profile: Profile, plan: Plan) -> Schedule:
    """Return what a trainer does of a plan.

    Args:
        profile: of the stage in this run.
        plan: keeps the rule of coverage for it.

    Raises:
        RefusedPlanError: a trainer cannot carry it out; the piece is named.
    """
    graph, later, piggyback = profile.graph, {}, set()
    for piece in plan.pieces:
        if piece.method is Method.PIGGYBACK:
            piggyback.add(graph.operators[graph.places[piece.operators[0]]].block)
            continue
        if piece.method not in (Method.INTER, Method.INTRA, Method.DYNAMIC):
            continue
        if len(piece.operators) > 1:
            raise RefusedPlanError(
                f"{piece.name} replays {len(piece.operators)} operators together, and trainers "
                "execute single ones alone; plan without: mainstay dmr plan --no-replays"
            )
        if piece.method is Method.INTRA:
            raise RefusedPlanError(
                f"{piece.name} waits for {piece.window}, a wait for inner ranks, in which trainers "
                "execute nothing"
            )
        (name,) = piece.operators
        expected_s = graph.operators[graph.places[name]].median_s
        later[name] = Later(window=piece.window, expected_s=expected_s)
    return Schedule(later=later, piggyback=frozenset(piggyback), shares=describe_shares(plan))


def describe_shares(plan: Plan) -> str:
    """Return the share of operator time by method, e.g. ``P 38 %, inter 40 %, naive 22 %``.

    Trainers check at once as well what a plan leaves unchecked, as its result does not count.
    """
    total_s = math.fsum(share.operator_s for share in plan.totals.shares)
    told: dict[Method, float] = {}
    for share in plan.totals.shares:
        method = Method.NAIVE if share.method is Method.NONE else share.method
        told[method] = told.get(method, 0.0) + share.operator_s
    return ", ".join(
        f"{method.value} {operator_s / total_s:.0%}".replace("%", " %")
        for method, operator_s in told.items()
        if operator_s > 0
    )


def plan_here(profile: Profile) -> tuple[Plan, Schedule]:
    """Plan a stage from the profile of its run, as far as trainers can carry it out."""
    plan = plan_checks(profile, replays=False)
    return plan, schedule_of(profile, plan)


def follow(profile: Profile, plan: Plan) -> tuple[Plan, Schedule]:
    """Take up a plan that was made from another profile of the same stage.

    Args:
        profile: of the stage in this run.
        plan: from a file.

    Returns:
        The plan with the times of this run, and what a trainer does of it.

    Raises:
        UncoveredError: it breaks the rule of coverage, or is another stage's.
        RefusedPlanError: a trainer cannot carry it out.
    """
    if plan.fingerprint == profile.fingerprint and plan.budget_bytes > profile.budget_bytes:
        raise RefusedPlanError(
            f"it retains up to {plan.budget_bytes} bytes of a micro-batch, and "
            f"detection.dmr.memory leaves {profile.budget_bytes} to each in flight; plan with "
            f"--budget {profile.budget_bytes}"
        )
    verify_rule(profile, plan)
    timed = replace(plan, totals=sum_totals(profile, plan.pieces, plan.choices))
    return timed, schedule_of(profile, timed)


def read_ordered_plan(text: bytes, path: str, fingerprint: str) -> Plan:
    """Return the plan of a file that a job names, if it is of the job.

    Args:
        text: of the file.
        path: of the file, for people.
        fingerprint: of the job.

    Raises:
        InvalidSpecError: it is torn, no plan, or of another fingerprint.
    """
    try:
        plan = read_plan(text)
    except InvalidSpecError as error:
        raise InvalidSpecError(FIELD, f"{path} is no plan that can be read: {error}") from error
    if plan.fingerprint != fingerprint:
        raise InvalidSpecError(
            FIELD,
            f"{path} is of the fingerprint {quote(plan.fingerprint)}, and this job has "
            f"{fingerprint}; make a plan from a profile of this job (mainstay dmr profile)",
        )
    return plan
