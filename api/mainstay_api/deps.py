"""Dependencies of routes: the parts of the app, and the check of the caller.

Whether the caller may is asked before the body is read (:class:`GuardedRoute`).

All asynchronous, though many wait for nothing: the framework would send plain
functions to a thread and back, at every request.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from mainstay_api.auth import AgentAsk, Auth, Caller, require_own
from mainstay_api.bodies import MIB, BodyTooLargeError, LongRequest, length_of
from mainstay_api.direct import direct_body_of, read_body
from mainstay_api.limits import Asked, Limits, TooManyError
from mainstay_api.lines import Lines
from mainstay_api.long_work import Places
from mainstay_api.metrics import Metrics
from mainstay_api.plan_texts import PlanTexts
from mainstay_api.problems import ProblemError, unknown_job
from mainstay_api.settings import Settings
from mainstay_api.streams import Streams
from mainstay_api.transactions import Transactions
from mainstay_core.base.bounds import MAX_NAME, MAX_TOLD
from mainstay_core.base.ids import JobUid, QuorumId
from mainstay_core.control_plane.job_store import StoreUnavailableError, UnknownJobError

logger = logging.getLogger(__name__)

MAX_TOLD_MIB = 1
"""Longest body of a supervisor, but for what it holds for a store that has lost the job: 256 facts
or ledger entries are a tenth of that. Longer ones would keep others waiting while they are read."""


async def get_transactions(request: Request) -> Transactions:
    """Return the app's transactions."""
    transactions: Transactions = request.app.state.transactions
    return transactions


async def get_streams(request: Request) -> Streams:
    """Return the app's streams."""
    streams: Streams = request.app.state.streams
    return streams


async def get_metrics(request: Request) -> Metrics:
    """Return the app's metrics."""
    metrics: Metrics = request.app.state.metrics
    return metrics


async def get_long_answers(request: Request) -> Places:
    """Return the places in which the app makes long answers."""
    long_answers: Places = request.app.state.long_answers
    return long_answers


async def get_plan_texts(request: Request) -> PlanTexts:
    """Return the app's plans as text."""
    plan_texts: PlanTexts = request.app.state.plan_texts
    return plan_texts


async def get_settings(request: Request) -> Settings:
    """Return the app's settings."""
    settings: Settings = request.app.state.settings
    return settings


async def get_auth(request: Request) -> Auth:
    """Return how the app admits callers."""
    auth: Auth = request.app.state.auth
    return auth


async def require_agent(request: Request) -> Caller:
    """Let supervisors of the job in, each for its own pod."""
    caller = await _once(request, _admit_agent)
    if caller.pod and request.method not in _READS:
        require_own(caller.pod, await _pods_named(request))
    return caller


async def require_person(request: Request) -> Caller:
    """Let in who may read the job, or change it, as the method says; the operator too."""
    return await _once(request, _admit_person)


async def require_scraper(request: Request) -> Caller:
    """Let in who may read the metrics of all jobs."""
    return await _once(request, _admit_scraper)


async def require_operator(request: Request) -> Caller:
    """Let in the provider."""
    return await _once(request, _admit_operator)


def require_injection(settings: Settings) -> None:
    """Go on where faults may be injected.

    Raises:
        ProblemError: nobody has allowed it; the answer names the value that does.
    """
    if not settings.fault_injection:
        raise ProblemError(
            403,
            "fault-injection-off",
            "faults cannot be injected here: faultInjection.enabled of the chart is false",
            "where losing pods does no harm, upgrade the release with "
            "--set faultInjection.enabled=true (MAINSTAY_FAULT_INJECTION=true of the api)",
        )


class GuardedRoute(APIRoute):
    """A route that reads a body only after its headers have let the caller in.

    Left to itself the framework reads and parses a body first and asks who sends it then.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request: first the route's ``require_*``, then all the rest."""
        handle, endpoint = super().get_route_handler(), self.endpoint
        direct = direct_body_of(endpoint)
        needed = [d.call for d in self.dependant.dependencies]
        guards = [guard for require, guard in _GUARDS.items() if require in needed]

        async def admit_first(request: Request) -> Response:
            callers = [await _once(request, guard) for guard in guards]
            admitted = LongRequest(request.scope, request.receive)
            if not callers:
                return await handle(admitted)
            # Of several guards the last one lets in fewer.
            asked = await _describe(request, callers[-1], by_agent=_admit_agent in guards)
            await _count(request, asked)
            lines: Lines = request.app.state.lines
            if not asked.by_agent:
                with lines.ahead():
                    return await handle(admitted)
            if request.method not in _READS:
                try:
                    await admitted.body()  # whoever sends one slowly takes nobody's place
                except ClientDisconnect:
                    return Response(status_code=400)  # nobody is there to read it
            limits: Limits = request.app.state.limits
            async with lines.wait(asked, eager=limits.is_eager(asked)):
                told = None if direct is None else await read_body(admitted, direct)
                if direct is None or told is None:
                    return await handle(admitted)
                return await _call(endpoint, admitted, direct.others, told)

        return admit_first


async def _call(
    endpoint: Callable[..., Awaitable[Any]],
    request: Request,
    others: Collection[str],
    told: Mapping[str, Any],
) -> Response:
    """Return what a supervisor's endpoint answers, as the framework would.

    Args:
        endpoint: of a route that :func:`require_agent` guards.
        request: whose caller was admitted.
        others: names of its arguments beside the body.
        told: the body, by the name of its argument.
    """
    await require_agent(request)
    uid = request.scope[_UID]
    if uid is None:
        raise unknown_job(request.path_params["job"])
    state, arguments = request.app.state, {"uid": uid, **told}
    if "held" in others:
        arguments["held"] = await get_held(request.headers.get("mainstay-quorum"))
    if "texts" in others:
        arguments["texts"] = state.plan_texts
    answer = await endpoint(transactions=state.transactions, **arguments)
    return answer if isinstance(answer, Response) else JSONResponse(answer)


async def _describe(request: Request, caller: Caller, *, by_agent: bool) -> Asked:
    """Return a request whose caller was let in, as far as it is counted."""
    transactions: Transactions = request.app.state.transactions
    headers, job = request.headers, request.path_params.get("job", "")
    uid: JobUid | None = request.scope.get(_UID)
    return Asked(
        caller=caller,
        job=uid or job,
        pod=(caller.pod or headers.get("mainstay-pod", ""))[:MAX_NAME] if by_agent else "",
        route=request.scope["route"].path.rpartition("/")[2],
        by_agent=by_agent,
        num_bytes=length_of(headers),
        num_pods=await transactions.count_pods(uid) if by_agent and uid else 0,
        connection=request.client or ("", 0),
    )


async def _count(request: Request, asked: Asked) -> None:
    """Count a request; its connection may stay.

    Raises:
        BodyTooLargeError: the body is longer than a supervisor's may be.
        TooManyError: the caller or the job has asked for too much.
    """
    state = request.app.state
    limits: Limits = state.limits
    if asked.by_agent and asked.route != "restore" and asked.num_bytes > MAX_TOLD_MIB * MIB:
        raise BodyTooLargeError(MAX_TOLD_MIB, "tell fewer facts or entries at once")
    try:
        limits.take(asked)
    except TooManyError as refusal:
        # It is no stranger's connection: strangers' places are not held by it.
        state.connections.served(request.scope)
        await limits.hold(asked, refusal)
        raise
    if limits.may_keep(asked):
        state.connections.admitted(request.scope)
    else:
        state.connections.served(request.scope)


Guard = Callable[[Request], Awaitable[Caller]]


async def _once(request: Request, guard: Guard) -> Caller:
    """Ask a guard, or take its answer about this very request."""
    known: dict[Guard, Caller] = request.scope.setdefault("mainstay.callers", {})
    if guard not in known:
        known[guard] = await guard(request)
    return known[guard]


async def may_still_listen(request: Request) -> bool:
    """Return whether the supervisor whose stream this is would still be let in now."""
    try:
        await _admit_agent(request)
    except StoreUnavailableError:
        return True  # nobody has said no
    except (ProblemError, UnknownJobError) as error:
        logger.info("a stream of %s ends: %s", request.path_params["job"], error)
        return False
    return True


async def _admit_agent(request: Request) -> Caller:
    transactions: Transactions = request.app.state.transactions
    job = request.path_params["job"]
    uid = request.scope[_UID] = await transactions.resolve(job)
    ask = AgentAsk(
        token=_token(request),
        job=job,
        uid=uid,
        name=None if uid is None else await transactions.fetch_name(uid),
        pod=request.headers.get("mainstay-pod", ""),
    )
    return await (await get_auth(request)).admit_agent(ask)


async def _admit_person(request: Request) -> Caller:
    transactions: Transactions = request.app.state.transactions
    job = request.path_params.get("job")
    verb = "list" if job is None else "get" if request.method in _READS else "patch"
    uid = request.scope[_UID] = None if job is None else await transactions.resolve(job)
    name = None if uid is None else await transactions.fetch_name(uid)
    return await (await get_auth(request)).admit_person(_token(request), verb, name)


async def _admit_operator(request: Request) -> Caller:
    return await (await get_auth(request)).admit_operator(_token(request))


async def _admit_scraper(request: Request) -> Caller:
    return await (await get_auth(request)).admit_scraper(_token(request))


_GUARDS: dict[Callable[..., Any], Guard] = {
    require_agent: _admit_agent,
    require_person: _admit_person,
    require_operator: _admit_operator,
    require_scraper: _admit_scraper,
}
_READS = ("GET", "HEAD")
_UID = "mainstay.uid"
"""In the scope of a request: the uid of the job that it names, as its guard has found it."""


def _token(request: Request) -> str:
    """Return what the caller shows, in either of two headers.

    The API server of a cluster, as a proxy of the api's Service, takes ``Authorization`` for
    itself and does not pass it on.
    """
    headers = request.headers
    shown = headers.get("authorization") or headers.get("mainstay-authorization", "")
    scheme, _, token = shown.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _pods_named(request: Request) -> frozenset[str]:
    """Return the pods for which the body speaks: its own, that of each fact and each finding."""
    try:
        body = await request.json()
    except ValueError:
        # Nothing was understood, by the route neither: there it is refused.
        return frozenset()
    if not isinstance(body, dict):
        return frozenset()
    told = [body, *_items(body, "facts")]
    for one in _items(body, "findings"):
        finding = one.get("finding") if isinstance(one, dict) else None
        told.append(finding.get("slot") if isinstance(finding, dict) else None)
    return frozenset(str(t["pod"]) for t in told if isinstance(t, dict) and "pod" in t)


def _items(body: dict[str, Any], name: str) -> list[Any]:
    items = body.get(name)
    # A longer list is refused as a whole: to look through all of it would hold others up.
    return items[:MAX_TOLD] if isinstance(items, list) else []


async def get_uid(
    job: str, transactions: Annotated[Transactions, Depends(get_transactions)]
) -> JobUid:
    """Return the uid of the job in the path, which is a uid or a name."""
    uid = await transactions.resolve(job)
    if uid is None:
        raise unknown_job(job)
    return uid


async def get_held(
    mainstay_quorum: Annotated[str | None, Header()] = None,
) -> QuorumId | None:
    """Return the quorum of the newest plan that the asking supervisor holds, as ``q7-3f9a``."""
    if not mainstay_quorum:
        return None
    try:
        return QuorumId.parse(mainstay_quorum)
    except ValueError as error:
        raise ProblemError(
            422,
            "malformed",
            str(error),
            "send Mainstay-Quorum: q7-3f9a, with the id and the nonce of the plan that you hold",
        ) from error


AgentDep = Annotated[Caller, Depends(require_agent)]
PersonDep = Annotated[Caller, Depends(require_person)]
AuthDep = Annotated[Auth, Depends(get_auth)]
SettingsDep = Annotated[Settings, Depends(get_settings)]
HeldDep = Annotated[QuorumId | None, Depends(get_held)]
TransactionsDep = Annotated[Transactions, Depends(get_transactions)]
StreamsDep = Annotated[Streams, Depends(get_streams)]
LongAnswersDep = Annotated[Places, Depends(get_long_answers)]
PlanTextsDep = Annotated[PlanTexts, Depends(get_plan_texts)]
MetricsDep = Annotated[Metrics, Depends(get_metrics)]
UidDep = Annotated[JobUid, Depends(get_uid)]
