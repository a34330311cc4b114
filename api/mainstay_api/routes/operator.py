"""For the operator alone: deletes the record of a job."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from mainstay_api import examples
from mainstay_api.deps import GuardedRoute, TransactionsDep, require_operator
from mainstay_core.base.ids import JobUid

router = APIRouter(
    prefix="/v1/jobs",
    tags=["operator"],
    dependencies=[Depends(require_operator)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)


@router.delete("/{job}", responses=examples.DELETED)
async def delete_job(job: str, transactions: TransactionsDep) -> JSONResponse:
    """Stop a job and forget everything about it; its uid is never taken up again.

    Named by its uid. Repeating it is harmless, as is a uid that never was.
    """
    return JSONResponse({"uid": job, "deleted": await transactions.delete(JobUid(job))})
