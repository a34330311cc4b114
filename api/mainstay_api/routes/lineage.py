"""For people: a job's forks, and the permission to make lost stages anew from others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

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
from mainstay_core.wire.ledger import LedgerEntry, LedgerKey

router = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    dependencies=[Depends(require_person)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPermission:
    """A permission for one approximate recovery.

    It is the one that the job waits for, or, ahead of any loss, the next that would lose too many
    steps.
    """

    dry_run: bool = False
    """Whether only to say what it would come to."""
    stages: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)] | None = None
    """The stages that may be made anew: all that are lost. Left out: whichever are lost."""
    ahead: bool = False
    """Whether it is for a loss that is still to come, in a job that is whole."""
    after_lost_steps: Count | None = None
    """With ahead: the most steps that the job gives up rather than use it."""


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

    Or, with ahead, for the next one that would lose more than after_lost_steps otherwise. The job's
    policy stays as it is. 409 with the ladder's sentences where it would have no effect.
    """
    if body.ahead != (body.after_lost_steps is not None):
        raise ProblemError(
            422,
            "malformed",
            "after_lost_steps: is the most steps that the job gives up rather than use what is "
            "allowed ahead of a loss",
            "give both ahead: true and after_lost_steps, or neither",
        )
    if body.dry_run:
        state = await transactions.load(uid)
        now_s = transactions.now_s()
        verdict = judge_permission(state, body.stages, now_s, body.after_lost_steps)
        if not verdict.applies:
            raise _refusal(verdict)
        return JSONResponse(_show(verdict))
    event = ApproximationAllowed(
        who=cut(caller.username, MAX_NAME),
        stages=body.stages,
        after_lost_steps=body.after_lost_steps,
    )
    return await _apply(uid, transactions, event, "allowed")


@router.post("/{job}/approximate/withdraw", responses=examples.WITHDRAWN)
async def withdraw_approximation(
    uid: UidDep, transactions: TransactionsDep, caller: PersonDep
) -> JSONResponse:
    """Take back what was allowed, as far as no plan has used it yet; 409 where nothing is left."""
    event = ApproximationWithdrawn(who=cut(caller.username, MAX_NAME))
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
        "for a job that waits with a stage lost, or, with ahead: true and after_lost_steps, for a "
        "loss that is still to come",
        why_not=list(verdict.why_not),
        stages=list(verdict.stages),
    )
