"""Answers the operator's liveness probe, and Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from mainstay_core.base.admission import Bounds
from mainstay_core.base.errors import InvalidSpecError
from mainstay_net.acceptor import listen
from mainstay_net.http import HEAD_BYTES, HttpEntrance
from mainstay_operator.metrics import Metrics

SHUTDOWN_S = 1.0
BOUNDS = Bounds(total=64, per_address=32, prove_s=30.0)
"""On connections: a kubelet and a few scrapers call, one request each, and nobody proves anything.
A connection ends with its answer, or after this time."""


@contextlib.asynccontextmanager
async def serving(
    url: str, check: Callable[[], tuple[str, Mapping[str, Any]]], metrics: Metrics
) -> AsyncIterator[None]:
    """Answer at ``url``, and its host's ``/metrics``, for as long as the block lasts.

    Args:
        url: of the probe, e.g. ``http://0.0.0.0:8080/healthz``; ``off``: answer nothing.
        check: returns why the operator is not alive ('' if it is), and what it tells of itself.
        metrics: of the operator.

    Raises:
        InvalidSpecError: the url cannot be used.
    """
    if url == "off":
        yield
        return
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path in ("", "/", "/metrics"):
        raise InvalidSpecError(
            "MAINSTAY_LIVENESS_URL", f"is {url!r}, must be off or like http://0.0.0.0:8080/healthz"
        )

    async def probe(_: web.Request) -> web.Response:
        problem, told = check()
        body = {"operator": {**told, "problem": problem}}
        return _last(web.json_response(body, status=500 if problem else 200))

    async def show(_: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return _last(web.Response(body=metrics.render(), headers=headers))

    app = web.Application()
    app.add_routes([web.get(parts.path, probe), web.get("/metrics", show)])
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    make_protocol = runner.server
    assert make_protocol is not None, "set up"
    listener = listen(parts.hostname, parts.port or 80)
    entrance = HttpEntrance(listener, make_protocol, BOUNDS, HEAD_BYTES)
    try:
        yield
    finally:
        entrance.close()
        await runner.cleanup()


def _last(answer: web.Response) -> web.Response:
    """Return an answer after which the connection ends."""
    answer.force_close()
    return answer
