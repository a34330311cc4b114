"""A plain client of the API server for tests: paths, dicts, server-side apply, waiting by watch."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

Object = dict[str, Any]
GIVE_UP_S = 120.0
KINDS = {
    "ClusterRole": "clusterroles",
    "EndpointSlice": "endpointslices",
    "Ingress": "ingresses",
    "NetworkPolicy": "networkpolicies",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
}
CLUSTER_WIDE = {
    "APIService",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "Namespace",
    "Node",
    "PersistentVolume",
    "PriorityClass",
    "StorageClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


class ApiError(AssertionError):
    """The API server refused a request; `status` is its code and `message` its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def path_of(manifest: Object, namespace: str = "default") -> str:
    """The path of an object, from its manifest."""
    group, kind = manifest["apiVersion"], manifest["kind"]
    plural = KINDS.get(kind, kind.lower() + "s")
    base = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    if kind not in CLUSTER_WIDE:
        base += f"/namespaces/{manifest['metadata'].get('namespace', namespace)}"
    return f"{base}/{plural}/{manifest['metadata']['name']}"


class Api:
    """The API server as one user. Every method takes a path as in ``/api/v1/namespaces/x/pods``."""

    def __init__(self, url: str, authority: Path, token: str) -> None:
        self.url = url
        self.authority = authority
        self.token = token
        self.http = httpx.Client(
            base_url=url,
            verify=ssl.create_default_context(cafile=str(authority)),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=30.0,
            trust_env=False,
        )

    def close(self) -> None:
        self.http.close()

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Object:
        """Send a request; ApiError unless the answer is a success."""
        options.setdefault("headers", {})
        if body is not None:
            options["headers"].setdefault("Content-Type", "application/json")
            options["content"] = json.dumps(body)
        answer = self.http.request(method, path, **options)
        if answer.is_success:
            return dict(answer.json()) if answer.content else {}
        try:
            message = answer.json().get("message", answer.text)
        except ValueError:
            message = answer.text
        raise ApiError(answer.status_code, message)

    def get(self, path: str, **params: str) -> Object:
        return self.request("GET", path, params=params)

    def find(self, path: str) -> Object | None:
        """The object, or None if there is none."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, path: str, **params: str) -> list[Object]:
        return list(self.get(path, **params)["items"])

    def create(self, path: str, body: Object, **params: str) -> Object:
        return self.request("POST", path, body, params=params)

    def patch(self, path: str, body: Object, **params: str) -> Object:
        """Change an object by a merge patch."""
        headers = {"Content-Type": "application/merge-patch+json"}
        return self.request("PATCH", path, body, params=params, headers=headers)

    def delete(self, path: str, **params: str) -> Object:
        return self.request("DELETE", path, params=params)

    def apply(self, manifest: Object, namespace: str = "default", **params: str) -> Object:
        """Apply a manifest server-side, by force."""
        return self.request(
            "PATCH",
            path_of(manifest, namespace),
            manifest,
            params={"fieldManager": "tests", "force": "true", **params},
            headers={"Content-Type": "application/apply-patch+yaml"},
        )

    def wait(
        self,
        path: str,
        until: Callable[[Object | None], Any],
        what: str = "",
        give_up_s: float = GIVE_UP_S,
    ) -> Object | None:
        """Watch one object until the condition holds; None stands for a missing one."""
        folder, _, name = path.rpartition("/")
        deadline = time.monotonic() + give_up_s
        seen: Object | None = None
        while (left := deadline - time.monotonic()) > 0:
            listed = self.get(folder, fieldSelector=f"metadata.name={name}")
            seen = next(iter(listed["items"]), None)
            if until(seen):
                return seen
            params = {
                "watch": "true",
                "fieldSelector": f"metadata.name={name}",
                "resourceVersion": listed["metadata"]["resourceVersion"],
                "timeoutSeconds": str(max(1, int(left))),
            }
            try:
                with self.http.stream("GET", folder, params=params, timeout=left + 5) as stream:
                    for line in stream.iter_lines():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        seen = None if event["type"] == "DELETED" else event["object"]
                        if until(seen):
                            return seen
            except httpx.TransportError:
                continue
        state = seen and {name: seen.get(name) for name in ("kind", "status")}
        raise AssertionError(f"{path}: {what or 'not as wanted'} after {give_up_s:.0f} s: {state}")
