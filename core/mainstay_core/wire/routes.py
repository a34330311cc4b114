"""The api's routes as programs call them, without sockets.

Whoever has an HTTP library inherits the calls and carries the requests.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError, RemoteProtocolError
from mainstay_core.wire.api import (
    ApiError,
    ApiRefused,
    ApiUnavailable,
    Failure,
    HeartbeatReply,
    HeldJob,
    Registration,
    failure_of,
    is_no_answer,
    read_retry_after,
)
from mainstay_core.wire.facts import Fact, Heartbeat, Location, PodRegistration
from mainstay_core.wire.findings import FindingsPage, ToldFinding
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.page import JobPage, KnownJob, PodsPage
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.recoveries import Recovery, read_recovery
from mainstay_core.wire.stores import StoreReply, StoreStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the api, without a transport."""

    method: str
    path: str
    """Below the api's url, with the query."""
    body: Any = None
    """JSON value; None: the request has no body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryList:
    """A job's recoveries, oldest first, as far as they can be read."""

    read: tuple[Recovery, ...]
    unread: tuple[str, ...] = ()
    """For each of the others why it cannot be read: a newer api wrote it."""


class JobApi(ABC):
    """The requests of people and of the provider: one method for each.

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

    async def fetch_known_jobs(self) -> tuple[KnownJob, ...]:
        """Return the jobs of which the api has a record, as far as the caller may see them."""
        reply = await self.send(Request(method="GET", path="/v1/jobs"))
        try:
            if not isinstance(reply, list):
                raise RemoteProtocolError(f"jobs: expected a list, got {type(reply).__name__}")
            return tuple(codec.decode(KnownJob, item) for item in reply)
        except RemoteProtocolError as error:
            why = f"what the api says of its jobs is not understood: {error}"
            raise ApiError(why, Failure.NOT_UNDERSTOOD) from error

    async def fetch(self, job: str, what: str = "") -> Any:
        """Return the job, or a part of it.

        Args:
            job: uid or name.
            what: plan, members, pods, summary, snapshots, lineage, recoveries, ledger,
                findings, events, faults or report.
        """
        path = f"/v1/jobs/{job}/{what}" if what else f"/v1/jobs/{job}"
        return await self.send(Request(method="GET", path=path))

    async def fetch_page(self, job: str) -> JobPage:
        """Return the job on one page."""
        return await self._read(job, "summary", partial(codec.decode, JobPage))

    async def fetch_pods(self, job: str) -> PodsPage:
        """Return how many pods the job needs now, and which to end."""
        return await self._read(job, "pods", partial(codec.decode, PodsPage))

    async def fetch_recoveries(self, job: str) -> RecoveryList:
        """Return what was done about each fault of the job."""
        return await self._read(job, "recoveries", read_recoveries)

    async def fetch_findings(self, job: str) -> FindingsPage:
        """Return what checks have found in the job."""
        return await self._read(job, "findings", partial(codec.decode, FindingsPage))

    async def _read(self, job: str, what: str, read: Callable[[Any], T]) -> T:
        reply = await self.fetch(job, what)
        try:
            return read(reply)
        except RemoteProtocolError as error:
            why = f"what the api says of {what} is not understood: {error}"
            raise ApiError(why, Failure.NOT_UNDERSTOOD) from error

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

    async def allow_approximation(
        self,
        job: str,
        stages: Sequence[int] | None,
        *,
        dry_run: bool,
        after_lost_steps: int | None = None,
    ) -> dict[str, Any]:
        """Allow that lost stages are made anew from others, this once; return what was answered.

        Args:
            job: uid or name.
            stages: that may be made anew; None: those that are lost, or, ahead of a loss, all.
            dry_run: whether only to ask what it would come to.
            after_lost_steps: ahead of a loss, the most steps that the job gives up rather; None: it
                is for the recovery that the job waits for.
        """
        body: dict[str, Any] = {"dry_run": dry_run}
        if stages:
            body["stages"] = list(stages)
        if after_lost_steps is None:
            return dict(await self._post(f"/{job}/approximate", body))
        # A route of its own: an api that does not know the limit must not grant without it.
        body["after_lost_steps"] = after_lost_steps
        return dict(await self._post(f"/{job}/approximate/ahead", body))

    async def withdraw_approximation(self, job: str) -> dict[str, Any]:
        """Take back what was allowed and is not used yet; return what was answered."""
        return dict(await self._post(f"/{job}/approximate/withdraw"))

    async def post_facts(self, job: str, facts: Sequence[Fact]) -> None:
        """Tell what the provider knows of pods for certain."""
        body = {"facts": [codec.encode(fact) for fact in facts]}
        await self._post(f"/{job}/provider/facts", body)

    async def report_topology(self, job: str, nodes: Mapping[str, Location]) -> None:
        """Tell where the nodes of the job's pods are."""
        body = {"nodes": {name: codec.encode(place) for name, place in nodes.items()}}
        await self._post(f"/{job}/provider/topology", body)

    async def check_snapshots(self, job: str) -> int:
        """Have every store check its segments; return the number of this check."""
        return int((await self._post(f"/{job}/snapshots/check"))["check"])

    async def delete_job(self, job: str) -> None:
        """Have the job's record deleted; that there is none is as good."""
        try:
            await self.send(Request(method="DELETE", path=f"/v1/jobs/{job}"))
        except ApiError as error:
            if error.failure is not Failure.UNKNOWN:
                raise

    async def _post(self, path: str, body: Any = None) -> Any:
        return await self.send(Request(method="POST", path=f"/v1/jobs{path}", body=body))


class SupervisorApi(ABC):
    """The requests of a supervisor about its job: one method for each.

    Every method raises ApiUnavailable without an answer, and ApiRefused if the answer is no.

    Args:
        job: uid of the job.
        supervisor: random name of this process; what one tells counts until another one registers.
    """

    def __init__(self, job: str, supervisor: str) -> None:
        self.base = f"/v1/jobs/{job}/agent"
        """Path under which all routes for supervisors lie."""
        self.supervisor = supervisor

    @abstractmethod
    async def send(self, request: Request) -> dict[str, Any]:
        """Send a request; return the answer's JSON object, an empty one for no content."""

    async def register(self, registration: PodRegistration) -> Registration:
        """Introduce the pod. Repeating it is harmless."""
        return codec.decode(Registration, await self._post("pods", codec.encode(registration)))

    async def post_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Say that the pod lives."""
        reply = await self._post("heartbeats", codec.encode(heartbeat))
        return codec.decode(HeartbeatReply, reply)

    async def post_facts(self, facts: Iterable[Fact]) -> Plan | None:
        """Tell facts; return the plan in force, if the api names one."""
        body = {"facts": [codec.encode(f) for f in facts], "supervisor": self.supervisor}
        return _plan_in(await self._post("facts", body))

    async def post_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        """Mirror ledger entries."""
        await self._post("ledger", {"entries": [codec.encode(entry) for entry in entries]})

    async def post_findings(self, findings: Iterable[ToldFinding]) -> None:
        """Tell what trainers have found wrong. Repeating it is harmless."""
        await self._post("findings", {"findings": [codec.encode(told) for told in findings]})

    async def post_store(self, status: StoreStatus) -> StoreReply:
        """Tell what the pod's store of segments holds."""
        return codec.decode(StoreReply, await self._post("store", codec.encode(status)))

    async def recover_store(self, held: HeldJob) -> None:
        """Tell the api what it has lost."""
        await self._post("restore", codec.encode(held))

    async def post_fired(
        self, fault: str, *, pod: str, slot: int, rank: object, at_s: float
    ) -> bool:
        """Record that an injected fault fires; False if it has fired before."""
        body = {"pod": pod, "slot": slot, "rank": rank, "at_s": at_s}
        try:
            await self._post(f"faults/{fault}/fired", body)
        except ApiRefused as refusal:
            if refusal.is_unknown:
                raise ApiUnavailable(f"not registered yet: {refusal}") from refusal
            if refusal.failure is Failure.CONFLICT:
                return False
            raise
        return True

    async def fetch_plan(self) -> Plan | None:
        """Return the newest plan, None before the first."""
        try:
            reply = await self.send(Request(method="GET", path=f"{self.base}/plan"))
        except ApiRefused as refusal:
            if refusal.failure is Failure.UNKNOWN:
                return None
            raise
        return _plan_in(reply) if "plan" in reply else codec.decode(Plan, reply)

    async def _post(self, path: str, body: Any) -> dict[str, Any]:
        return await self.send(Request(method="POST", path=f"{self.base}/{path}", body=body))


def read_recoveries(data: Any) -> RecoveryList:
    """Return a job's recoveries from the JSON list that the api shows.

    One that cannot be read takes none of the others along.

    Raises:
        RemoteProtocolError: it is no list.
    """
    if not isinstance(data, list):
        raise RemoteProtocolError(f"recoveries: expected a list, got {type(data).__name__}")
    read, unread = [], []
    for number, item in enumerate(data, 1):
        try:
            read.append(read_recovery(item))
        except RemoteProtocolError as error:
            unread.append(f"recovery {number} of {len(data)}: {error}")
    return RecoveryList(read=tuple(read), unread=tuple(unread))


def read_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer; what is none stands under ``detail``."""
    if not content:
        return {}
    try:
        body = codec.parse_json(content, "answer")
    except MalformedError:
        return {"detail": content.decode(errors="replace")[:500]}
    return body if isinstance(body, dict) else {"detail": body}


def read_failure(
    status: int, content: bytes, retry_after: str | None = None
) -> ApiUnavailable | ApiRefused:
    """Return what a supervisor's request failed with, with the plan that the answer carries.

    Args:
        status: HTTP status, 400 or more.
        content: body of the answer.
        retry_after: header ``Retry-After`` of the answer.
    """
    if is_no_answer(status):
        said = content[:200].decode(errors="replace")
        wait_s = read_retry_after(retry_after)
        return ApiUnavailable(f"{status}: {said}", failure_of(status), wait_s)
    body = read_object(content)
    detail = body.get("detail", body)
    plan = None
    for part in (body, detail if isinstance(detail, dict) else {}):
        try:
            plan = plan or _plan_in(part)
        except RemoteProtocolError as error:
            logger.warning("the api's plan cannot be read: %s", error)
    return ApiRefused(status, str(body.get("error", "")), detail, plan)


def _plan_in(body: Mapping[str, Any]) -> Plan | None:
    plan = body.get("plan")
    return None if plan is None else codec.decode(Plan, plan)


def read_answer(content: bytes) -> Any:
    """Return the JSON value of an answer that is a success, None for an empty one.

    Raises:
        ApiError: it is no JSON: something else on the way has answered.
    """
    try:
        return codec.parse_json(content, "the api's answer") if content else None
    except MalformedError as error:
        raise ApiError(str(error), Failure.NOT_UNDERSTOOD) from error


def explain(content: bytes, at_most: int | None = None) -> str:
    """Return what the body of a refusal says, and what can be done about it.

    Args:
        content: the body, whatever its form.
        at_most: characters of a body that is not in the api's own form; None: all of it.
    """
    try:
        body = codec.parse_json(content, "answer")
    except MalformedError:
        return content.decode(errors="replace")[:at_most]
    if isinstance(body, dict) and "detail" in body:
        todo = f"; {body['what_to_do']}" if body.get("what_to_do") else ""
        return f"{body['detail']}{todo}"
    return str(body)[:at_most]
