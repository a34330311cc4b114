"""What the chart's tests share: where it is, rendering it, and the values that they switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.cluster.control_plane import ControlPlane

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mainstay"
MONITORING = "monitoring.coreos.com/v1"
WORKLOADS = ("Deployment", "StatefulSet")

# Every switch is in at least one of these.
MATRIX: dict[str, tuple[str, ...]] = {
    "as it comes": (),
    "all namespaces": ("rbac.cluster=true",),
    "named namespaces": ("watchNamespaces={default,kube-public}",),
    "without rights": (
        "rbac.create=false",
        "rbac.aggregate=false",
        "rbac.reach=null",
        "crds.enabled=false",
    ),
    "own accounts": (
        "operator.serviceAccount.create=false",
        "operator.serviceAccount.name=mine",
        "api.serviceAccount.name=theirs",
        "api.serviceAccount.annotations.a=b",
    ),
    "quarantine": ("operator.quarantineNodes=true", "uninstallWarning=false"),
    "no nodes": ("operator.watchNodes=false", "operator.forceDeleteSeconds=600"),
    "external redis": (
        "redis.internal.enabled=false",
        "redis.external.host=redis.example.com",
        "redis.external.port=6380",
        "redis.external.username=mainstay",
        "redis.external.existingSecret=redis-login",
        "redis.external.passwordKey=pass",
        "redis.external.tls.enabled=true",
        "redis.external.tls.caSecret=redis-ca",
        "redis.external.tls.clientSecret=redis-client",
    ),
    "sentinels": (
        "redis.internal.enabled=false",
        "redis.external.username=mainstay",
        "redis.external.database=3",
        "redis.external.tls.enabled=true",
        "redis.external.sentinel.master=store",
        "redis.external.sentinel.hosts={one.example.com:26379,two.example.com:7}",
        "redis.external.sentinel.existingSecret=sentinel-login",
        "redis.external.sentinel.passwordKey=pass",
    ),
    "redis with tls": (
        "redis.internal.tls.secret=redis-tls",
        "redis.internal.podDisruptionBudget.enabled=true",
        "redis.internal.terminationGracePeriodSeconds=60",
        "redis.internal.livenessProbe.failureThreshold=9",
        "redis.internal.persistence.existingClaim=mine",
    ),
    "external redis, open": ("redis.internal.enabled=false", "redis.external.host=redis"),
    "redis without a volume": ("redis.internal.persistence.enabled=false",),
    "redis with a volume": (
        "redis.internal.persistence.storageClass=fast",
        "redis.internal.persistence.size=1.5Gi",
        "redis.internal.persistence.whenDeleted=Retain",
        "redis.internal.existingSecret=mine",
    ),
    "network policies": (
        "networkPolicy.apiFrom[0].namespaceSelector.matchLabels.name=monitoring",
        "networkPolicy.kubeApi.cidrs={10.0.0.1/32,fd00::1/128}",
        "networkPolicy.kubeApi.ports={6443}",
    ),
    "no network policies": ("networkPolicy.enabled=false", "operator.jobNetworkPolicies=false"),
    "metrics": (
        "metrics.serviceMonitor.enabled=true",
        "metrics.podMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
        "metrics.prometheusRule.labels.release=prometheus",
        "metrics.dashboards.enabled=true",
        "metrics.tokenSecret.name=scraper",
    ),
    "metrics on a port of their own": (
        "metrics.access=port",
        "metrics.port=9900",
        "metrics.serviceMonitor.enabled=true",
        "networkPolicy.enabled=true",
        "networkPolicy.apiFrom[0].namespaceSelector.matchLabels.name=monitoring",
    ),
    "limits": (
        "api.limits.podRequestsPerSecond=3",
        "api.limits.jobRequestsPerSecond=1000000",
        "api.limits.maxEvents=1000000",
        "faultInjection.enabled=true",
    ),
    "images": (
        "image.registry=images.example.com/team",
        "image.tag=1.2.3",
        "image.pullPolicy=Always",
        "image.pullSecrets={one,two}",
        "api.image.digest=sha256:" + "0123456789abcdef" * 4,
        "operator.image.tag=v9",
        "agent.image.registry=other.example.com",
    ),
    "placement": (
        "api.replicas=3",
        "api.nodeSelector.disk=ssd",
        "api.tolerations[0].operator=Exists",
        "api.priorityClassName=system-cluster-critical",
        "api.podAnnotations.a=b",
        "operator.podLabels.c=d",
        "operator.extraEnv[0].name=X",
        "operator.extraEnv[0].value=told",
        "commonLabels.team=t",
        "commonAnnotations.owner=o",
        "api.service.type=NodePort",
        "api.podDisruptionBudget.enabled=false",
    ),
    "pods of one's own kind": tuple(
        f"{component}.{value}"
        for component in ("operator", "api", "redis.internal")
        for value in (
            "podSecurityContext.supplementalGroups={7}",
            "securityContext.seccompProfile.type=RuntimeDefault",
            "livenessProbe.timeoutSeconds=11",
            "terminationGracePeriodSeconds=33",
            "extraEnv[0].name=X",
            "extraEnv[0].value=told",
            "extraVolumes[0].name=more",
            "extraVolumes[0].emptyDir.medium=Memory",
            "extraVolumeMounts[0].name=more",
            "extraVolumeMounts[0].mountPath=/more",
        )
    ),
    "another name": ("fullnameOverride=something-else",),
}


def render(
    plane: ControlPlane, namespace: str, *values: str, options: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The objects that the chart makes of some values."""
    command = ["template", "mainstay", str(CHART), "--namespace", namespace, *options]
    for value in values:
        command += ["--set", value]
    # libyaml reads a chart in a tenth of the time.
    return [o for o in yaml.load_all(plane.helm(*command), yaml.CSafeLoader) if o]


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of a kind and name."""
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, [(o["kind"], o["metadata"]["name"]) for o in objects]
    return found[0]


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    """The one container of a workload."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def environment_of(workload: dict[str, Any]) -> dict[str, Any]:
    """The environment of a workload's container, by name."""
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container_of(workload)["env"]}
