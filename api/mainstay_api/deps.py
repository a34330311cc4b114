"""Dependencies of routes: the parts of the app, and the check of the caller.

Whether the caller may is asked before the body is read (:class:`GuardedRoute`).

All asynchronous, though many wait for nothing: the framework would send plain
functions to a thread and back, at every request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.routing import APIRoute

from mainstay_api.auth import AgentAsk, Auth, Caller, require_own
from mainstay_api.metrics import Metrics
from mainstay_api.problems import ProblemError, unknown_job
from mainstay_api.settings import Settings
from mainstay_api.streams import Streams
from mainstay_api.transactions import Transactions
from mainstay_core.base.ids import JobUid, QuorumId


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


async def require_operator(request: Request) -> Caller:
    """Let in the provider."""
    return await _once(request, _admit_operator)


class GuardedRoute(APIRoute):
    """A route that reads a body only after its headers have let the caller in.

    Left to itself the framework reads and parses a body first and asks who sends it then.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request: first the route's ``require_*``, then all the rest."""
        handle = super().get_route_handler()
        needed = [d.call for d in self.dependant.dependencies]
        guards = [guard for require, guard in _GUARDS.items() if require in needed]

        async def admit_first(request: Request) -> Response:
            for guard in guards:
                await _once(request, guard)
            return await handle(request)

        return admit_first


Guard = Callable[[Request], Awaitable[Caller]]


async def _once(request: Request, guard: Guard) -> Caller:
    """Ask a guard, or take its answer about this very request."""
    known: dict[Guard, Caller] = request.scope.setdefault("mainstay.callers", {})
    if guard not in known:
        known[guard] = await guard(request)
        request.app.state.connections.admitted(request.scope)
    return known[guard]


async def _admit_agent(request: Request) -> Caller:
    transactions: Transactions = request.app.state.transactions
    job = request.path_params["job"]
    uid = await transactions.resolve(job)
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
    uid = None if job is None else await transactions.resolve(job)
    name = None if uid is None else await transactions.fetch_name(uid)
    return await (await get_auth(request)).admit_person(_token(request), verb, name)


async def _admit_operator(request: Request) -> Caller:
    return await (await get_auth(request)).admit_operator(_token(request))


_GUARDS: dict[Callable[..., Any], Guard] = {
    require_agent: _admit_agent,
    require_person: _admit_person,
    require_operator: _admit_operator,
}
_READS = ("GET", "HEAD")


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
    """Return the pods for which the body speaks: its own field ``pod``, and that of each fact."""
    try:
        body = await request.json()
    except ValueError:
        # Nothing was understood, by the route neither: there it is refused.
        return frozenset()
    if not isinstance(body, dict):
        return frozenset()
    facts = body.get("facts")
    told = [body, *(facts if isinstance(facts, list) else ())]
    return frozenset(str(t["pod"]) for t in told if isinstance(t, dict) and "pod" in t)


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
MetricsDep = Annotated[Metrics, Depends(get_metrics)]
UidDep = Annotated[JobUid, Depends(get_uid)]
