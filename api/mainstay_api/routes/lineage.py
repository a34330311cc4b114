"""For people: a job's forks, and the permission to make lost stages anew from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict

from mainstay_api import examples
from mainstay_api.deps import GuardedRoute, PersonDep, TransactionsDep, UidDep, require_person
from mainstay_api.long_work import long_json
from mainstay_api.problems import ProblemError
from mainstay_api.summary import show_job
from mainstay_api.transactions import Transactions
from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_MEMBERS, MAX_NAME, Count, Index, Longest, cut
from mainstay_core.base.ids import JobUid
from mainstay_core.coordinator.events import ApproximationAllowed, ApproximationWithdrawn
from mainstay_core.coordinator.lineage import list_keys, show_lineage
from mainstay_core.coordinator.permission import NotApplicableError, Verdict, judge_permission
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.checkpoint_manifest import shown
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey

router = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    dependencies=[Depends(require_person)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)


_WOULD_AHEAD = {
    "would": "a permission ahead of the loss, for one recovery of stages 0 to 2 that would lose "
    "more than 50 steps otherwise: the job is approximate from there on. Now it would go back to "
    "the checkpoint of step 100, and lose 20 steps",
    "stages": [0, 1, 2],
    "lost_steps": 20,
    "why_not": [],
}
_AHEAD: examples.Responses = {
    200: {
        "description": "What the permission would come to, with dry_run; else the job, and what "
        "was allowed",
        "content": {"application/json": {"example": _WOULD_AHEAD}},
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPermission:
    """A permission for the approximate recovery that the job waits for."""

    # A restriction that is not understood must not be left out: what is allowed would be more.
    __pydantic_config__ = ConfigDict(extra="forbid")

    dry_run: bool = False
    """Whether only to say what it would come to."""
    stages: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)] | None = None
    """The stages that may be made anew: all that are lost. Left out: whichever are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPermissionAhead:
    """A permission for one approximate recovery that is still to come, within a limit."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    after_lost_steps: Count
    """The most steps that the job gives up rather than use it."""
    dry_run: bool = False
    """Whether only to say what it would come to."""
    stages: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)] | None = None
    """The stages that may be made anew; a loss of any other does not use it. Left out: all."""


@router.get("/{job}/lineage", responses=examples.LINEAGE)
async def show_forks(uid: UidDep, transactions: TransactionsDep) -> Response:
    """The forks that the job's states contain, and what each stage could be made anew from now."""
    state = await transactions.load(uid)
    ledger = await fetch_outcomes(transactions, state)
    return await long_json(lambda: codec.encode(show_lineage(state, ledger)))


async def fetch_outcomes(
    transactions: Transactions, state: CoordinatorState
) -> dict[LedgerKey, LedgerEntry]:
    """Return the ledger's entries that tell what came of a job's forks."""
    return await transactions.store.fetch_ledger(state.config.job, list_keys(state.history))


@router.post("/{job}/approximate", responses=examples.APPROXIMATE)
async def allow_approximation(
    uid: UidDep, transactions: TransactionsDep, caller: PersonDep, body: NewPermission
) -> JSONResponse:
    """Allow that lost stages are made anew from others, for the recovery that the job waits for.

    The job's policy stays as it is. 409 with the ladder's sentences where it would have no effect.
    """
    return await _allow(uid, transactions, caller.username, body, None)


# It is no field of the other body: an api of a version before would not know that, and grant a
# permission without a limit.
@router.post("/{job}/approximate/ahead", responses=_AHEAD)
async def allow_approximation_ahead(
    uid: UidDep, transactions: TransactionsDep, caller: PersonDep, body: NewPermissionAhead
) -> JSONResponse:
    """Allow that stages that are lost later are made anew from others, in one recovery.

    It is the next one that would lose more than after_lost_steps otherwise. The job's policy stays
    as it is. 409 where it would have no effect.
    """
    return await _allow(uid, transactions, caller.username, body, body.after_lost_steps)


async def _allow(
    uid: JobUid,
    transactions: Transactions,
    who: str,
    body: NewPermission | NewPermissionAhead,
    after_lost_steps: int | None,
) -> JSONResponse:
    """Return the job with a permission; after a dry run, what it would come to."""
    if body.dry_run:
        state = await transactions.load(uid)
        verdict = judge_permission(state, body.stages, transactions.now_s(), after_lost_steps)
        if not verdict.applies:
            raise _refusal(verdict)
        return JSONResponse(_show(verdict))
    event = ApproximationAllowed(
        who=_name(who), stages=body.stages, after_lost_steps=after_lost_steps
    )
    return await _apply(uid, transactions, event, "allowed")


@router.post("/{job}/approximate/withdraw", responses=examples.WITHDRAWN)
async def withdraw_approximation(
    uid: UidDep, transactions: TransactionsDep, caller: PersonDep
) -> JSONResponse:
    """Take back what was allowed, as far as no plan has used it yet; 409 where nothing is left."""
    event = ApproximationWithdrawn(who=_name(caller.username))
    return await _apply(uid, transactions, event, "withdrawn")


async def _apply(
    uid: JobUid,
    transactions: Transactions,
    event: ApproximationAllowed | ApproximationWithdrawn,
    name: str,
) -> JSONResponse:
    """Return the job after an event, and under a name what came of it."""
    try:
        outcome = await transactions.apply(uid, event)
    except NotApplicableError as error:
        raise _refusal(error.verdict) from error
    shown = show_job(outcome.state, transactions.now_s())
    return JSONResponse({**shown, name: outcome.reason})


def _name(username: str) -> str:
    """Return a caller's name as messages may have it: terminals show them."""
    return cut(shown(username), MAX_NAME)


def _show(verdict: Verdict) -> dict[str, Any]:
    return {
        "would": verdict.reason,
        "stages": list(verdict.stages),
        "lost_steps": verdict.lost_steps,
        "why_not": list(verdict.why_not),
    }


def _refusal(verdict: Verdict) -> ProblemError:
    return ProblemError(
        409,
        "not-approximate",
        verdict.reason,
        "GET /v1/jobs/{job}/lineage says what each stage could be made anew from; a permission is "
        "for a job that waits with a stage lost; POST /v1/jobs/{job}/approximate/ahead gives one "
        "for a loss that is still to come",
        why_not=list(verdict.why_not),
        stages=list(verdict.stages),
    )
