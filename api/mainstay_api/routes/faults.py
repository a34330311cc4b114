"""For people and the provider: faults to inject, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse

from mainstay_api import examples
from mainstay_api.deps import (
    GuardedRoute,
    SettingsDep,
    TransactionsDep,
    UidDep,
    require_injection,
    require_operator,
    require_person,
)
from mainstay_api.run_report import show_fault
from mainstay_core.base.bounds import MAX_FAULTS, Document, Instant, Longest, Name
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.events import FaultFired, FaultsRequested
from mainstay_core.coordinator.injection import list_faults
from mainstay_core.coordinator.siting import spare_pods
from mainstay_core.faults import files

router = APIRouter(
    prefix="/v1/jobs/{job}",
    tags=["faults"],
    dependencies=[Depends(require_person)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFaults:
    """Faults for a running job, as in a faults file.

    A fault without a step fires at the next one.
    """

    faults: Annotated[list[Document], Longest(MAX_FAULTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFired:
    """A fault on the api or Redis that is about to be carried out."""

    process: Name
    at_s: Instant


@router.get("/faults", responses=examples.FAULTS)
async def show_faults(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """All faults of the job, with what became of each."""
    state = await transactions.load(uid)
    return JSONResponse([show_fault(status, state) for status in list_faults(state)])


@router.post("/faults", status_code=201, responses=examples.FAULTS)
async def request_faults(
    uid: UidDep, transactions: TransactionsDep, settings: SettingsDep, body: NewFaults
) -> JSONResponse:
    """Inject faults into the running job; 422 for what can never fire.

    Faults on processes of the control plane are carried out by a local run only. 403 where nobody
    has allowed faults.
    """
    require_injection(settings)
    state = await transactions.load(uid)
    job = files.Job(
        # Scaled since it was created, perhaps: replicas are those of now.
        shape=replace(state.shape, replicas=state.wanted),
        num_spares=max(state.config.spares, len(spare_pods(state))),
        known={fault.id: fault for fault in state.config.faults},
        at_step=state.step,
        local=settings.auth == "token",
        has_snapshots=state.config.snapshots is not None,
    )
    faults = files.parse_more(body.faults, job)
    if not faults:
        raise InvalidSpecError("faults", "is empty; give one fault or more")
    state = (await transactions.apply(uid, FaultsRequested(faults=faults))).state
    wanted = {fault.id for fault in faults}
    shown = [show_fault(s, state) for s in list_faults(state) if s.fault.id in wanted]
    return JSONResponse(shown, status_code=201)


@router.post("/provider/faults/{fault}/fired", dependencies=[Depends(require_operator)])
async def fire_process_fault(
    uid: UidDep, transactions: TransactionsDep, fault: str, body: ProcessFired
) -> dict[str, str]:
    """Ask whether a fault on a process may be carried out; 409 when it has been already."""
    event = FaultFired(fault=fault, pod=PodUid(body.process), slot=None, rank=None, at_s=body.at_s)
    await transactions.apply(uid, event)
    return {"fault": fault, "answer": "carry it out"}
