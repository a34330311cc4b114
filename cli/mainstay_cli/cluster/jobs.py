"""TrainingJobs of a cluster as jobs to ask about: which one, where its api is, what to show there.

The api is reached through the API server, as a proxy of the api's Service: whoever
has a kubeconfig needs no other way in. Pods of the job name their api, so that
nobody has to say where it is installed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mainstay_cli.base.client import ApiClient
from mainstay_cli.base.exits import UsageError
from mainstay_cli.cluster.kube import Access, Kube, KubeError, Object, load_access
from mainstay_core.job.spec import API_AUDIENCE, API_VERSION, LABEL_UID, PLURAL

DEFAULT_API = "mainstay-system/mainstay-api:8080"
TOKEN_S = 600
"""The shortest life that the API server gives a token."""

_SERVICE = re.compile(r"([a-z0-9-]+)/([a-z0-9-]+):(\d+)")
_INSIDE = re.compile(r"https?://([a-z0-9-]+)\.([a-z0-9-]+)\.svc[a-z0-9.-]*?(?::(\d+))?/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the command line that name the cluster and the namespace."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    api: str | None = None
    """``NAMESPACE/SERVICE:PORT`` or a URL; found by itself when left out."""
    account: str | None = None
    """``[NAMESPACE/]NAME`` of a ServiceAccount as whom the api is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way to an api."""

    url: str
    through: Access | None
    """The API server on the way; None: the api is reached directly."""


@dataclass(slots=True)
class ClusterJob:
    """A TrainingJob of a cluster, as a job to ask about."""

    manifest: Object
    cluster: ClusterJobs

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Where it is."""
        return str(self.manifest["metadata"]["namespace"])

    @property
    def job(self) -> str:
        return str(self.manifest["metadata"]["uid"])

    def is_running(self) -> bool:
        """The api answers for a job as long as its TrainingJob is there."""
        return True

    def connect(self) -> ApiClient:
        return self.cluster.connect(self)

    def load_report(self) -> dict[str, Any]:
        """Jobs of a cluster leave nothing on this machine."""
        return {}

    def describe_place(self) -> dict[str, str]:
        return {"namespace": self.namespace, "cluster": self.cluster.access.url}


@dataclass
class ClusterJobs:
    """The TrainingJobs of one namespace."""

    options: Options
    _token: str | None = field(default=None, init=False)

    @cached_property
    def access(self) -> Access:
        """The API server."""
        return load_access(self.options.kubeconfig, self.options.context)

    @cached_property
    def kube(self) -> Kube:
        """A client of the API server."""
        return Kube(self.access)

    @property
    def namespace(self) -> str:
        """Where jobs are looked for."""
        return self.options.namespace or self.access.namespace

    def list_jobs(self) -> list[Object]:
        """Return the TrainingJobs of the namespace."""
        return list(self.kube.get(_path(self.namespace))["items"])

    def find(self, name: str | None) -> ClusterJob:
        """Return a TrainingJob by name; without one, the only one there is."""
        if name is not None:
            try:
                return ClusterJob(self.kube.get(_path(self.namespace, name)), self)
            except KubeError as error:
                if error.status == 404 and not error.about:
                    raise UsageError(
                        "this cluster knows no TrainingJobs: install Mainstay"
                    ) from error
                raise
        jobs = self.list_jobs()
        if len(jobs) == 1:
            return ClusterJob(jobs[0], self)
        names = ", ".join(job["metadata"]["name"] for job in jobs)
        raise UsageError(
            f"name a job of namespace {self.namespace}: {names}"
            if jobs
            else f"there is no TrainingJob in namespace {self.namespace}"
        )

    def list_pods(self, job: ClusterJob) -> list[Object]:
        """Return the pods of a job."""
        path = f"/api/v1/namespaces/{job.namespace}/pods"
        return list(self.kube.get(path, labelSelector=f"{LABEL_UID}={job.job}")["items"])

    def connect(self, job: ClusterJob) -> ApiClient:
        """Return a client of a job's api."""
        route = self.find_route(job)
        if route.through is None:
            return ApiClient(route.url, self.token)
        return ApiClient(
            route.url,
            self.token,
            verify=route.through.verify,
            # Shown even if empty, so that the api's own token goes by its other name.
            headers={"Authorization": "", **route.through.headers},
            proxy=route.through.proxy,
        )

    def find_route(self, job: ClusterJob) -> Route:
        """Return the way to a job's api: what the user says, what its pods were told, or the usual.

        Raises:
            UsageError: what the user says is no address.
        """
        said = self.options.api or os.environ.get("MAINSTAY_API")
        if said:
            if said.startswith(("http://", "https://")):
                return Route(url=said.rstrip("/"), through=None)
            if not _SERVICE.fullmatch(said):
                raise UsageError(f"--api: {said!r} is neither NAMESPACE/SERVICE:PORT nor a URL")
            return self._through(said)
        for url in _told(self.list_pods(job)):
            inside = _INSIDE.fullmatch(url)
            if inside is None:
                return Route(url=url.rstrip("/"), through=None)
            service, namespace, port = inside.groups()
            return self._through(f"{namespace}/{service}:{port or 80}")
        return self._through(DEFAULT_API)

    def _through(self, service: str) -> Route:
        namespace, name = service.split("/")
        path = f"/api/v1/namespaces/{namespace}/services/http:{name}/proxy"
        return Route(url=self.access.url.rstrip("/") + path, through=self.access)

    @property
    def token(self) -> str:
        """What is shown to the api: the user's own token, or a short-lived one for the api alone.

        Raises:
            UsageError: the user has none, but a client certificate, say.
        """
        if self._token is None:
            self._token = self._make_token()
        return self._token

    def _make_token(self) -> str:
        account = self.options.account
        if account is None:
            if self.access.token:
                return self.access.token
            raise UsageError(
                "the api knows people by a token, and the kubeconfig has none (a client "
                "certificate?): name a ServiceAccount that may get trainingjobs, with "
                "--service-account [NAMESPACE/]NAME"
            )
        namespace, _, name = account.rpartition("/")
        path = f"/api/v1/namespaces/{namespace or self.namespace}/serviceaccounts/{name}/token"
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [API_AUDIENCE], "expirationSeconds": TOKEN_S},
        }
        return str(self.kube.create(path, body)["status"]["token"])


def _path(namespace: str, name: str = "") -> str:
    base = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"
    return f"{base}/{name}" if name else base


def _told(pods: list[Object]) -> list[str]:
    """Return what pods were told of where their api is."""
    found = [
        variable["value"]
        for pod in pods
        for key in ("initContainers", "containers")
        for container in pod["spec"].get(key, ())
        for variable in container.get("env", ())
        if variable["name"] == "MAINSTAY_API_URL" and variable.get("value")
    ]
    return found[:1]
