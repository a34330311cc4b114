"""The objects of a job, as dicts for server-side apply: pure functions of the job and settings.

Names and contents are deterministic, so applying twice changes nothing. A template is kept as it
is: what the operator sets in a pod, a template of today cannot name (``pod_templates``). In one
that a job was begun with before that was checked, what the operator needs wins.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.job.config import SnapshotConfig
from mainstay_core.job.pod_templates import (
    INSTALL,
    PACKAGE_DIR,
    POD_DIR,
    PREFERRED,
    REQUIRED,
    RESTART_POLICY,
    SUPERVISOR,
    TOKEN_DIR,
    trainer_index,
)
from mainstay_core.job.shared_memory import SHM_DIR, SharedMemory, is_at_shm, plan_shared_memory
from mainstay_core.job.spec import JOB_AUDIENCE, LABEL_UID
from mainstay_core.job.types import whole_quantity
from mainstay_core.supervisor.health import probe_command
from mainstay_core.wire.sealed import KEY_FILE_VARIABLE
from mainstay_operator.resources import (
    ANNOTATION_SHM,
    LABEL_INDEX,
    LABEL_JOB,
    JobView,
    ObjectNames,
)

NON_ROOT = 65532
"""User of our images."""
GRACE_BEYOND_HANDOVER_S = 30
"""A pod's grace period beyond the time for its hand-over, for ending by itself."""
TOKEN_LIFE_S = 3600
READY_EVERY_S = 5
LIVE_EVERY_S = 20
PROBE_TIMEOUT_S = 10
_HARDENED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
_HOSTNAME = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Options of pods that come from the operator's settings and from what it has learnt."""

    agent_image: str
    pull_policy: str
    api_url: str
    names: ObjectNames
    """Names of what the job has beside its pods."""
    account: str = ""
    """ServiceAccount of the job's other pods; "" where there are none."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Requests and limits of our containers, unless the job has its own."""
    avoid_nodes: tuple[str, ...] = ()
    """Nodes that new pods must not run on."""
    shun_nodes: tuple[str, ...] = ()
    """Nodes that they had better not run on."""


def build_service(view: JobView, names: ObjectNames) -> dict[str, Any]:
    """Return the headless Service that gives pods their names in DNS, ready or not."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(view, names.shared),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_UID: view.uid},
        },
    }


def build_service_account(view: JobView, names: ObjectNames) -> dict[str, Any]:
    """Return the pods' identity: no token of its own, no rights."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(view, names.shared),
        "automountServiceAccountToken": False,
    }


def build_secret(view: JobView, names: ObjectNames, secret: str) -> dict[str, Any]:
    """Return the Secret that the job's pods present to each other; made once."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(view, names.secret),
        "type": "Opaque",
        "immutable": True,
        "stringData": {"secret": secret},
    }


def build_disruption_budget(
    view: JobView, names: ObjectNames, min_available: int
) -> dict[str, Any]:
    """Return the PodDisruptionBudget: as many pods as serve must stay.

    An integer, as percentages and maxUnavailable need a scale subresource of
    the owner. Pods that are not ready may always be evicted.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(view, names.shared),
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": {LABEL_UID: view.uid}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def build_network_policy(
    view: JobView, names: ObjectNames, api_selector: Mapping[str, str], api_namespace: str = ""
) -> dict[str, Any]:
    """Return the NetworkPolicy: pods of the job among themselves, the api, and DNS.

    Policies add up: what a job needs beyond this (storage, data) another one allows.
    """
    same_job = {"podSelector": {"matchLabels": {LABEL_UID: view.uid}}}
    # Every namespace has this label, and nobody else can give it.
    where = {"matchLabels": {"kubernetes.io/metadata.name": api_namespace}} if api_namespace else {}
    api = {"namespaceSelector": where, "podSelector": {"matchLabels": dict(api_selector)}}
    dns = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(view, names.shared),
        "spec": {
            "podSelector": {"matchLabels": {LABEL_UID: view.uid}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [same_job]}],
            "egress": [{"to": [same_job]}, {"to": [api]}, {"ports": dns}],
        },
    }


def build_pod(view: JobView, index: int, options: PodOptions) -> dict[str, Any]:
    """Return the pod with an index: the supervisor as a sidecar, the trainers in the user's image.

    All pods are alike: ranks are given to slots after scheduling, and a spare is
    a pod without one.
    """
    assert view.job is not None
    template = copy.deepcopy(dict(view.template))
    metadata = template.get("metadata") or {}
    spec: dict[str, Any] = template.get("spec") or {}
    name = view.pod_name(index)
    security = spec.get("securityContext")
    security = spec["securityContext"] = _pod_security() if security is None else security
    # The containers may run as different users: they meet in the group of the shared volumes.
    security.setdefault("fsGroup", NON_ROOT)
    spec.setdefault("terminationGracePeriodSeconds", _grace_s(view))
    priority = view.option("priorityClassName")
    if priority:
        spec["priorityClassName"] = priority
    # An account that the template names has the rights that a cloud gives it (workload identity).
    spec["serviceAccountName"] = options.account or view.account or options.names.shared
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("enableServiceLinks", False)
    spec |= {
        "restartPolicy": RESTART_POLICY,
        "hostname": name,
        "subdomain": options.names.shared,
    }
    containers = [dict(c) for c in spec.get("containers") or ()]
    trainer = containers[trainer_index(containers)]
    shared = next((m for m in trainer.get("volumeMounts") or () if is_at_shm(m)), None)
    memory = None if shared else _shared_memory(view)
    spec["volumes"] = _by_key(spec.get("volumes") or (), _volumes(view, options, memory), "name")
    given = view.job.spec.supervisor.resources
    resources = dict(options.resources)
    if given is not None:
        resources = given.model_dump(exclude_defaults=True)
    kept = view.job.plan_snapshots()
    own = [
        _installer(options, resources),
        _supervisor(view, options, _with_store(resources, kept), shared),
    ]
    names = {c["name"] for c in own}
    spec["initContainers"] = [
        *own,
        *(c for c in spec.get("initContainers") or () if c["name"] not in names),
    ]
    _make_trainer(view, trainer, options, shared)
    spec["containers"] = containers
    _place(view, spec, options)
    labels = {**(metadata.get("labels") or {}), **view.labels(), LABEL_INDEX: str(index)}
    annotations = dict(metadata.get("annotations") or {})
    annotations.setdefault("kubectl.kubernetes.io/default-container", trainer["name"])
    annotations[ANNOTATION_SHM] = memory.reason if memory else "the template's own volume"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_metadata(view, name), "labels": labels, "annotations": annotations},
        "spec": spec,
    }


def _metadata(view: JobView, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": view.namespace,
        "labels": view.labels(),
        "ownerReferences": [view.owner()],
    }


def _grace_s(view: JobView) -> int:
    assert view.job is not None
    return view.job.spec.recovery.handover_seconds + GRACE_BEYOND_HANDOVER_S


def _pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": NON_ROOT,
        "runAsGroup": NON_ROOT,
        "fsGroup": NON_ROOT,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _shared_memory(view: JobView) -> SharedMemory:
    assert view.job is not None
    spec = view.job.spec
    backend, device = spec.runtime.backend, spec.runtime.device
    return plan_shared_memory(
        spec.workload.entrypoint,
        spec.workload.config,
        view.job.shape,
        by_nccl=backend == "NCCL" or (backend == "Auto" and device != "CPU"),
    )


def _volumes(
    view: JobView, options: PodOptions, memory: SharedMemory | None
) -> list[dict[str, Any]]:
    """Return our volumes; one at ``/dev/shm`` unless the template has its own there."""
    token = {
        "serviceAccountToken": {
            "audience": f"{JOB_AUDIENCE}{view.uid}",
            "expirationSeconds": TOKEN_LIFE_S,
            "path": "token",
        }
    }
    secret = {
        "secret": {
            "name": options.names.secret,
            "items": [{"key": "secret", "path": "job/secret"}],
        }
    }
    key_secret = view.job.spec.checkpoint.key_secret if view.job else None
    keys = {
        "secret": {
            "name": key_secret,
            "items": [{"key": "key", "path": "checkpoint/key"}],
        }
    }
    sources = [token, secret, *([keys] if key_secret else ())]
    size = {"sizeLimit": f"{memory.size_mib}Mi"} if memory and memory.size_mib else {}
    shm = {"name": "mainstay-shm", "emptyDir": {"medium": "Memory", **size}}
    return [
        {"name": "mainstay-run", "emptyDir": {}},
        {"name": "mainstay-package", "emptyDir": {}},
        *([shm] if memory else ()),
        {"name": "mainstay-tmp", "emptyDir": {}},
        {"name": "mainstay-token", "projected": {"sources": sources}},
    ]


def _mounts(shared: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return what both containers mount; ``shared``: the template's own mount at ``/dev/shm``."""
    return [
        {"name": "mainstay-run", "mountPath": POD_DIR},
        dict(shared) if shared else {"name": "mainstay-shm", "mountPath": SHM_DIR},
        {"name": "mainstay-token", "mountPath": TOKEN_DIR, "readOnly": True},
    ]


def _environment(view: JobView, options: PodOptions) -> list[dict[str, Any]]:
    assert view.job is not None

    snapshots = view.job.plan_snapshots()

    def of_pod(path: str) -> dict[str, Any]:
        return {"fieldRef": {"fieldPath": path}}

    return [
        {"name": "MAINSTAY_API_URL", "value": options.api_url},
        {"name": "MAINSTAY_JOB", "value": view.uid},
        {"name": "MAINSTAY_POD", "valueFrom": of_pod("metadata.uid")},
        {"name": "MAINSTAY_POD_NAME", "valueFrom": of_pod("metadata.name")},
        {"name": "MAINSTAY_ADDRESS", "valueFrom": of_pod("status.podIP")},
        {"name": "MAINSTAY_POD_DIR", "value": POD_DIR},
        {"name": "MAINSTAY_NUM_SLOTS", "value": str(view.job.spec.parallelism.ranks_per_pod)},
        {"name": "MAINSTAY_DOMAIN", "valueFrom": of_pod("spec.nodeName")},
        {"name": "MAINSTAY_TOKEN_FILE", "value": f"{TOKEN_DIR}/token"},
        {"name": "MAINSTAY_SECRET_FILE", "value": f"{TOKEN_DIR}/job/secret"},
        *(
            [{"name": "MAINSTAY_SNAPSHOT_MEMORY", "value": str(snapshots.memory_bytes)}]
            if snapshots
            else ()
        ),
        *(
            [{"name": KEY_FILE_VARIABLE, "value": f"{TOKEN_DIR}/checkpoint/key"}]
            if view.job.spec.checkpoint.key_secret
            else ()
        ),
    ]


def _installer(options: PodOptions, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Copies our package to a volume: the user's image need not have it, and versions agree."""
    return {
        "name": INSTALL,
        "image": options.agent_image,
        "imagePullPolicy": options.pull_policy,
        "command": ["python", "-m", "mainstay_agent.install", PACKAGE_DIR],
        "volumeMounts": [{"name": "mainstay-package", "mountPath": PACKAGE_DIR}],
        # A pod needs the most that its containers need at one time: this one costs no more.
        "resources": resources,
        "securityContext": {**_HARDENED, "readOnlyRootFilesystem": True},
    }


def _with_store(resources: Mapping[str, Any], kept: SnapshotConfig | None) -> Mapping[str, Any]:
    """Return requests and limits with the memory of the store of segments, which is all taken.

    A memory that is not bounded stays so; a request without a limit stays one.
    """
    if kept is None:
        return resources
    told = {part: dict(resources.get(part) or {}) for part in ("requests", "limits")}
    if not any("memory" in amounts for amounts in told.values()):
        told["requests"]["memory"] = "0"
    for amounts in told.values():
        if "memory" in amounts:
            amounts["memory"] = str(whole_quantity(str(amounts["memory"])) + kept.memory_bytes)
    return {**resources, **{part: amounts for part, amounts in told.items() if amounts}}


def _supervisor(
    view: JobView,
    options: PodOptions,
    resources: Mapping[str, Any],
    shared: Mapping[str, Any] | None,
) -> dict[str, Any]:
    # Of the supervisor alone: never a question to the api or Redis.
    ready = {
        "exec": {"command": probe_command("ready")},
        "periodSeconds": READY_EVERY_S,
        "timeoutSeconds": PROBE_TIMEOUT_S,
        "failureThreshold": 2,
    }
    live = {
        "exec": {"command": probe_command("live")},
        "initialDelaySeconds": LIVE_EVERY_S,
        "periodSeconds": LIVE_EVERY_S,
        "timeoutSeconds": PROBE_TIMEOUT_S,
        "failureThreshold": 6,
    }
    return {
        "name": SUPERVISOR,
        "image": options.agent_image,
        "imagePullPolicy": options.pull_policy,
        "restartPolicy": "Always",
        "command": ["python", "-m", "mainstay_agent"],
        "env": _environment(view, options),
        "readinessProbe": ready,
        "livenessProbe": live,
        "resources": resources,
        "securityContext": {**_HARDENED, "readOnlyRootFilesystem": True},
        "volumeMounts": [*_mounts(shared), {"name": "mainstay-tmp", "mountPath": "/tmp"}],
    }


def _make_trainer(
    view: JobView,
    trainer: dict[str, Any],
    options: PodOptions,
    shared: Mapping[str, Any] | None,
) -> None:
    """Add to one of the user's containers what makes it the trainer."""
    trainer["command"] = trainer.get("command") or ["python", "-m", "mainstay_train.launcher"]
    trainer.setdefault("securityContext", dict(_HARDENED))
    package = {"name": "mainstay-package", "mountPath": PACKAGE_DIR, "readOnly": True}
    mounts = [*_mounts(shared), package]
    trainer["volumeMounts"] = _by_key(trainer.get("volumeMounts") or (), mounts, "mountPath")
    user = [dict(e) for e in trainer.get("env") or ()]
    search = next((e for e in user if e["name"] == "PYTHONPATH"), {"name": "PYTHONPATH"})
    path = search.get("value")
    search |= {"value": f"{PACKAGE_DIR}:{path}" if path else PACKAGE_DIR}
    search.pop("valueFrom", None)
    # In the user's order, as one variable may use those before it: ours come first.
    own = _environment(view, options)
    taken = {e["name"] for e in own}
    rest = [e for e in user if e["name"] not in taken]
    trainer["env"] = [*own, *(() if search in rest else (search,)), *rest]


def _by_key(
    user: Iterable[Mapping[str, Any]], own: Iterable[Mapping[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Return both lists as one; ours wins where both have the key."""
    ours = [dict(item) for item in own]
    taken = {item[key] for item in ours}
    return [*(dict(item) for item in user if item[key] not in taken), *ours]


def _place(view: JobView, spec: dict[str, Any], options: PodOptions) -> None:
    """Add what keeps pods of a replica near, copies of a stage apart, and off avoided nodes."""
    selector = {"matchLabels": {LABEL_JOB: view.name, LABEL_UID: view.uid}}
    near = view.option("scheduling", "replicaTopologyKey")
    apart = view.option("scheduling", "spreadTopologyKey")
    if near:
        term = {"topologyKey": near, "labelSelector": selector}
        wishes = _preferred(spec, "podAffinity")
        wishes.append({"weight": 50, "podAffinityTerm": term})
    if apart:
        constraints = spec["topologySpreadConstraints"] = list(
            spec.get("topologySpreadConstraints") or ()
        )
        constraints.append(
            {
                "maxSkew": 1,
                "topologyKey": apart,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": selector,
            }
        )
    if options.avoid_nodes:
        avoid = {"key": _HOSTNAME, "operator": "NotIn", "values": sorted(options.avoid_nodes)}
        _require_of_nodes(spec, avoid)
    if options.shun_nodes:
        shun = {"key": _HOSTNAME, "operator": "NotIn", "values": sorted(options.shun_nodes)}
        wishes = _preferred(spec, "nodeAffinity")
        wishes.append({"weight": 100, "preference": {"matchExpressions": [shun]}})


def _require_of_nodes(spec: dict[str, Any], expression: Mapping[str, Any]) -> None:
    """Add a requirement to each of the alternatives that the template gives."""
    affinity = _part(_part(spec, "affinity"), "nodeAffinity")
    required = _part(affinity, REQUIRED)
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or ()), dict(expression)]}
        for term in terms
    ]


def _part(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object within another; an empty one is put where there is none."""
    parent[name] = parent.get(name) or {}
    part: dict[str, Any] = parent[name]
    return part


def _preferred(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the list of a kind of affinity's preferences, to add to."""
    affinity = _part(_part(spec, "affinity"), kind)
    wishes: list[dict[str, Any]] = affinity.get(PREFERRED) or []
    affinity[PREFERRED] = wishes
    return wishes
