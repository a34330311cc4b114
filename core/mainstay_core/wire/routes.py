"""The api's routes as programs call them, and what a failed request means; without sockets.

Whoever has an HTTP library inherits the calls and carries the requests.
"""

from __future__ import annotations

import enum
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError, RemoteProtocolError
from mainstay_core.wire.facts import Fact, Location
from mainstay_core.wire.recoveries import Recovery, read_recovery


class Failure(enum.Enum):
    """What a failed request means for the program that sent it."""

    UNREACHED = "unreached"
    """Nobody answered."""
    AWAY = "away"
    """The api cannot answer now, e.g. because its store is away."""
    BROKEN = "broken"
    """The api, or a server on the way to it, made a mistake."""
    BUSY = "busy"
    """The request came too slowly, or too many came."""
    UNAUTHORIZED = "unauthorized"
    """The caller is not known, or may not do this."""
    UNKNOWN = "unknown"
    """The job, or what else the path names, is not known."""
    CONFLICT = "conflict"
    """The job's state does not allow it, or has moved on."""
    DELETED = "deleted"
    """The job was deleted."""
    REFUSED = "refused"
    """The request itself is wrong."""


_FAILURES = {
    401: Failure.UNAUTHORIZED,
    403: Failure.UNAUTHORIZED,
    404: Failure.UNKNOWN,
    408: Failure.BUSY,
    409: Failure.CONFLICT,
    410: Failure.DELETED,
    429: Failure.BUSY,
    503: Failure.AWAY,
}


def failure_of(status: int) -> Failure:
    """Return what an HTTP status that is no success means."""
    return _FAILURES.get(status, Failure.REFUSED if 400 <= status < 500 else Failure.BROKEN)


class ApiError(MainstayError):
    """A request to the api failed.

    Args:
        message: what went wrong, for people.
        failure: what follows from it, for the program.
    """

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure

    @property
    def is_away(self) -> bool:
        """Whether the api, or its store, is away: it may be back in a moment."""
        return self.failure in (Failure.UNREACHED, Failure.AWAY)

    @property
    def is_answer(self) -> bool:
        """Whether the api, or who guards it, understood the request and said no."""
        return not self.is_away and self.failure is not Failure.BROKEN

    @property
    def is_final(self) -> bool:
        """Whether to send the same request again is of no use."""
        return self.failure in (Failure.CONFLICT, Failure.DELETED, Failure.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request."""

    method: str
    path: str
    """Below the api's url, with the query."""
    body: Any = None
    """JSON value; None: the request has no body."""


class JobApi(ABC):
    """What people and the process provider ask of the api: one method for each request.

    Every method raises ApiError where the request failed.
    """

    @abstractmethod
    async def send(self, request: Request) -> Any:
        """Send a request; return the JSON value of the answer, None for an empty one.

        Raises:
            ApiError: the api was not reached, or did not do it.
        """

    async def create_job(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job from a manifest; return it as ``/v1/jobs/{job}`` shows it."""
        return dict(await self._post("", body))

    async def submit_job(self, uid: str, namespace: str, manifest: Mapping[str, Any]) -> None:
        """Make a job known under its uid, or pass on what changed in it. Repeating it is harmless.

        That the job has moved on meanwhile is as good.
        """
        try:
            await self.create_job({"manifest": manifest, "uid": uid, "namespace": namespace})
        except ApiError as error:
            if error.failure is not Failure.CONFLICT:
                raise

    async def fetch(self, job: str, what: str = "") -> Any:
        """Return the job, or a part of it.

        Args:
            job: uid or name.
            what: plan, members, pods, summary, recoveries, ledger, events, faults or report.
        """
        path = f"/v1/jobs/{job}/{what}" if what else f"/v1/jobs/{job}"
        return await self.send(Request(method="GET", path=path))

    async def fetch_recoveries(self, job: str) -> tuple[Recovery, ...]:
        """Return what was done about each fault of the job, oldest first."""
        try:
            return tuple(read_recovery(item) for item in await self.fetch(job, "recoveries"))
        except RemoteProtocolError as error:
            raise ApiError(
                f"what the api says of recoveries is not understood: {error}", Failure.BROKEN
            ) from error

    async def inject_faults(self, job: str, faults: Sequence[Any]) -> list[dict[str, Any]]:
        """Give faults, as in a faults file, to the running job; return them as it lists them."""
        return list(await self._post(f"/{job}/faults", {"faults": list(faults)}))

    async def fire_process_fault(self, job: str, fault: str, process: str, at_s: float) -> None:
        """Record that a fault on a process of the control plane is about to be carried out."""
        body = {"process": process, "at_s": at_s}
        await self._post(f"/{job}/provider/faults/{fault}/fired", body)

    async def stop_job(self, job: str) -> None:
        """Ask the job to stop after its current step."""
        await self._post(f"/{job}/stop")

    async def scale_job(self, job: str, replicas: int) -> dict[str, Any]:
        """Want another number of replicas; return the job as it is then shown."""
        return dict(await self._post(f"/{job}/scale", {"replicas": replicas}))

    async def suspend_job(self, job: str, *, suspend: bool) -> dict[str, Any]:
        """Have a job stand still without pods, or go on; return the job as it is now."""
        return dict(await self._post(f"/{job}/{'suspend' if suspend else 'resume'}"))

    async def drain_pod(self, job: str, pod: str) -> dict[str, Any]:
        """Have a pod's work handed over; return the job as it is then shown."""
        return dict(await self._post(f"/{job}/drain", {"pod": pod}))

    async def post_facts(self, job: str, facts: Sequence[Fact]) -> None:
        """Tell what the process provider knows of pods for certain."""
        body = {"facts": [codec.encode(fact) for fact in facts]}
        await self._post(f"/{job}/provider/facts", body)

    async def report_topology(self, job: str, nodes: Mapping[str, Location]) -> None:
        """Tell where the nodes of the job's pods are."""
        body = {"nodes": {name: codec.encode(place) for name, place in nodes.items()}}
        await self._post(f"/{job}/provider/topology", body)

    async def delete_job(self, job: str) -> None:
        """Have the job's record deleted; that there is none is as good."""
        try:
            await self.send(Request(method="DELETE", path=f"/v1/jobs/{job}"))
        except ApiError as error:
            if error.failure is not Failure.UNKNOWN:
                raise

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self.send(Request(method="POST", path=f"/v1/jobs{path}", body=body))


def read_answer(content: bytes) -> Any:
    """Return the JSON value of an answer that is a success, None for an empty one."""
    return json.loads(content) if content else None


def explain(content: bytes, at_most: int | None = None) -> str:
    """Return what the body of a refusal says, and what can be done about it.

    Args:
        content: the body, whatever its form.
        at_most: characters of a body that is not in the api's own form; None: all of it.
    """
    try:
        body = json.loads(content)
    except ValueError:
        return content.decode(errors="replace")[:at_most]
    if isinstance(body, dict) and "detail" in body:
        todo = f"; {body['what_to_do']}" if body.get("what_to_do") else ""
        return f"{body['detail']}{todo}"
    return str(body)[:at_most]
