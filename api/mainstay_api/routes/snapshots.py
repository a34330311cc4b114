"""For people: what the snapshots of a job hold, and whether the copies are good."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from mainstay_api import examples
from mainstay_api.deps import GuardedRoute, TransactionsDep, UidDep, require_person
from mainstay_api.long_work import long_json
from mainstay_api.problems import ProblemError
from mainstay_api.snapshots import show_check, show_snapshots
from mainstay_core.coordinator.state import CoordinatorState

router = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    dependencies=[Depends(require_person)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)


@router.get("/{job}/snapshots", responses=examples.SNAPSHOTS)
async def show_held(uid: UidDep, transactions: TransactionsDep) -> Response:
    """What each pod's store of segments holds, and which losses each position survives."""
    state = _with_snapshots(await transactions.load(uid))
    stores = await transactions.store.fetch_stores(uid)
    return await long_json(show_snapshots, state, stores)


@router.post("/{job}/snapshots/check", responses=examples.CHECK)
async def check_all(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """Have every store read all its segments; ask for the outcome by the number in the answer."""
    _with_snapshots(await transactions.load(uid))
    return JSONResponse({"check": await transactions.store.want_check(uid)})


@router.get("/{job}/snapshots/check", responses=examples.CHECK)
async def show_outcome(uid: UidDep, transactions: TransactionsDep) -> Response:
    """What the newest check has found; ``waiting`` names the pods that have not answered yet.

    Once all have, their stores hear of the copies that were found damaged: these cover nothing.
    """
    state = _with_snapshots(await transactions.load(uid))
    wanted, checks = await transactions.store.fetch_checks(uid)
    shown, doubts = await asyncio.to_thread(show_check, state, wanted, checks)
    if doubts is not None:
        await transactions.store.put_doubts(uid, wanted, doubts)
    return await long_json(lambda: shown)


def _with_snapshots(state: CoordinatorState) -> CoordinatorState:
    """Return the state of a job with snapshots.

    Raises:
        ProblemError: it has none.
    """
    if state.config.snapshots is None:
        raise ProblemError(
            404,
            "no-snapshots",
            f"job {state.config.name} keeps no snapshots: spec.snapshots.enabled is false",
            "enable them in the TrainingJob before it is created",
        )
    return state
