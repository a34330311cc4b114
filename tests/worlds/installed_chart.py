"""A cluster with the rights that the chart gives, TrainingJobs, their pods, and tokens."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.control_plane import ControlPlane
from tests.worlds.crd import apply_crd

from mainstay_api.kube import KubeSettings
from mainstay_core.job.object_names import object_name

ROOT = Path(__file__).parents[2]
API = "mainstay.dev/api"
SPEC: dict[str, Any] = {
    "training": {"steps": 60, "seed": 1, "lanes": 2, "shardsPerLane": 2},
    "parallelism": {"stages": 2},
    "workload": {"entrypoint": "package.module:workload", "config": {}},
    "template": {"spec": {"containers": [{"name": "trainer", "image": "trainer:1"}]}},
}


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    account: str
    namespace: str


class InstalledChart:
    """Everything is real but the kubelet: nobody runs the pods.

    The rights are the chart's, rendered with ``values``: what they leave out, the tests find.
    """

    def __init__(
        self, plane: ControlPlane, directory: Path, values: str = "rbac.cluster=true"
    ) -> None:
        self.plane = plane
        self.directory = directory
        self._count = itertools.count()
        self.system = plane.make_namespace(f"system-{secrets.token_hex(3)}")
        apply_crd(plane)
        rendered = plane.helm(
            *["template", "mainstay", str(ROOT / "charts/mainstay"), "-n", self.system],
            *["--set", f"crds.enabled=false,{values}", "--skip-tests"],
        )
        kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
        for manifest in yaml.load_all(rendered, yaml.CSafeLoader):
            if manifest and manifest["kind"] in kinds:
                plane.api.apply(manifest, self.system)
        self.operator_user = f"system:serviceaccount:{self.system}:mainstay-operator"
        self.operator = self.token(self.system, "mainstay-operator", API)

    def kube_settings(self, url: str | None = None) -> KubeSettings:
        """What an api in a pod of the chart would find."""
        token = self.directory / f"token-{next(self._count)}"
        token.write_text(self.token(self.system, "mainstay-api"))
        return KubeSettings(
            url=url or self.plane.url, token_file=token, ca_file=self.plane.authority
        )

    def make_job(self, namespace: str, name: str, spec: dict[str, Any] = SPEC) -> str:
        """Make a TrainingJob and what the operator would make for it; return its uid."""
        manifest = {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
        made = self.plane.api.apply(manifest, namespace)
        uid = str(made["metadata"]["uid"])
        self.make_account(namespace, object_name(name, uid))
        return uid

    def make_account(self, namespace: str, name: str) -> None:
        manifest = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
        self.plane.api.apply(manifest, namespace)

    def account_of(self, namespace: str, job: str) -> str:
        """The ServiceAccount of a job's pods."""
        path = f"/apis/mainstay.dev/v1alpha1/namespaces/{namespace}/trainingjobs/{job}"
        return object_name(job, self.plane.api.get(path)["metadata"]["uid"])

    def make_pod(self, namespace: str, job: str, name: str, account: str = "") -> Pod:
        """Make a pod that runs as the account of a job, or as another one."""
        account = account or self.account_of(namespace, job)
        spec = {
            "serviceAccountName": account,
            # No scheduler takes it: it is deleted at once when asked.
            "schedulerName": "nobody",
            "containers": [{"name": "c", "image": "c:1"}],
        }
        body = {"metadata": {"name": name}, "spec": spec}
        made = self.plane.api.create(f"/api/v1/namespaces/{namespace}/pods", body)
        return Pod(name, made["metadata"]["uid"], account, namespace)

    def token(
        self, namespace: str, account: str, audience: str | None = None, pod: Pod | None = None
    ) -> str:
        """Ask for a token as the kubelet does for a projected volume."""
        spec: dict[str, Any] = {"expirationSeconds": 600}
        if audience is not None:
            spec["audiences"] = [audience]
        if pod is not None:
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.name,
                "uid": pod.uid,
            }
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.plane.api.create(path, {"spec": spec})["status"]["token"])

    def pod_token(self, pod: Pod, uid: str) -> str:
        return self.token(pod.namespace, pod.account, f"mainstay.dev/jobs/{uid}", pod)

    def grant(self, namespace: str, role: str, user: str) -> None:
        """Give a user one of the chart's roles."""
        kind = "User"
        subject = {"kind": kind, "name": user, "apiGroup": "rbac.authorization.k8s.io"}
        if user.startswith("system:serviceaccount:"):
            _, _, owner, name = user.split(":")
            subject = {"kind": "ServiceAccount", "name": name, "namespace": owner}
        manifest = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"grant-{next(self._count)}", "namespace": namespace},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": f"{self.system}:mainstay:{role}",
            },
            "subjects": [subject],
        }
        self.plane.api.apply(manifest, namespace)

    def person(self, namespace: str, role: str | None, *, audience: str | None = API) -> str:
        """A ServiceAccount that somebody uses, with a role or none; return its token."""
        name = f"person-{next(self._count)}"
        self.make_account(namespace, name)
        if role is not None:
            self.grant(namespace, role, f"system:serviceaccount:{namespace}:{name}")
        return self.token(namespace, name, audience)


def routes_of(app: Any) -> Iterator[tuple[str, str]]:
    """Every (method, path) that an app serves, included routers and hidden routes as well."""

    def flatten(routes: Any) -> Iterator[Any]:
        for route in routes:
            inner = getattr(route, "effective_candidates", None)
            if inner is None:
                yield route
            else:
                yield from flatten(inner())

    for route in flatten(app.routes):
        methods = getattr(route, "methods", None)
        assert methods, f"{route!r} serves no known method: say here how it is protected"
        for method in sorted(methods):
            yield method, route.path
