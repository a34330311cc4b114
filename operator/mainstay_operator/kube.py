"""The Kubernetes API in plain dicts: few verbs, bounded in requests per second, counted.

Models are left out on purpose: turning objects into them costs more than all
the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import client, config

from mainstay_core.base.errors import MainstayError
from mainstay_core.job.spec import API_VERSION, PLURAL
from mainstay_core.pool.conditions import code_of
from mainstay_operator.leadership import forbid_nothing
from mainstay_operator.metrics import Metrics
from mainstay_operator.resources import FIELD_MANAGER

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
CONFLICT_TRIES = 5
"""Attempts to make an object while others use up the same quota: the server counts by versions."""
RIGHTS_REMEDY = (
    "the operator lacks the rights of the chart's Role in this namespace: "
    "name it in watchNamespaces, or set rbac.cluster"
)
"""What to do when the operator may not make objects of a job."""
_PATHS = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "serviceaccounts": "/api/v1",
    "secrets": "/api/v1",
    "events": "/api/v1",
    "nodes": "/api/v1",
    "namespaces": "/api/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    PLURAL: f"/apis/{API_VERSION}",
}
KINDS = {
    "Pod": "pods",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "Secret": "secrets",
    "Event": "events",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "Lease": "leases",
    "TrainingJob": PLURAL,
}


class KubeError(MainstayError):
    """The Kubernetes API refused, or was not reached (status 0).

    Args:
        message: what was asked and what it says, for people.
        status: HTTP status.
        code: the word for programs that Kubernetes calls a reason: AlreadyExists, NotFound.
        answer: what it says, alone.
        fields: of the object that was sent, those that are at fault.
        unauthorized: who asks has no right to make such objects, so this one was not looked at.
    """

    def __init__(
        self,
        message: str,
        status: int,
        code: str = "",
        answer: str = "",
        fields: tuple[str, ...] = (),
        unauthorized: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.answer = answer or message
        self.fields = fields
        self.unauthorized = unauthorized


@dataclass(slots=True)
class Bucket:
    """A token bucket: ``burst`` at once, ``qps`` per second in the long run. Time is given."""

    qps: float
    burst: int
    level: float = -1.0
    at_s: float = 0.0

    def take(self, now_s: float) -> float:
        """Take one token; return how long to wait before using it."""
        if self.level < 0 and self.at_s == 0.0:
            self.level, self.at_s = float(self.burst), now_s
        self.level = min(float(self.burst), self.level + (now_s - self.at_s) * self.qps)
        self.at_s = now_s
        self.level -= 1.0
        return max(0.0, -self.level / self.qps)


class KubeClient:
    """Talks to the Kubernetes API. Use as an asynchronous context manager.

    Args:
        qps: requests per second in the long run.
        burst: requests at once.
        timeout_s: of one request.
        metrics: where requests are counted.
        forbid: returns why nothing may be written now; '' if it may. Asked before each write.
    """

    def __init__(
        self,
        *,
        qps: float,
        burst: int,
        timeout_s: float,
        metrics: Metrics,
        forbid: Callable[[], str] = forbid_nothing,
    ) -> None:
        self._bucket = Bucket(qps=qps, burst=burst)
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._forbid = forbid
        self._client: client.ApiClient | None = None
        self.requests: Counter[str] = Counter()
        """Requests so far by verb and resource."""

    async def __aenter__(self) -> KubeClient:
        configuration = client.Configuration()
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        configuration.retries = None  # passes are repeated, not requests
        self._client = client.ApiClient(configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]

    async def apply(self, body: Mapping[str, Any], manager: str = FIELD_MANAGER) -> dict[str, Any]:
        """Make or change an object by server-side apply; fields of ours that others took return."""
        path = _path_of(body)
        query = {"fieldManager": manager, "force": "true"}
        return await self._request("PATCH", path, body, _APPLY, query)

    async def apply_status(self, body: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Apply the status of an object."""
        path = _path_of(body) + "/status"
        query = {"fieldManager": manager, "force": "true"}
        return await self._request("PATCH", path, body, _APPLY, query)

    async def create(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make an object; None if there is one of this name."""
        return await self._create(body, {})

    async def try_create(self, body: Mapping[str, Any], *, strict: bool) -> None:
        """Ask whether an object could be made; nothing is.

        Args:
            body: the object.
            strict: whether one with a field that nobody knows could not.

        Raises:
            KubeError: it could not, and why.
        """
        how = {"dryRun": "All", "fieldValidation": "Strict" if strict else "Ignore"}
        await self._create(body, how)

    async def _create(
        self, body: Mapping[str, Any], how: Mapping[str, str]
    ) -> dict[str, Any] | None:
        path = _path(KINDS[body["kind"]], body["metadata"]["namespace"])
        query = {"fieldManager": FIELD_MANAGER, **how}
        for left in reversed(range(CONFLICT_TRIES)):
            try:
                return await self._request("POST", path, body, query=query)
            except KubeError as error:
                if error.code == "AlreadyExists":
                    return None
                if error.status != 409 or not left:
                    raise
        raise AssertionError

    async def replace(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Write a whole object over the version that it names; None if there is another one."""
        try:
            return await self._request("PUT", _path_of(body), body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise
            return None

    async def fetch(self, resource: str, namespace: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if there is none."""
        try:
            return await self._request("GET", _path(resource, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, resource: str, namespace: str, selector: str = "", limit: int = 0
    ) -> list[dict[str, Any]]:
        """Return the objects with these labels as they are now: no older than the question.

        Without a namespace, those of all namespaces, or of none. With a limit, so many of them.
        """
        query = {"labelSelector": selector} if selector else {}
        if limit:
            query["limit"] = str(limit)
        reply = await self._request("GET", _path(resource, namespace), query=query)
        return list(reply.get("items") or ())

    async def merge(
        self, resource: str, namespace: str, name: str, patch: Mapping[str, Any]
    ) -> None:
        """Change some fields of an object; nothing if there is none."""
        path = _path(resource, namespace, name)
        try:
            await self._request("PATCH", path, patch, _MERGE, {"fieldManager": FIELD_MANAGER})
        except KubeError as error:
            if error.status != 404:
                raise

    async def patch(
        self, resource: str, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Carry out a JSON patch; return False if one of its tests fails, or there is no object."""
        path = _path(resource, namespace, name)
        try:
            await self._request(
                "PATCH", path, operations, _JSON_PATCH, {"fieldManager": FIELD_MANAGER}
            )
        except KubeError as error:
            if error.status not in (404, 422):
                raise
            return False
        return True

    async def taint_node(self, name: str, key: str, effect: str) -> None:
        """Add a taint to a node, if it is there and has none of that key yet."""
        path = f"/api/v1/nodes/{name}"
        try:
            node = await self._request("GET", path)
        except KubeError as error:
            if error.status == 404:
                return
            raise
        taints = (node.get("spec") or {}).get("taints") or []
        if any(t["key"] == key for t in taints):
            return
        # By its version: somebody else's taint that came meanwhile is not taken away.
        metadata = {"resourceVersion": node["metadata"]["resourceVersion"]}
        spec = {"taints": [*taints, {"key": key, "effect": effect}]}
        body = {"metadata": metadata, "spec": spec}
        await self._request("PATCH", path, body, _MERGE, {"fieldManager": FIELD_MANAGER})

    async def delete(
        self, resource: str, namespace: str, name: str, uid: str, *, force: bool = False
    ) -> bool:
        """Delete the object with this uid; return whether it was there."""
        body: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        if force:
            body["gracePeriodSeconds"] = 0
        try:
            await self._request(
                "DELETE", _path(resource, namespace, name), body, "application/json"
            )
        except KubeError as error:
            # Conflict: an object of this name has another uid, so ours is gone.
            if error.status in (404, 409):
                return False
            raise
        return True

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        assert self._client is not None
        wait_s = self._bucket.take(asyncio.get_running_loop().time())
        if wait_s:
            await asyncio.sleep(wait_s)
        why_not = self._forbid() if method != "GET" else ""
        if why_not:
            raise KubeError(f"{method} {path}: not sent: {why_not}", 0)
        resource = _resource_in(path)
        self.requests[f"{method} {resource}"] += 1
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self._client.configuration.host + path
        if query:
            url += "?" + urlencode(query)
        try:
            response = await self._client.call_api(
                method, url, headers, body, _request_timeout=self._timeout_s
            )
            data = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._metrics.kube_requests.labels(method, resource, "0").inc()
            raise KubeError(f"{method} {path}: the server is not reached: {error!r}", 0) from error
        self._metrics.kube_requests.labels(method, resource, str(response.status)).inc()
        return _reply(method, path, response.status, data)


def _reply(method: str, path: str, status: int, data: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(data) if data else {}
    except ValueError:
        reply = {"message": data[:200].decode(errors="replace")}
    if status < 400:
        return dict(reply)
    message = reply.get("message", "")
    why = f"{method} {path}: refused with {status}: {message}"
    details = reply.get("details") or {}
    fields = tuple(str(c["field"]) for c in details.get("causes") or () if c.get("field"))
    # A quota or a policy names the object that it does not admit, and a webhook has no details.
    # Rights are looked at first, by the path: it names the kind, and no object that is to be made.
    refused = status == HTTPStatus.FORBIDDEN and method == "POST"
    unauthorized = refused and bool(details.get("kind")) and not details.get("name")
    raise KubeError(why, status, code_of(reply), message, fields, unauthorized)


def _path(resource: str, namespace: str, name: str = "") -> str:
    where = f"/namespaces/{namespace}" if namespace else ""
    path = f"{_PATHS[resource]}{where}/{resource}"
    return f"{path}/{name}" if name else path


def _path_of(body: Mapping[str, Any]) -> str:
    metadata = body["metadata"]
    return _path(KINDS[body["kind"]], metadata["namespace"], metadata["name"])


def _resource_in(path: str) -> str:
    """Return what a path is about: ``/api/v1/...``, ``/apis/GROUP/VERSION/...``."""
    parts = path.split("/")
    rest = parts[3:] if parts[1] == "api" else parts[4:]
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    return f"{rest[0]}/status" if path.endswith("/status") else rest[0]
