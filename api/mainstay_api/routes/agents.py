"""For supervisors: register, heartbeat, facts, ledger, faults, plan and stream."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.responses import JSONResponse, StreamingResponse

from mainstay_api import examples
from mainstay_api.deps import ServiceDep, StreamsDep, UidDep, require_agent
from mainstay_api.problems import stale_facts
from mainstay_core import codec
from mainstay_core.coordinator_events import FactsLearnt, FaultFired, PodRegistered
from mainstay_core.facts import Fact, Heartbeat, PodRegistration
from mainstay_core.ids import PodUid
from mainstay_core.learning import UnregisteredPodError
from mainstay_core.messages import LedgerEntry

router = APIRouter(
    prefix="/v1/jobs/{job}/agent",
    tags=["agents"],
    dependencies=[Depends(require_agent)],
    responses=examples.PROBLEMS,
)

_STREAM_ID = re.compile(r"\d+-\d+")
_ENDED = frozenset({"complete", "failed", "stopped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was learnt, in order; told together, decided together."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Entries of the ledger."""

    entries: tuple[LedgerEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """Where an injected fault is about to be carried out."""

    pod: PodUid
    slot: int | None = None
    rank: str | None = None
    at_s: float


@router.post("/pods", responses=examples.REGISTERED)
async def register_pod(
    uid: UidDep, service: ServiceDep, registration: PodRegistration
) -> JSONResponse:
    """Introduce a pod. Repeating it is harmless; a pod that counted as gone is back."""
    await service.apply(uid, PodRegistered(registration=registration))
    plan, cursor, _ = await service.store.fetch_plan(uid)
    config = (await service.load(uid)).config
    return JSONResponse(
        {
            "config": codec.encode(config),
            "plan": json.loads(plan) if plan else None,
            "cursor": cursor,
        }
    )


@router.post("/heartbeats", responses=examples.BEAT)
async def take_heartbeat(uid: UidDep, service: ServiceDep, heartbeat: Heartbeat) -> JSONResponse:
    """Note that a pod is alive, and say which quorum is the newest."""
    reply = await service.beat(uid, heartbeat)
    if not reply.known:
        raise UnregisteredPodError(f"pod {heartbeat.pod} is unknown or counts as gone")
    return JSONResponse(
        {
            "quorum": json.loads(reply.quorum) if reply.quorum else None,
            "state": reply.phase if reply.phase in _ENDED else "running",
            "now_s": service.now_s(),
        }
    )


@router.post("/facts", responses=examples.PLAN_REPLY)
async def learn_facts(uid: UidDep, service: ServiceDep, body: Facts) -> JSONResponse:
    """Learn facts and answer with the current plan; 409 with it when all facts are stale."""
    outcome = await service.apply(uid, FactsLearnt(facts=body.facts))
    plan = codec.encode(outcome.state.plan) if outcome.state.plan else None
    if outcome.stale:
        raise stale_facts(outcome.reason, json.dumps(plan) if plan else None)
    return JSONResponse({"plan": plan})


@router.post("/ledger")
async def add_to_ledger(uid: UidDep, service: ServiceDep, body: Entries) -> dict[str, int]:
    """Mirror entries of the ledger. Telling one twice changes nothing."""
    await service.add_to_ledger(uid, body.entries)
    return {"entries": len(body.entries)}


@router.post("/faults/{fault}/fired")
async def fire_fault(uid: UidDep, service: ServiceDep, fault: str, body: Fired) -> dict[str, str]:
    """Ask whether an injected fault may be carried out; 409 when it has been already."""
    await service.apply(
        uid,
        FaultFired(fault=fault, pod=body.pod, slot=body.slot, rank=body.rank, at_s=body.at_s),
    )
    return {"fault": fault, "answer": "carry it out"}


@router.get("/plan", responses=examples.PLAN_REPLY)
async def fetch_plan(uid: UidDep, service: ServiceDep) -> JSONResponse:
    """The current plan."""
    plan, cursor, _ = await service.store.fetch_plan(uid)
    body: dict[str, Any] = {"plan": json.loads(plan) if plan else None, "cursor": cursor}
    return JSONResponse(body)


@router.get("/stream", response_class=StreamingResponse, responses=examples.STREAM)
async def open_stream(
    uid: UidDep,
    streams: StreamsDep,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Server-sent events ``plan``, ``inject`` and ``stop``; resumes after ``Last-Event-ID``."""
    known = last_event_id if last_event_id and _STREAM_ID.fullmatch(last_event_id) else None
    return StreamingResponse(
        streams.listen(uid, known),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
