"""The few questions that the api has for a Kubernetes API server, over HTTP.

Who a token belongs to, what somebody may do, and which uid a TrainingJob has. A
question takes a bounded time; an API server that does not answer is one error.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.job.spec import API_VERSION, GROUP, PLURAL

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet mounts a pod's own token and the cluster's certificate."""
POD_UID = "authentication.kubernetes.io/pod-uid"
"""Key in a review's ``extra`` under which a token that is bound to a pod names it."""
POD_NAME = "authentication.kubernetes.io/pod-name"
MAX_CONNECTIONS = 32


class KubeUnavailableError(MainstayError):
    """The API server gave no answer that counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeSettings:
    """The address of the API server, and the credentials to ask it with."""

    url: str
    token_file: Path
    ca_file: Path
    timeout_s: float = 3.0
    """Of one question, all of its parts included."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> KubeSettings:
        """Return the settings of a pod, unless ``MAINSTAY_KUBE_*`` say otherwise.

        Raises:
            InvalidSpecError: this is no pod, and no API server is named.
        """
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        host = f"[{host}]" if ":" in host else host
        url = environment.get("MAINSTAY_KUBE_URL") or (f"https://{host}:{port}" if host else "")
        if not url.startswith("https://"):
            raise InvalidSpecError(
                "MAINSTAY_KUBE_URL",
                f"is {url!r}, must begin with https:// (it is left out inside a pod)",
            )
        return cls(
            url=url,
            token_file=Path(
                environment.get("MAINSTAY_KUBE_TOKEN_FILE") or SERVICE_ACCOUNT / "token"
            ),
            ca_file=Path(environment.get("MAINSTAY_KUBE_CA_FILE") or SERVICE_ACCOUNT / "ca.crt"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """The API server's verdict on a token."""

    authenticated: bool
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    error: str = ""
    """Why not; for the log of the api, not for the caller."""

    @property
    def pod(self) -> str:
        """The pod to which the token is bound, or nothing."""
        return self._of_pod(POD_UID)

    @property
    def pod_name(self) -> str:
        """That pod's name, or nothing."""
        return self._of_pod(POD_NAME)

    def _of_pod(self, key: str) -> str:
        values = dict(self.extra).get(key, ())
        return values[0] if len(values) == 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    """A TrainingJob as the cluster has it."""

    uid: str
    account: str
    """ServiceAccount that its template names for its pods; "" for the job's own."""


class KubeClient:
    """A client of the API server. Close it after use.

    Raises:
        InvalidSpecError: the cluster's certificate cannot be read.
    """

    def __init__(self, settings: KubeSettings) -> None:
        self._settings = settings
        try:
            context = ssl.create_default_context(cafile=str(settings.ca_file))
        except OSError as error:
            raise InvalidSpecError(
                "MAINSTAY_KUBE_CA_FILE", f"{settings.ca_file} cannot be read: {error}"
            ) from error
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            verify=context,
            trust_env=False,
            timeout=settings.timeout_s,
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def review_token(self, token: str, audiences: Sequence[str]) -> Review:
        """Return whose token it is, if it is meant for one of ``audiences``.

        Args:
            token: what a caller presented.
            audiences: whom it must be meant for; none: the API server itself.

        Raises:
            KubeUnavailableError: the API server did not answer.
        """
        spec: dict[str, Any] = {"token": token}
        if audiences:
            spec["audiences"] = list(audiences)
        status = await self._create("authentication.k8s.io/v1", "TokenReview", spec)
        error = str(status.get("error", ""))
        if not status.get("authenticated"):
            return Review(authenticated=False, error=error or "not authenticated")
        # An authenticator that knows nothing of audiences names none: not good enough.
        if audiences and not set(audiences) & set(status.get("audiences") or ()):
            return Review(authenticated=False, error=f"not meant for {', '.join(audiences)}")
        user = status.get("user") or {}
        return Review(
            authenticated=True,
            username=str(user.get("username", "")),
            uid=str(user.get("uid", "")),
            groups=tuple(user.get("groups") or ()),
            extra=tuple(sorted((k, tuple(v)) for k, v in (user.get("extra") or {}).items())),
        )

    async def may(self, user: Review, verb: str, namespace: str, name: str) -> bool:
        """Return whether ``user`` may do ``verb`` to a TrainingJob (``name`` empty: to all).

        Raises:
            KubeUnavailableError: the API server did not answer.
        """
        attributes = {"group": GROUP, "resource": PLURAL, "verb": verb}
        attributes |= {"namespace": namespace} if namespace else {}
        attributes |= {"name": name} if name else {}
        return await self._allows(user, {"resourceAttributes": attributes})

    async def may_get_path(self, user: Review, path: str) -> bool:
        """Return whether ``user`` may get a path that is no resource's, in the whole cluster.

        Raises:
            KubeUnavailableError: the API server did not answer.
        """
        attributes = {"path": path, "verb": "get"}
        return await self._allows(user, {"nonResourceAttributes": attributes})

    async def _allows(self, user: Review, attributes: Mapping[str, Any]) -> bool:
        spec = {
            "user": user.username,
            "uid": user.uid,
            "groups": list(user.groups),
            "extra": {key: list(values) for key, values in user.extra},
            **attributes,
        }
        status = await self._create("authorization.k8s.io/v1", "SubjectAccessReview", spec)
        return bool(status.get("allowed")) and not status.get("denied")

    async def fetch_job(self, namespace: str, name: str) -> FoundJob | None:
        """Return a TrainingJob, None when there is none.

        Raises:
            KubeUnavailableError: the API server did not answer.
        """
        response = await self._send("GET", _path_of_job(namespace, name), None)
        if response.status_code == 404:
            return None
        body = self._object(response)
        pod = body.get("spec", {}).get("template", {}).get("spec", {})
        return FoundJob(
            uid=str(body.get("metadata", {}).get("uid", "")),
            account=str(pod.get("serviceAccountName") or ""),
        )

    async def _create(self, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        path = f"/apis/{version}/{kind.lower()}s"
        response = await self._send("POST", path, body)
        status = self._object(response).get("status")
        return status if isinstance(status, dict) else {}

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            token = self._settings.token_file.read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._http.request(method, path, json=body, headers=headers)
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            raise KubeUnavailableError(f"{method} {path}: {error!r}") from error

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code >= 300:
            raise KubeUnavailableError(
                f"{response.request.url.path}: {response.status_code}: {response.text[:200]}"
            )
        try:
            body = response.json()
        except ValueError as error:
            raise KubeUnavailableError(f"{response.request.url.path}: no JSON") from error
        return body if isinstance(body, dict) else {}


def _path_of_job(namespace: str, name: str) -> str:
    return f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}/{name}"
