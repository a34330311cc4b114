"""For supervisors: register, heartbeat, facts, ledger, faults, plan and stream."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from mainstay_api import examples
from mainstay_api.auth import JobName, forbidden
from mainstay_api.deps import (
    AgentDep,
    GuardedRoute,
    HeldDep,
    PlanTextsDep,
    SettingsDep,
    StreamsDep,
    TransactionsDep,
    UidDep,
    may_still_listen,
    require_agent,
    require_injection,
)
from mainstay_api.direct import read_directly
from mainstay_api.facts import ToldEntry, ToldFact, check_entry, check_final
from mainstay_api.limits import TooManyError
from mainstay_api.plan_texts import with_plan
from mainstay_api.problems import ProblemError
from mainstay_core.base import codec
from mainstay_core.base.bounds import MAX_NAME, MAX_TOLD, Instant, Longest, Name, SlotIndex
from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.events import FaultFired
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.coordinator.state import is_gone
from mainstay_core.wire.api import HeldJob
from mainstay_core.wire.facts import Heartbeat, PodRegistration, read_fact
from mainstay_core.wire.findings import MAX_BATCH, ToldFinding
from mainstay_core.wire.stores import StoreStatus

router = APIRouter(
    prefix="/v1/jobs/{job}/agent",
    tags=["agents"],
    dependencies=[Depends(require_agent)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)

STREAMS_WAIT_S = 5.0
"""A pod that has too many streams which it does not read is asked to wait for so long."""
_STREAM_ID = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts in the order in which they were learnt; they are decided together."""

    facts: Annotated[tuple[ToldFact, ...], Longest(MAX_TOLD)]
    supervisor: Name = ""
    """Name of the supervisor's process that tells them, as in its registration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings of checks by re-execution, of each trainer in their order."""

    findings: Annotated[tuple[ToldFinding, ...], Longest(MAX_BATCH)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Entries of the ledger."""

    entries: Annotated[tuple[ToldEntry, ...], Longest(MAX_TOLD)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    """The place where an injected fault is about to strike."""

    pod: PodUid
    slot: SlotIndex | None = None
    rank: Name | None = None
    at_s: Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnreadFacts:
    """Facts whose kinds were not looked at."""

    facts: Annotated[tuple[Any, ...], Longest(MAX_TOLD)]
    supervisor: Name = ""


def _read_facts(data: Any) -> Facts:
    told = codec.decode(_UnreadFacts, data)
    facts = tuple(check_final(read_fact(fact)) for fact in told.facts)
    return Facts(facts=facts, supervisor=told.supervisor)


def _read_entries(data: Any) -> Entries:
    told = codec.decode(Entries, data)
    for entry in told.entries:
        check_entry(entry)
    return told


@router.post("/pods", responses=examples.REGISTERED)
async def register_pod(
    uid: UidDep, transactions: TransactionsDep, held: HeldDep, registration: PodRegistration
) -> Response:
    """Introduce a pod. Repeating it is harmless; a pod that counted as gone is back."""
    answer = await transactions.job(uid).register(registration, held)
    return with_plan(
        answer.plan or "null",
        {
            "config": codec.encode(answer.config),
            "manifest": await transactions.store.fetch_manifest(uid),
            "restored_at_s": answer.restored_at_s,
            "cursor": answer.cursor,
        },
    )


@router.post("/heartbeats", responses=examples.BEAT)
@read_directly("heartbeat", partial(codec.decode, Heartbeat))
async def take_heartbeat(
    uid: UidDep, transactions: TransactionsDep, heartbeat: Heartbeat
) -> JSONResponse:
    """Note that a pod is alive, and say which quorum is the newest."""
    answer = codec.encode(await transactions.job(uid).take_heartbeat(heartbeat))
    return JSONResponse({**answer, "now_s": transactions.now_s()})


@router.post("/facts", responses=examples.PLAN_REPLY)
@read_directly("body", _read_facts)
async def note_facts(
    uid: UidDep, transactions: TransactionsDep, held: HeldDep, body: Facts, texts: PlanTextsDep
) -> Response:
    """Learn facts; 409 when all of them are stale.

    The answer has the current plan, or null if the request says that the caller holds it.
    """
    return texts.answer(await transactions.job(uid).take_facts(body.facts, body.supervisor, held))


@router.post("/ledger")
@read_directly("body", _read_entries)
async def add_to_ledger(
    uid: UidDep, transactions: TransactionsDep, held: HeldDep, body: Entries
) -> dict[str, int]:
    """Mirror entries of the ledger. Telling one twice changes nothing."""
    await transactions.job(uid).add_to_ledger(body.entries, held)
    return {"entries": len(body.entries)}


@router.post("/findings")
async def add_findings(
    uid: UidDep, transactions: TransactionsDep, held: HeldDep, body: Findings
) -> dict[str, int]:
    """Tell what checks by re-execution have found. Telling one twice changes nothing."""
    await transactions.add_findings(uid, body.findings, held)
    return {"findings": len(body.findings)}


@router.post("/store", responses=examples.STORE_REPLY)
async def note_store(
    uid: UidDep, transactions: TransactionsDep, status: StoreStatus
) -> JSONResponse:
    """Note what a pod's store of segments holds; say which check of it is wanted.

    The answer also names what the newest check has found damaged there.

    It is kept beside the job's state: no decision needs it.
    """
    state = await transactions.load(uid)
    if state.pod(status.pod) is None or is_gone(state, status.pod):
        raise UnregisteredPodError(f"pod {status.pod} is unknown or counts as gone")
    reply = await transactions.store.put_store(uid, status)
    return JSONResponse(codec.encode(reply))


@router.post("/faults/{fault}/fired")
async def fire_fault(
    uid: UidDep,
    transactions: TransactionsDep,
    settings: SettingsDep,
    held: HeldDep,
    fault: str,
    body: Fired,
) -> dict[str, str]:
    """Ask whether an injected fault may be carried out; 409 when it has been already."""
    require_injection(settings)
    await transactions.apply(
        uid,
        FaultFired(fault=fault, pod=body.pod, slot=body.slot, rank=body.rank, at_s=body.at_s),
        held,
    )
    return {"fault": fault, "answer": "carry it out"}


@router.post("/restore", responses=examples.RESTORED)
async def recover_store(
    job: str,
    transactions: TransactionsDep,
    settings: SettingsDep,
    caller: AgentDep,
    body: HeldJob,
) -> JSONResponse:
    """Tell a store that lost the job, or fell back to an older state, what it does not know.

    The newest plan that was told stands; no plan is derived from an older one. Repeating it is
    harmless.
    """
    if body.config.job != job:
        raise ProblemError(
            422,
            "malformed",
            f"this recovers {body.config.job}, not {job}",
            "post it under the job's uid",
        )
    named = JobName(namespace=body.config.namespace, name=body.config.name)
    if caller.job is not None and caller.job != named:
        raise forbidden(
            f"this recovers {named}, and the token is that of {caller.job}",
            "recover your own job, as the api gave it to you",
        )
    if body.config.faults and not settings.fault_injection:
        # From a time when they were allowed. The job goes on without.
        body = replace(body, config=replace(body.config, faults=()))
    plan = await transactions.recover(body)
    return JSONResponse({"plan": codec.encode(plan) if plan is not None else None})


@router.get("/plan", responses=examples.PLAN_REPLY)
async def fetch_plan(uid: UidDep, transactions: TransactionsDep) -> Response:
    """The current plan."""
    plan, cursor, _ = await transactions.store.fetch_plan(uid)
    return with_plan(plan or "null", {"cursor": cursor})


@router.get("/stream", response_class=StreamingResponse, responses=examples.STREAM)
async def open_stream(
    uid: UidDep,
    streams: StreamsDep,
    request: Request,
    mainstay_pod: Annotated[str, Header(max_length=MAX_NAME)] = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Server-sent events ``plan``, ``inject`` and ``stop``; resumes after ``Last-Event-ID``."""
    if not streams.has_room(uid, mainstay_pod):
        raise TooManyError(f"the streams of pod {mainstay_pod}", STREAMS_WAIT_S)
    known = last_event_id if last_event_id and _STREAM_ID.fullmatch(last_event_id) else None
    return StreamingResponse(
        streams.listen(uid, known, mainstay_pod, partial(may_still_listen, request)),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
