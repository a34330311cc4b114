"""The api over HTTP, as the command line uses it: everything that is shown comes from here."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mainstay_cli.base import state_dir
from mainstay_core.wire.api import ApiError, Failure, failure_of, read_retry_after
from mainstay_core.wire.routes import JobApi, Request, explain, read_answer, read_object

TIMEOUT_S = 30.0
"""Of one request. Generous: a machine full of trainers is slow, not broken."""


class ApiClient(JobApi):
    """Talks to one api. Use as an asynchronous context manager.

    Args:
        url: of the api; may have a path, as behind the proxy of a cluster's API server.
        token: shown to the api.
        verify: certificates of a server that is asked by https.
        headers: shown as well; an ``Authorization`` is for whoever stands between us and the
            api, which then gets the token in a header of its own.
        proxy: of the way to the server.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        verify: ssl.SSLContext | bool = True,
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
    ) -> None:
        between = headers or {}
        name = "Mainstay-Authorization" if "Authorization" in between else "Authorization"
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={**between, name: f"Bearer {token}"},
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=verify,
            proxy=proxy,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Return whether the api serves and reaches its store."""
        try:
            return (await self._ask("GET", "/readyz")).is_success
        except httpx.TransportError:
            return False

    async def send(self, request: Request) -> Any:
        """Send a request; wait and send it again where the api asks for that, within TIMEOUT_S."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            response = await self._send_once(request)
            if response.is_success:
                return read_answer(response.content)
            wait_s = read_retry_after(response.headers.get("retry-after"))
            error = ApiError(_explanation(response), failure_of(response.status_code), wait_s)
            if not error.is_busy or not 0 < wait_s < until_s - time.monotonic():
                raise error
            await asyncio.sleep(wait_s)

    async def _send_once(self, request: Request) -> httpx.Response:
        try:
            return await self._ask(request.method, request.path, request.body)
        except httpx.TransportError as error:
            raise ApiError(
                f"the api at {self._http.base_url} is not reached: {error}", Failure.UNREACHED
            ) from error

    async def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Ask once.

        Raises:
            httpx.TransportError: nobody answered.
        """
        try:
            return await self._http.request(method, path, json=body)
        except OSError as error:
            # No descriptor is left: httpx could not even import a module. That may have happened
            # while it was being cancelled, and then it has lost the cancellation.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            raise httpx.ConnectError(str(error)) from error


def connect(record: state_dir.RunRecord) -> ApiClient:
    """Return a client of a running job's api."""
    token = (Path(record.state_dir) / "token").read_text().strip()
    return ApiClient(record.url, token)


def _explanation(response: httpx.Response) -> str:
    """Return what an answer says that is no success, whoever on the way gave it."""
    status = response.status_code
    body = read_object(response.content)
    if body.get("kind") == "Status":
        # Not the api's own words: those of a cluster's API server on the way to it.
        hint = "; the chart's rbac.reach gives that right" if status == 403 else ""
        return f"the API server did not pass it on: {body.get('message')}{hint}"
    return f"the api refused ({status}): {explain(response.content)}"
