"""What a route gets handed: the parts of its app, and whether the caller may.

All asynchronous, though they wait for nothing: the framework would send plain
functions to a thread and back, at every request.
"""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends, Header, Request

from mainstay_api.metrics import Metrics
from mainstay_api.problems import ProblemError, unknown_job
from mainstay_api.service import JobService
from mainstay_api.settings import Settings
from mainstay_api.streams import Streams
from mainstay_core.ids import JobUid, QuorumId


async def get_service(request: Request) -> JobService:
    """Return the app's service."""
    service: JobService = request.app.state.service
    return service


async def get_streams(request: Request) -> Streams:
    """Return the app's streams."""
    streams: Streams = request.app.state.streams
    return streams


async def get_metrics(request: Request) -> Metrics:
    """Return the app's metrics."""
    metrics: Metrics = request.app.state.metrics
    return metrics


async def require_admin(request: Request) -> None:
    """Let people and the process provider in."""
    settings: Settings = request.app.state.settings
    _require(request, "MAINSTAY_ADMIN_TOKEN", settings.admin_token)


async def require_agent(request: Request) -> None:
    """Let supervisors in; whoever may do everything may do this as well."""
    settings: Settings = request.app.state.settings
    _require(request, "MAINSTAY_AGENT_TOKEN", settings.agent_token, settings.admin_token)


def _require(request: Request, name: str, *accepted: str) -> None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip().encode()
    # Every comparison is made, in constant time: the answer tells nothing about a token.
    matches = [hmac.compare_digest(given, expected.encode()) for expected in accepted]
    if scheme.lower() == "bearer" and any(matches):
        return
    raise ProblemError(
        401,
        "unauthorized",
        "the token is missing" if not given else "the token is not the one that this needs",
        f"send 'Authorization: Bearer TOKEN' with the api's {name} (or MAINSTAY_TOKEN)",
    )


async def get_uid(job: str, service: Annotated[JobService, Depends(get_service)]) -> JobUid:
    """Return the uid of the job in the path, which is a uid or a name."""
    uid = await service.resolve(job)
    if uid is None:
        raise unknown_job(job)
    return uid


async def get_held(
    mainstay_quorum: Annotated[str | None, Header()] = None,
) -> QuorumId | None:
    """Return the quorum of the newest plan that the asking supervisor holds, as ``q7-3f9a``."""
    if not mainstay_quorum:
        return None
    number, dash, nonce = mainstay_quorum.removeprefix("q").partition("-")
    if not (number.isdigit() and dash and nonce):
        raise ProblemError(
            422,
            "malformed",
            f"{mainstay_quorum!r} names no quorum",
            "send Mainstay-Quorum: q7-3f9a, with the id and the nonce of the plan that you hold",
        )
    return QuorumId(id=int(number), nonce=nonce)


HeldDep = Annotated[QuorumId | None, Depends(get_held)]
ServiceDep = Annotated[JobService, Depends(get_service)]
StreamsDep = Annotated[Streams, Depends(get_streams)]
MetricsDep = Annotated[Metrics, Depends(get_metrics)]
UidDep = Annotated[JobUid, Depends(get_uid)]
