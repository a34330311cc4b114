"""For people and the provider: jobs, their history, and their end."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse, Response

from mainstay_api import examples
from mainstay_api.auth import forbidden
from mainstay_api.deps import (
    AuthDep,
    GuardedRoute,
    LongAnswersDep,
    PersonDep,
    SettingsDep,
    TransactionsDep,
    UidDep,
    require_injection,
    require_operator,
    require_person,
)
from mainstay_api.facts import ToldFact
from mainstay_api.findings import fetch_newest
from mainstay_api.limits import person_of
from mainstay_api.long_work import PIECE, in_pieces, long_json
from mainstay_api.problems import ProblemError
from mainstay_api.routes.lineage import fetch_outcomes
from mainstay_api.run_report import ReportedStep, make_report, report_steps, show_members
from mainstay_api.snapshots import fetch_summary
from mainstay_api.store import MAX_LEDGER_ENTRIES
from mainstay_api.summary import show_job, show_page, show_pods
from mainstay_api.transactions import Transactions
from mainstay_core.base import codec
from mainstay_core.base.bounds import (
    MAX_AT_ONCE,
    MAX_FAULTS,
    MAX_MEMBERS,
    Document,
    Index,
    Longest,
    Name,
    Text,
)
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.words import quote
from mainstay_core.coordinator.events import (
    DrainRequested,
    Event,
    FactsReported,
    ScaleRequested,
    StopRequested,
    SuspendRequested,
    TopologyReported,
)
from mainstay_core.coordinator.leaving import find_pod
from mainstay_core.coordinator.lineage import tell_forks
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job.config import MAX_FORKS, JobConfig
from mainstay_core.job.spec import parse_training_job
from mainstay_core.wire.facts import Location, PodFact
from mainstay_core.wire.recoveries import show_recovery
from mainstay_core.wire.repeated_lineage import read_repeats

router = APIRouter(
    prefix="/v1/jobs",
    tags=["jobs"],
    dependencies=[Depends(require_person)],
    responses=examples.PROBLEMS,
    route_class=GuardedRoute,
)

_IN_A_PATH = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*", re.ASCII)
"""What a job is named by in the path of a request: with another name nobody could ask for it."""
MAX_LEDGER_STEPS = 10_000
"""Steps of the ledger in one reply; ask again with ``since``."""
MAX_ENTRIES = 20_000
"""Entries of the ledger in one reply: fewer steps of a job with many positions, but one at least.
An entry takes 2 KiB of memory until it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A TrainingJob to run, as the user wrote it."""

    manifest: Document = field(default_factory=dict)
    """The TrainingJob; kept as it is."""
    faults: Annotated[list[Document], Longest(MAX_FAULTS)] = field(default_factory=list)
    """Faults to inject, already checked against the job."""
    repeats: Annotated[list[Document], Longest(MAX_FORKS)] = field(default_factory=list)
    """The forks that the report of another run has: this one makes them again, at the same versions
    and without any loss, and makes no others."""
    checkpoint_dir: Text = ""
    """Where durable checkpoints go unless the job names a storage."""
    config: Document | None = None
    """The job as its processes see it, instead of deriving it from the manifest."""
    uid: Name | None = None
    """Identity of this run, in a cluster the resource's; drawn if left out."""
    namespace: Name = ""
    """Where its TrainingJob is; empty in local mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Facts that the provider knows for certain."""

    facts: Annotated[tuple[ToldFact, ...], Longest(MAX_AT_ONCE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The places of the nodes of a job's pods."""

    nodes: Annotated[dict[Name, Location], Longest(MAX_MEMBERS)]
    """By name, as pods register it for their failure domain; replaces what was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewScale:
    """The wanted numbers of replicas and spares; what is left out stays as it is."""

    replicas: Index | None = None
    spares: Index | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewDrain:
    """The pod that is to hand its work over."""

    pod: Name
    """UID or name."""


@router.post("", status_code=201, responses=examples.JOB, dependencies=[Depends(require_operator)])
async def create_job(
    transactions: TransactionsDep, settings: SettingsDep, body: NewJob
) -> JSONResponse:
    """Create a job (201); pods may register from now on.

    With the uid of a job that exists: submit it again (200). ``parallelism.replicas``,
    ``minReplicas``, ``spares.replicas`` and what only decisions depend on may differ from the
    last submission; anything else is refused by its field. Repeating it is harmless.
    """
    if settings.auth == "kubernetes":
        for name in ("uid", "namespace"):
            if not getattr(body, name):
                raise InvalidSpecError(name, "is missing; in a cluster a job is a TrainingJob's")
    config = _config_of(body)
    if config.faults:
        require_injection(settings)
    created = await transactions.submit(config, body.manifest)
    state = await transactions.load(config.job)
    return JSONResponse(show_job(state, transactions.now_s()), status_code=201 if created else 200)


def _config_of(body: NewJob) -> JobConfig:
    for name in ("uid", "namespace"):
        given = getattr(body, name)
        if given and not _IN_A_PATH.fullmatch(given):
            raise InvalidSpecError(
                name, f"is {quote(given)}, must be letters, digits, '-', '_' and '.'"
            )
    uid = JobUid(body.uid or secrets.token_hex(8))
    try:
        if body.config is not None:
            config = codec.decode(JobConfig, {**body.config, "job": body.uid or uid}, "config")
            _check_repeats(config, "config.")
            return replace(config, job=uid, namespace=body.namespace or config.namespace)
        faults = tuple(
            codec.decode(FaultPoint, fault, f"faults[{i}]") for i, fault in enumerate(body.faults)
        )
    except MalformedError as error:
        raise InvalidSpecError(error.field, error.problem) from error
    config = parse_training_job(body.manifest).to_job_config(uid, faults, body.checkpoint_dir)
    config = replace(config, namespace=body.namespace, repeats=tuple(body.repeats))
    _check_repeats(config)
    return config


def _check_repeats(config: JobConfig, before: str = "") -> None:
    """Refuse forks that the job cannot make again.

    Args:
        config: of the job.
        before: path of what has them in the request, with a dot.

    Raises:
        InvalidSpecError: one is none that it can make.
    """
    try:
        read_repeats(config)
    except InvalidSpecError as error:
        raise InvalidSpecError(before + error.field, error.message) from error


@router.get("", responses=examples.JOBS)
async def list_jobs(
    transactions: TransactionsDep, caller: PersonDep, auth: AuthDep, namespace: str | None = None
) -> Response:
    """All jobs that the caller may see, in short: those of one namespace, or of all."""
    states = await transactions.load_all()
    there = {s.config.namespace for s in states} if namespace is None else {namespace}
    seen = {name for name in there if await auth.may_list(caller, name)}
    if not seen and not caller.sees_all:
        raise forbidden(
            f"{caller.username} may not list trainingjobs.mainstay.dev "
            + (f"in namespace {namespace}" if namespace else "in any namespace with a job"),
            "name a namespace in which you may: GET /v1/jobs?namespace=NAME",
        )
    mine = [state for state in states if state.config.namespace in seen]
    shown = await in_pieces(partial(show_job, now_s=transactions.now_s()), mine)
    return await long_json(lambda: shown)


@router.get("/{job}", responses=examples.JOB)
async def show_one(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """One job, with its manifest."""
    manifest = await transactions.store.fetch_manifest(uid)
    shown = show_job(await transactions.load(uid), transactions.now_s())
    return JSONResponse({**shown, "manifest": manifest})


@router.get("/{job}/summary", responses=examples.SUMMARY)
async def show_summary(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """The job on one page: what its status says, and nothing that grows with its size."""
    # One after the other, each would wait for what others have asked of the store meanwhile.
    state, recoveries = await asyncio.gather(
        transactions.load(uid), transactions.store.fetch_recoveries(uid)
    )
    keys = [(state.step - 1, *p) for p in state.shape.positions] if state.step else []
    entries, stores, found = await asyncio.gather(
        transactions.store.fetch_ledger(uid, keys),
        fetch_summary(transactions.store, state),
        fetch_newest(transactions.store, state),
    )
    newest = [entries[key] for key in keys if key in entries]
    page = show_page(state, recoveries, newest, transactions.now_s(), stores, found)
    return JSONResponse(codec.encode(page))


@router.get("/{job}/plan", responses=examples.PLAN_REPLY)
async def show_plan(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """The current plan, or null before the first."""
    plan, _, _ = await transactions.store.fetch_plan(uid)
    return JSONResponse({"plan": json.loads(plan) if plan else None})


@router.get("/{job}/members")
async def show_ranks(uid: UidDep, transactions: TransactionsDep) -> Response:
    """Ranks with their slots, processes and phases; then spares."""
    beats = await transactions.store.fetch_beats(uid)
    return await long_json(show_members, await transactions.load(uid), beats)


@router.get("/{job}/recoveries", responses=examples.RECOVERIES)
async def show_recoveries(uid: UidDep, transactions: TransactionsDep) -> Response:
    """What was done about each fault, with reason and five times; oldest first."""
    recoveries = await transactions.store.fetch_recoveries(uid)
    return await long_json(lambda: [show_recovery(r) for r in recoveries])


@router.get("/{job}/ledger")
async def show_ledger(
    uid: UidDep,
    transactions: TransactionsDep,
    caller: PersonDep,
    long_answers: LongAnswersDep,
    since: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Entries of committed steps from ``since`` on, by step, stage and inner rank."""
    async with long_answers.place(person_of(caller.username)):
        state = await transactions.load(uid)
        positions = state.shape.positions
        shown = max(1, min(MAX_LEDGER_STEPS, MAX_ENTRIES // len(positions)))
        keys = [(n, *p) for n in range(since, min(state.step, since + shown)) for p in positions]
        entries = await transactions.store.fetch_ledger(uid, keys)
        return await long_json(lambda: [codec.encode(e) for e in entries.values()])


@router.get("/{job}/findings", responses=examples.FINDINGS)
async def show_findings(
    uid: UidDep, transactions: TransactionsDep, since: Annotated[int, Query(ge=0)] = 0
) -> Response:
    """What checks by re-execution have found: how many by verdict, and the newest that are kept.

    Those from the place ``since`` on, oldest first; places count from 1 in the order of telling.
    """
    page = await transactions.store.fetch_findings(uid, since)
    return await long_json(codec.encode, page)


@router.get("/{job}/events")
async def show_events(
    uid: UidDep, transactions: TransactionsDep, caller: PersonDep, long_answers: LongAnswersDep
) -> Response:
    """The job's history, oldest first."""
    async with long_answers.place(person_of(caller.username)):
        events = await _events(transactions, uid)
        return await long_json(lambda: events)


@router.get("/{job}/report")
async def show_report(
    uid: UidDep, transactions: TransactionsDep, caller: PersonDep, long_answers: LongAnswersDep
) -> Response:
    """The content of REPORT.json so far; final once the job has ended."""
    async with long_answers.place(person_of(caller.username)):
        state = await transactions.load(uid)
        steps = await _report_steps(transactions, state)
        recoveries = await transactions.store.fetch_recoveries(uid)
        events = await _events(transactions, uid)
        findings = await transactions.store.fetch_findings(uid)
        forks = tell_forks(state.history, await fetch_outcomes(transactions, state))
        return await long_json(make_report, state, steps, recoveries, events, findings, forks)


@router.post("/{job}/stop")
async def stop_job(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """End the job: all its trainers are told to stop. Repeating it is harmless."""
    return await _apply(uid, transactions, StopRequested())


@router.post("/{job}/scale", responses=examples.JOB)
async def scale_job(uid: UidDep, transactions: TransactionsDep, body: NewScale) -> JSONResponse:
    """Want other numbers of replicas, within minReplicas..lanes, or spares. Repeat it freely.

    Up: new pods join when they are there. Down: whole chains are dropped between steps.
    """
    return await _apply(
        uid, transactions, ScaleRequested(replicas=body.replicas, spares=body.spares)
    )


@router.post("/{job}/suspend", responses=examples.JOB)
async def suspend_job(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """Have the job write a checkpoint and stand still, without pods. Repeating it is harmless.

    In a cluster the TrainingJob's ``spec.suspend`` says it, and has the last word.
    """
    return await _apply(uid, transactions, SuspendRequested(suspend=True))


@router.post("/{job}/resume", responses=examples.JOB)
async def resume_job(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """Have a suspended job go on from its newest checkpoint. Repeating it is harmless."""
    return await _apply(uid, transactions, SuspendRequested(suspend=False))


@router.post("/{job}/drain", responses=examples.JOB)
async def drain_pod(uid: UidDep, transactions: TransactionsDep, body: NewDrain) -> JSONResponse:
    """Have a pod's work handed over, so that it can be ended. Repeating it is harmless."""
    state = await transactions.load(uid)
    pod = find_pod(state, body.pod)
    if pod is None:
        names = ", ".join(p.registration.name for p in state.pods if not p.gone)
        raise ProblemError(
            404,
            "unknown-pod",
            f"job {state.config.name} has no living pod {body.pod!r}",
            f"name one of {names}" if names else "wait until pods have registered",
        )
    return await _apply(uid, transactions, DrainRequested(pod=pod.registration.pod))


@router.get("/{job}/pods", responses=examples.PODS)
async def show_wanted_pods(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """How many pods the job needs now, and which to end: for the provider."""
    state = await transactions.load(uid)
    return JSONResponse(codec.encode(show_pods(state)))


@router.post("/{job}/provider/facts", dependencies=[Depends(require_operator)])
async def note_pool_facts(
    uid: UidDep, transactions: TransactionsDep, body: PoolFacts
) -> JSONResponse:
    """Learn from the provider that pods are gone, or will be."""
    for fact in body.facts:
        if not isinstance(fact, PodFact):
            raise ProblemError(
                422,
                "malformed",
                f"a provider cannot tell {fact.kind}",
                "tell pod-gone or leaving only; everything else is a supervisor's to tell",
            )
    return await _apply(uid, transactions, FactsReported(facts=body.facts))


@router.get("/{job}/topology")
async def show_topology(uid: UidDep, transactions: TransactionsDep) -> JSONResponse:
    """Where nodes are, as far as it was told."""
    state = await transactions.load(uid)
    return JSONResponse({"nodes": codec.encode(state.topology)})


@router.post("/{job}/provider/topology", dependencies=[Depends(require_operator)])
async def note_topology(uid: UidDep, transactions: TransactionsDep, body: Topology) -> JSONResponse:
    """Learn where nodes are: plans that are made from now on use it. Repeating it is harmless."""
    outcome = await transactions.apply(uid, TopologyReported(nodes=body.nodes))
    return JSONResponse({"nodes": len(outcome.state.topology)})


def _num_steps(state: CoordinatorState) -> int:
    """Return the number of steps whose entries fit in one reply."""
    return max(1, MAX_LEDGER_ENTRIES // len(state.shape.positions))


async def _apply(uid: JobUid, transactions: Transactions, event: Event) -> JSONResponse:
    """Have an event decided; return the job as it is then."""
    state = (await transactions.apply(uid, event)).state
    return JSONResponse(show_job(state, transactions.now_s()))


async def _events(transactions: Transactions, uid: JobUid) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    after: str | None = "0-0"
    while after is not None:
        items = await transactions.store.read_stream(uid, after, None)
        shown = [item for item in items if item.kind == "event"]
        events += await in_pieces(lambda i: {"id": i.id, **json.loads(i.data)}, shown)
        after = items[-1].id if items else None
    return events


async def _report_steps(
    transactions: Transactions, state: CoordinatorState
) -> list[ReportedStep | None]:
    """Return a job's newest steps as its report shows them; never all entries are in memory."""
    positions, steps = state.shape.positions, list[ReportedStep | None]()
    # A job may claim to be at any step: only as many are looked for as there is room for.
    first = max(0, state.step - max(1, MAX_LEDGER_ENTRIES // len(positions)))
    at_once = max(1, PIECE // len(positions))
    for begin in range(first, state.step, at_once):
        piece = range(begin, min(begin + at_once, state.step))
        keys = [(n, *p) for n in piece for p in positions]
        found = await transactions.store.fetch_ledger(state.config.job, keys)
        steps += report_steps(found, positions, piece)
    return steps
