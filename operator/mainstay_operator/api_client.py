"""The operator's client of the api: carries requests by aiohttp, and counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

from mainstay_core.wire.api import ApiError, Failure, failure_of, read_retry_after
from mainstay_core.wire.routes import JobApi, Request, explain, read_answer
from mainstay_operator.leadership import forbid_nothing
from mainstay_operator.metrics import Metrics

TIMEOUT_S = 8.0
MAX_EXPLANATION = 300


class ApiClient(JobApi):
    """Talks to the api. Use as an asynchronous context manager.

    Args:
        url: base url.
        read_token: returns the token to present, anew at every request.
        metrics: where requests are counted.
        forbid: returns why nothing may be changed now; '' if it may. Asked before each change.
    """

    def __init__(
        self,
        url: str,
        read_token: Callable[[], str],
        metrics: Metrics,
        forbid: Callable[[], str] = forbid_nothing,
    ) -> None:
        self._url = url.rstrip("/")
        self._read_token = read_token
        self._metrics = metrics
        self._forbid = forbid
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request) -> Any:
        """Send a request with the token of now."""
        assert self._session is not None
        why_not = self._forbid() if request.method != "GET" else ""
        if why_not:
            what = f"{request.method} {request.path}"
            raise ApiError(f"{what}: not sent: {why_not}", Failure.UNREACHED)
        try:
            headers = {"Authorization": f"Bearer {self._read_token()}"}
            async with self._session.request(
                request.method, self._url + request.path, json=request.body, headers=headers
            ) as response:
                content = await response.read()
                status = response.status
                retry_after = response.headers.get("Retry-After")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._metrics.api_requests.labels(request.method, "0").inc()
            why = str(error) or type(error).__name__
            raise ApiError(
                f"the api at {self._url} is not reached: {why}"[:MAX_EXPLANATION], Failure.UNREACHED
            ) from error
        self._metrics.api_requests.labels(request.method, str(status)).inc()
        if status < 400:
            return read_answer(content)
        said = explain(content, MAX_EXPLANATION)
        raise ApiError(
            f"the api refused {request.method} {request.path} ({status}): {said}",
            failure_of(status),
            read_retry_after(retry_after),
        )
