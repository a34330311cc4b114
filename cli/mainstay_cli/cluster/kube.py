"""The API server of a cluster, as the user's kubeconfig names it: plain paths and dicts."""

from __future__ import annotations

import importlib
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from mainstay_cli.base.exits import CliError, ExitCode, UsageError

TIMEOUT_S = 30.0
Object = dict[str, Any]


class KubeError(CliError):
    """The API server refused, in its own words.

    Args:
        message: what it said.
        status: the HTTP status, or 0 when it was not reached.
        about: name of the object that it speaks of; empty if of none: then a 404 says that the
            server does not know such objects at all.
    """

    def __init__(self, message: str, status: int, about: str = "") -> None:
        super().__init__(message, ExitCode.FAILED)
        self.status = status
        self.about = about


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A user's access to an API server."""

    url: str
    token: str = ""
    """Empty for those who show a client certificate instead."""
    verify: ssl.SSLContext | bool = True
    """Who signed the server's certificate, and the client's own."""
    proxy: str | None = None
    namespace: str = "default"
    """Where the user works unless told otherwise."""

    @property
    def headers(self) -> dict[str, str]:
        """What is shown to the API server."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


class Kube:
    """Talks to one API server."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._http = httpx.Client(
            base_url=access.url,
            headers=access.headers,
            verify=access.verify,
            proxy=access.proxy,
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        self.now_s = time.time()
        """Wall clock of the API server at its last answer: ages are counted by it alone."""

    def get(self, path: str, **params: str) -> Object:
        """Return the object of a path, or a list of them.

        Raises:
            KubeError: there is none, or the user may not see it.
        """
        return dict(self._request("GET", path, params=params).json())

    def create(self, path: str, body: Object) -> Object:
        """Create an object; return what the API server made of it."""
        return dict(self._request("POST", path, json=body).json())

    def stream_lines(self, path: str, **params: str) -> Iterator[str]:
        """Yield the lines of an endless or a long text."""
        timeout = httpx.Timeout(TIMEOUT_S, read=None)
        with self._told(), self._http.stream("GET", path, params=params, timeout=timeout) as reply:
            if not reply.is_success:
                reply.read()
                raise _refused(reply)
            yield from reply.iter_lines()

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._told():
            reply = self._http.request(method, path, **options)
        if "Date" in reply.headers:
            self.now_s = parsedate_to_datetime(reply.headers["Date"]).timestamp()
        if not reply.is_success:
            raise _refused(reply)
        return reply

    def _told(self) -> _Told:
        return _Told(self.access.url)


class _Told:
    """Turns a connection that fails into one sentence."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.TransportError):
            raise KubeError(f"the API server at {self._url} is not reached: {error}", 0) from error


def _refused(reply: httpx.Response) -> KubeError:
    try:
        status = reply.json()
        message = str(status["message"])
    except (ValueError, KeyError, TypeError):
        return KubeError(reply.text.strip() or f"HTTP {reply.status_code}", reply.status_code)
    details = status.get("details") or {}
    return KubeError(message, reply.status_code, str(details.get("name") or ""))


def load_access(kubeconfig: str | None, context: str | None) -> Access:
    """Return what a kubeconfig says; inside of a pod without one, the pod's own account.

    Args:
        kubeconfig: a file; KUBECONFIG or ~/.kube/config when left out.
        context: one of its contexts; the current one when left out.

    Raises:
        UsageError: it cannot be used.
    """
    try:
        client, config = (importlib.import_module(f"kubernetes.{m}") for m in ("client", "config"))
    except ImportError as error:
        raise UsageError(
            "the Python package kubernetes is missing; install mainstay with its extra kubectl"
        ) from error
    configuration = client.Configuration()
    inside = "KUBERNETES_SERVICE_HOST" in os.environ and not kubeconfig
    try:
        if inside and "KUBECONFIG" not in os.environ and context is None:
            config.load_incluster_config(client_configuration=configuration)
            namespace = _own_namespace()
        else:
            config.load_kube_config(kubeconfig, context, configuration, persist_config=False)
            namespace = _namespace_of(config, kubeconfig, context)
    except (config.ConfigException, OSError, ValueError) as error:
        where = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise UsageError(f"no cluster: {where}: {error}") from error
    shown = configuration.get_api_key_with_prefix("BearerToken", "authorization") or ""
    return Access(
        url=configuration.host,
        token=shown.removeprefix("Bearer ").strip(),
        verify=_verify(configuration),
        proxy=getattr(configuration, "proxy", None) or None,
        namespace=namespace,
    )


def _namespace_of(config: Any, kubeconfig: str | None, context: str | None) -> str:
    contexts, active = config.list_kube_config_contexts(kubeconfig)
    chosen = next((c for c in contexts if c["name"] == context), active)
    return str((chosen.get("context") or {}).get("namespace") or "default")


def _own_namespace() -> str:
    with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
        return file.read().strip()


def _verify(configuration: Any) -> ssl.SSLContext | bool:
    if not configuration.host.startswith("https:"):
        return True
    if not configuration.verify_ssl:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
