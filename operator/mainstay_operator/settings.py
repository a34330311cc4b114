"""Settings of the operator, read from the environment once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mainstay_core.errors import InvalidSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one operator runs. The variable of a field is its upper-case name after MAINSTAY_."""

    api_url: str
    """Base url of the api, e.g. http://mainstay-api:8080."""
    agent_image: str
    """Image of the supervisors: ours."""
    agent_api_url: str = ""
    """Base urls of the api as pods reach it, parted by commas; the same when left out."""
    agent_pull_policy: str = "IfNotPresent"
    """When nodes pull the supervisors' image: Always, IfNotPresent or Never."""
    token: str = ""
    """What the operator presents to the api."""
    token_file: str = ""
    """File with it, read anew at every request: projected tokens rotate."""
    namespaces: str = ""
    """Namespaces to serve, parted by commas; all when left out."""
    watch_nodes: bool = True
    """Whether nodes are watched (list and watch nodes): cordons, taints and lost nodes."""
    ignore_cordon: bool = False
    """Whether a cordoned node keeps its pods until they are evicted."""
    quarantine_nodes: bool = False
    """Whether jobs that ask for it may taint nodes (patch nodes)."""
    network_policy: bool = False
    """Whether each job gets a NetworkPolicy."""
    api_selector: str = "app.kubernetes.io/component=api"
    """Labels of the api's pods, for the NetworkPolicy."""
    poll_s: float = 1.0
    """Between looks at what the api wants, of a job that has not ended."""
    resync_s: float = 60.0
    """Between looks at everything, whatever was or was not watched."""
    status_s: float = 3.0
    """Between two writes of a job's status at least, unless a condition changes."""
    finalizer_s: float = 60.0
    """A deleted job's record is waited for no longer than this."""
    force_delete_s: float = 0.0
    """So long after its deadline a pod that its unreachable node does not end is removed by force,
    if the api takes it for gone; 0: never."""
    image_pull_s: float = 60.0
    """A pod whose node cannot pull its image, where other nodes can, is replaced then."""
    qps: float = 50.0
    """Requests to the Kubernetes API in a second, on average."""
    burst: int = 100
    """Requests at once before that average counts."""
    max_idle_s: float = 300.0
    """Without any event or answer for so long the operator says that it is not alive."""
    liveness_url: str = "http://0.0.0.0:8080/healthz"
    """Where the operator answers probes; off: nowhere."""
    log_level: str = "info"
    """debug, info, warning or error."""

    @property
    def namespace_list(self) -> tuple[str, ...]:
        """Namespaces to serve; empty: all."""
        return tuple(n.strip() for n in self.namespaces.split(",") if n.strip())

    def read_token(self) -> str:
        """Return the token to present to the api.

        Raises:
            OSError: the token file cannot be read.
        """
        return Path(self.token_file).read_text().strip() if self.token_file else self.token


_HELP = {
    name: " ".join(text.split())
    for name, text in {
        "api_url": "Base url of the api.",
        "agent_image": "Image of the supervisors.",
        "agent_api_url": "Base urls of the api as pods reach it, parted by commas.",
        "agent_pull_policy": "When nodes pull that image: Always, IfNotPresent or Never.",
        "token": "Token for the api.",
        "token_file": "File with the token for the api; read anew, projected tokens rotate.",
        "namespaces": "Namespaces to serve, parted by commas; all when left out.",
        "watch_nodes": "Whether nodes are watched: cordons, taints, lost nodes.",
        "ignore_cordon": "Whether a cordoned node keeps its pods until they are evicted.",
        "quarantine_nodes": "Whether jobs that ask for it may taint nodes.",
        "network_policy": "Whether each job gets a NetworkPolicy.",
        "api_selector": "Labels of the api's pods, for the NetworkPolicy.",
        "poll_s": "Seconds between looks at what the api wants.",
        "resync_s": "Seconds between looks at everything.",
        "status_s": "Seconds between two status writes, unless a condition changes.",
        "finalizer_s": "Seconds that a deleted job's record is waited for at most.",
        "force_delete_s": "Seconds after its deadline until a pod on an unreachable node is "
        "removed by force; 0: never.",
        "image_pull_s": "Seconds until a pod whose node alone cannot pull its image is replaced.",
        "qps": "Requests to the Kubernetes API in a second, on average.",
        "burst": "Requests at once before that average counts.",
        "max_idle_s": "Seconds without any event or answer until the liveness probe fails.",
        "liveness_url": "Where the operator answers probes; off: nowhere.",
        "log_level": "debug, info, warning or error.",
    }.items()
}


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Return the settings that the environment describes.

    Raises:
        InvalidSpecError: a variable is missing or cannot be used; it is named.
        SystemExit: ``--help`` was asked for, or there are arguments.
    """
    _parser().parse_args(arguments)
    values: dict[str, object] = {}
    for field in fields(Settings):
        variable = variable_of(field.name)
        text = environ.get(variable)
        if text is not None and text != "":
            values[field.name] = _convert(variable, text, str(field.type))
    for required in ("api_url", "agent_image"):
        if required not in values:
            raise InvalidSpecError(variable_of(required), f"is not set: {_HELP[required]}")
    if "token" not in values and "token_file" not in values:
        raise InvalidSpecError(
            "MAINSTAY_TOKEN_FILE", "is not set; set it, or MAINSTAY_TOKEN: the token for the api"
        )
    return Settings(**values)  # type: ignore[arg-type]


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
    for field in fields(Settings):
        default = "" if field.name in ("api_url", "agent_image") else f" ({field.default})"
        lines.append(f"  {variable_of(field.name)}\n      {_HELP[field.name]}{default}")
    return argparse.ArgumentParser(
        prog="python -m mainstay_operator",
        description="Keeps the objects of TrainingJobs as they should be. Settings come from the "
        "environment; the cluster's address from KUBECONFIG, or the pod's service account.",
        epilog="environment:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
