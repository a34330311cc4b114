"""The operator's line to the api: what a job wants, how it is, and what happened to its pods."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError, RemoteProtocolError
from mainstay_core.wire.facts import Fact, Location
from mainstay_core.wire.recoveries import Recovery, read_recovery
from mainstay_operator.metrics import Metrics

TIMEOUT_S = 8.0


class ApiError(MainstayError):
    """The api refused, or was not reached (status 0)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def unknown_job(self) -> bool:
        """Whether the api does not know the job."""
        return self.status == 404

    @property
    def refused(self) -> bool:
        """Whether the api understood and will not: trying again as it is is of no use."""
        return 400 <= self.status < 500 and self.status not in (401, 403, 404, 408, 429)


class ApiClient:
    """Talks to the api. Use as an asynchronous context manager.

    Args:
        url: base url.
        read_token: returns the token to present, anew at every request.
        metrics: where requests are counted.
    """

    def __init__(self, url: str, read_token: Callable[[], str], metrics: Metrics) -> None:
        self._url = url.rstrip("/")
        self._read_token = read_token
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def submit(self, uid: str, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Make the job known under its uid, or pass on what changed in it; idempotent."""
        body = {"manifest": manifest, "uid": uid, "namespace": namespace}
        try:
            await self._request("POST", "/v1/jobs", body)
        except ApiError as error:
            if error.status != 409:
                raise

    async def fetch_recoveries(self, uid: str) -> tuple[Recovery, ...]:
        """Return what was done about each fault of the job, oldest first.

        Raises:
            ApiError: the api was not reached, refused, or said something that cannot be read.
        """
        reply = await self.fetch(uid, "recoveries")
        try:
            return tuple(read_recovery(item) for item in reply)
        except RemoteProtocolError as error:
            raise ApiError(
                f"what the api says of recoveries is not understood: {error}", 0
            ) from error

    async def fetch(self, uid: str, what: str = "") -> Any:
        """Return the job, or a part of it: summary, pods."""
        return await self._request("GET", f"/v1/jobs/{uid}" + (f"/{what}" if what else ""))

    async def tell(self, uid: str, facts: Sequence[Fact]) -> None:
        """Tell facts about pods."""
        body = {"facts": [codec.encode(fact) for fact in facts]}
        await self._request("POST", f"/v1/jobs/{uid}/provider/facts", body)

    async def report_topology(self, uid: str, nodes: Mapping[str, Location]) -> None:
        """Tell where the nodes of the job's pods are."""
        body = {"nodes": {name: codec.encode(place) for name, place in nodes.items()}}
        await self._request("POST", f"/v1/jobs/{uid}/provider/topology", body)

    async def ask(self, uid: str, what: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask for something to be done: scale, stop."""
        return await self._request("POST", f"/v1/jobs/{uid}/{what}", body)

    async def delete(self, uid: str) -> None:
        """Have the job's record deleted; that there is none is as good."""
        try:
            await self._request("DELETE", f"/v1/jobs/{uid}")
        except ApiError as error:
            if not error.unknown_job:
                raise

    async def _request(self, method: str, path: str, body: object = None) -> Any:
        assert self._session is not None
        try:
            headers = {"Authorization": f"Bearer {self._read_token()}"}
            async with self._session.request(
                method, self._url + path, json=body, headers=headers
            ) as response:
                data = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._metrics.api_requests.labels(method, "0").inc()
            why = str(error) or type(error).__name__
            raise ApiError(f"the api at {self._url} is not reached: {why}"[:300], 0) from error
        self._metrics.api_requests.labels(method, str(status)).inc()
        if status < 400:
            return json.loads(data) if data else None
        raise ApiError(f"the api refused {method} {path} ({status}): {_explanation(data)}", status)


def _explanation(data: bytes) -> str:
    try:
        body = json.loads(data)
    except ValueError:
        return data[:200].decode(errors="replace")
    if isinstance(body, dict) and "detail" in body:
        todo = f"; {body['what_to_do']}" if body.get("what_to_do") else ""
        return f"{body['detail']}{todo}"
    return str(body)[:300]
