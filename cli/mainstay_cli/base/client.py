"""The api over HTTP, as the command line uses it: everything that is shown comes from here."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mainstay_cli.base import state_dir
from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_core.base import codec
from mainstay_core.wire.facts import Fact

TIMEOUT_S = 30.0
"""Of one request. Generous: a machine full of trainers is slow, not broken."""


class ApiError(CliError):
    """The api refused, with its own words.

    Args:
        message: what the api said.
        status: the HTTP status, or 0 when it was not reached.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, ExitCode.FAILED)
        self.status = status


class ApiClient:
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
            return (await self._http.get("/readyz")).is_success
        except httpx.TransportError:
            return False

    async def create_job(self, body: dict[str, Any]) -> dict[str, Any]:
        """Create a job from a manifest; return it as ``/v1/jobs/{job}`` shows it."""
        return dict(await self._request("POST", "/v1/jobs", body))

    async def fetch(self, job: str, what: str = "") -> Any:
        """Return the job, or a part: plan, members, recoveries, ledger, events, report."""
        return await self._request("GET", f"/v1/jobs/{job}" + (f"/{what}" if what else ""))

    async def inject_faults(self, job: str, faults: Sequence[Any]) -> list[dict[str, Any]]:
        """Give faults, as in a faults file, to the running job; return them as it lists them."""
        body = {"faults": list(faults)}
        return list(await self._request("POST", f"/v1/jobs/{job}/faults", body))

    async def fire_process_fault(self, job: str, fault: str, process: str, at_s: float) -> None:
        """Record that a fault on a process of the control plane is about to be carried out."""
        body = {"process": process, "at_s": at_s}
        await self._request("POST", f"/v1/jobs/{job}/provider/faults/{fault}/fired", body)

    async def stop_job(self, job: str) -> None:
        """Ask the job to stop after its current step."""
        await self._request("POST", f"/v1/jobs/{job}/stop")

    async def scale_job(self, job: str, replicas: int) -> dict[str, Any]:
        """Want another number of replicas; return the job as it is then shown."""
        return dict(await self._request("POST", f"/v1/jobs/{job}/scale", {"replicas": replicas}))

    async def suspend_job(self, job: str, *, suspend: bool) -> dict[str, Any]:
        """Have a job stand still without pods, or go on; return the job as it is now."""
        what = "suspend" if suspend else "resume"
        return dict(await self._request("POST", f"/v1/jobs/{job}/{what}"))

    async def drain_pod(self, job: str, pod: str) -> dict[str, Any]:
        """Have a pod's work handed over; return the job as it is then shown."""
        return dict(await self._request("POST", f"/v1/jobs/{job}/drain", {"pod": pod}))

    async def post_facts(self, job: str, facts: Sequence[Fact]) -> None:
        """Tell what the process provider knows for certain."""
        body = {"facts": [codec.encode(fact) for fact in facts]}
        await self._request("POST", f"/v1/jobs/{job}/provider/facts", body)

    async def _request(self, method: str, path: str, body: object = None) -> Any:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ApiError(
                f"the api at {self._http.base_url} is not reached: {error}", 0
            ) from error
        if response.is_success:
            return response.json() if response.content else None
        raise ApiError(_explanation(response), response.status_code)


def connect(record: state_dir.RunRecord) -> ApiClient:
    """Return a client of a running job's api."""
    token = (Path(record.state_dir) / "token").read_text().strip()
    return ApiClient(record.url, token)


def _explanation(response: httpx.Response) -> str:
    """Return what the api's error body says, whatever its form."""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    if isinstance(body, dict) and body.get("kind") == "Status":
        # Not the api's own words: those of a cluster's API server on the way to it.
        hint = "; the chart's rbac.reach gives that right" if response.status_code == 403 else ""
        return f"the API server did not pass it on: {body.get('message')}{hint}"
    if isinstance(body, dict) and "detail" in body:
        todo = f"; {body['what_to_do']}" if body.get("what_to_do") else ""
        body = f"{body['detail']}{todo}"
    return f"the api refused ({response.status_code}): {body}"
