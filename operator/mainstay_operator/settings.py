"""Settings of the operator, read from the environment once."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import pydantic

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.sections import ContainerResources
from mainstay_operator.leadership import MAX_DURATION_S, LeaseTiming


def _setting(about: str, default: Any = MISSING) -> Any:
    """Return a field whose meaning ``--help`` tells."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one operator. A field's environment variable is MAINSTAY_ and its name."""

    api_url: str = _setting("Base url of the api, e.g. http://mainstay-api:8080.")
    agent_image: str = _setting("Image of the supervisors: ours.")
    agent_api_url: str = _setting(
        "Base urls of the api as pods reach it, parted by commas; the same when left out.",
        "",
    )
    agent_pull_policy: str = _setting(
        "When nodes pull the supervisors' image: Always, IfNotPresent or Never.",
        "IfNotPresent",
    )
    agent_resources: str = _setting(
        "Requests and limits of the supervisors, as JSON, e.g. "
        '{"limits": {"cpu": "1", "memory": "512Mi"}}; a job may have its own.',
        '{"requests": {"cpu": "100m", "memory": "128Mi"}}',
    )
    token: str = _setting("What the operator presents to the api.", "")
    token_file: str = _setting(
        "File with it, read anew at every request: projected tokens rotate.",
        "",
    )
    namespaces: str = _setting("Namespaces to serve, parted by commas; all when left out.", "")
    watch_nodes: bool = _setting(
        "Whether nodes are watched (list and watch nodes): cordons, taints and lost nodes.",
        True,
    )
    ignore_cordon: bool = _setting(
        "Whether a cordoned node keeps its pods until they are evicted.",
        False,
    )
    quarantine_nodes: bool = _setting(
        "Whether jobs that ask for it may taint nodes (patch nodes).",
        False,
    )
    network_policy: bool = _setting("Whether each job gets a NetworkPolicy.", False)
    api_selector: str = _setting(
        "Labels of the api's pods, for the NetworkPolicy.",
        "app.kubernetes.io/component=api",
    )
    api_namespace: str = _setting("Their namespace; any when left out.", "")
    own_accounts: str = _setting(
        "ServiceAccounts of operator and api, NAMESPACE/NAME parted by commas: no job's pods get "
        "one.",
        "",
    )
    poll_s: float = _setting(
        "Between passes over a job that has not ended.",
        1.0,
    )
    resync_s: float = _setting(
        "Between lists of everything, whatever was or was not watched.",
        60.0,
    )
    status_s: float = _setting(
        "Between two writes of a job's status at least, unless a condition changes.",
        3.0,
    )
    force_delete_s: float = _setting(
        "So long after its deadline a pod that its unreachable node does not end is "
        "removed by force, if the api takes it for gone; 0: never.",
        0.0,
    )
    stranded_s: float = _setting(
        "A pod that is silent, on a node that is not ready, is replaced at once; it is ended so "
        "long after its node was ready last, unless it has come back by then.",
        300.0,
    )
    image_pull_s: float = _setting(
        "A pod whose node cannot pull its image, where other nodes can, is replaced then.",
        60.0,
    )
    qps: float = _setting("Requests to the Kubernetes API in a second, on average.", 50.0)
    burst: int = _setting("Requests at once before that average counts.", 100)
    kube_timeout_s: float = _setting("Of one request to the Kubernetes API.", 30.0)
    watch_idle_s: float = _setting(
        "A watch without any event or bookmark for so long is opened anew; the server sends a "
        "bookmark about every minute.",
        70.0,
    )
    max_idle_s: float = _setting(
        "The operator says that it is not alive when for so long a pass over a job does not end, "
        "the Kubernetes API answers no list, or a watch shows nothing of what lists show.",
        300.0,
    )
    lease: str = _setting(
        "Lease by which one of several operators leads, NAMESPACE/NAME; without one this operator "
        "acts from the start, and must be the only one.",
        "",
    )
    lease_duration_s: int = _setting(
        "A Lease that has not changed for so long is taken over; whole seconds, 600 at most.",
        15,
    )
    lease_renew_s: float = _setting(
        "An operator that has not renewed its Lease for so long ends.",
        10.0,
    )
    lease_retry_s: float = _setting("Between two renewals, or two looks at the Lease.", 2.0)
    liveness_url: str = _setting(
        "Where the operator answers probes, and at /metrics Prometheus; off: nowhere.",
        "http://0.0.0.0:8080/healthz",
    )
    log_level: str = _setting("debug, info, warning or error.", "info")

    @property
    def namespace_list(self) -> tuple[str, ...]:
        """Namespaces to serve; empty: all."""
        return tuple(n.strip() for n in self.namespaces.split(",") if n.strip())

    @property
    def own_account_set(self) -> frozenset[str]:
        """ServiceAccounts of Mainstay's own parts, as NAMESPACE/NAME."""
        return frozenset(a.strip() for a in self.own_accounts.split(",") if a.strip())

    @property
    def lease_timing(self) -> LeaseTiming:
        """The timing of the Lease."""
        return LeaseTiming(
            duration_s=float(self.lease_duration_s),
            renew_s=self.lease_renew_s,
            retry_s=self.lease_retry_s,
        )

    def supervisor_resources(self) -> dict[str, Any]:
        """Return requests and limits of the supervisors, as in a container.

        Raises:
            InvalidSpecError: the setting is none.
        """
        try:
            given = ContainerResources.model_validate_json(self.agent_resources)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise InvalidSpecError(
                "MAINSTAY_AGENT_RESOURCES",
                f"{where} {first['msg']}; must be requests and limits as in a container, as JSON",
            ) from None
        return given.model_dump(exclude_defaults=True)

    def read_token(self) -> str:
        """Return the token to present to the api.

        Raises:
            OSError: the token file cannot be read.
        """
        return Path(self.token_file).read_text().strip() if self.token_file else self.token


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings that the environment describes.

    Raises:
        InvalidSpecError: a variable is missing or cannot be used; it is named.
        SystemExit: ``--help`` was asked for, or there are arguments.
    """
    _parser().parse_args(arguments)
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        variable = variable_of(setting.name)
        text = environ.get(variable)
        if text is not None and text != "":
            values[setting.name] = _convert(variable, text, str(setting.type))
        elif setting.default is MISSING:
            raise InvalidSpecError(variable, f"is not set: {setting.metadata['about']}")
    if "token" not in values and "token_file" not in values:
        raise InvalidSpecError(
            "MAINSTAY_TOKEN_FILE", "is not set; set it, or MAINSTAY_TOKEN: the token for the api"
        )
    settings = Settings(**values)
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for name in ("qps", "burst", "resync_s", "kube_timeout_s", "watch_idle_s"):
        if not getattr(settings, name):
            raise InvalidSpecError(variable_of(name), "is 0, must be more")
    settings.supervisor_resources()
    least_s = 2 * settings.resync_s
    if settings.max_idle_s <= least_s:
        raise InvalidSpecError(
            "MAINSTAY_MAX_IDLE_S",
            f"is {settings.max_idle_s:g}, must be more than twice MAINSTAY_RESYNC_S, {least_s:g}: "
            "between two resyncs there is nothing to hear",
        )
    _check_lease(settings)


def _check_lease(settings: Settings) -> None:
    namespace, slash, name = settings.lease.partition("/")
    if settings.lease and not (slash and namespace and name and "/" not in name):
        raise InvalidSpecError("MAINSTAY_LEASE", f"is {settings.lease!r}, must be NAMESPACE/NAME")
    if not 0 < 2 * settings.lease_retry_s <= settings.lease_renew_s:
        raise InvalidSpecError(
            "MAINSTAY_LEASE_RETRY_S",
            f"is {settings.lease_retry_s:g}, must be more than 0 and at most half of "
            f"MAINSTAY_LEASE_RENEW_S, {settings.lease_renew_s:g}: one renewal may fail",
        )
    if not settings.lease_renew_s < settings.lease_duration_s <= MAX_DURATION_S:
        raise InvalidSpecError(
            "MAINSTAY_LEASE_DURATION_S",
            f"is {settings.lease_duration_s:g}, must be more than MAINSTAY_LEASE_RENEW_S, "
            f"{settings.lease_renew_s:g}, and at most {MAX_DURATION_S:g}: the old holder has to "
            "stop before a new one begins",
        )


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"MAINSTAY_{name.upper()}"


def _convert(variable: str, text: str, kind: str) -> object:
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise InvalidSpecError(variable, f"is {text!r}, must be true or false")
        return text.lower() == "true"
    if kind in ("int", "float"):
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf or (kind == "int" and value != int(value)):
            raise InvalidSpecError(variable, f"is {text!r}, must be a number from 0")
        return int(value) if kind == "int" else value
    return text


def _parser() -> argparse.ArgumentParser:
    lines = []
    for setting in fields(Settings):
        default = "" if setting.default in (MISSING, "") else f" ({setting.default})"
        about = textwrap.fill(setting.metadata["about"] + default, 74)
        lines.append(f"  {variable_of(setting.name)}\n{textwrap.indent(about, '      ')}")
    return argparse.ArgumentParser(
        prog="python -m mainstay_operator",
        description="Keeps the objects of TrainingJobs as they should be. Settings come from the "
        "environment; the cluster's address from KUBECONFIG, or the pod's service account.",
        epilog="environment:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
