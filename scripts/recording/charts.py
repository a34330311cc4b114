"""Renders the chart with Helm, object by object."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from manifests import KUBE_VERSION, find_helm

VALUES: dict[str, tuple[str, ...]] = {
    "as it comes": (),
    "all namespaces": ("rbac.cluster=true", "operator.quarantineNodes=true"),
    "named namespaces": ("watchNamespaces={one,two}", "operator.jobNetworkPolicies=true"),
    "external redis": (
        "redis.internal.enabled=false",
        "redis.external.host=redis.example.com",
        "redis.external.existingSecret=login",
        "redis.external.tls.enabled=true",
        "redis.external.tls.caSecret=authority",
    ),
    "network policies": ("networkPolicy.enabled=true",),
    "metrics": (
        "metrics.serviceMonitor.enabled=true",
        "metrics.podMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
        "metrics.dashboards.enabled=true",
    ),
    "images": ("image.registry=images.example.com", "image.tag=1.2.3", "api.replicas=3"),
}
API_VERSIONS = ("monitoring.coreos.com/v1",)
PASSWORD = re.compile(r"(?<=password: ).*|(?<=password\": ).*")


def record(tree: Path) -> dict[str, Any]:
    """Return the objects by values, kind and name."""
    helm = find_helm()
    if helm is None:
        return {"skipped": "there is no helm"}
    return {name: _render(helm, tree, values) for name, values in VALUES.items()}


def _render(helm: str, tree: Path, values: tuple[str, ...]) -> dict[str, Any]:
    command = [helm, "template", "mainstay", str(tree / "charts/mainstay"), "-n", "mainstay-system"]
    command += ["--kube-version", KUBE_VERSION]
    for version in API_VERSIONS:
        command += ["--api-versions", version]
    for value in values:
        command += ["--set", value]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = [o for o in yaml.safe_load_all(PASSWORD.sub("DRAWN", text)) if o]
    return {f"{o['kind']} {o['metadata']['name']}": o for o in objects}
