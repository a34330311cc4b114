"""Nodes that kwok plays on a control plane: they are ready at once, and so is every pod on them.

They bear a label, and kwok plays no other nodes; pods that are to run there choose them by it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.client import Object
from tests.cluster.control_plane import ControlPlane
from tests.cluster.toolbox import CannotRunError

PLAYED = {"mainstay.test/played": "true"}
"""The nodes' label, for the nodeSelector of pods."""
SIZE = {"cpu": "1k", "memory": "4Ti", "pods": "1000", "ephemeral-storage": "1Ti"}
LEASE_S = 8
"""Renewed four times in so long: the control plane of tests gives nodes up after seconds."""
NODES = "/api/v1/nodes"


@contextlib.contextmanager
def played_nodes(plane: ControlPlane, num_nodes: int) -> Iterator[None]:
    """Have kwok play so many nodes; at the end they are gone."""
    if not (plane.tools / "kwok").exists():
        raise CannotRunError(f"{plane.tools} holds no kwok")
    stages = plane.dir / "stages.yaml"
    stages.write_text("\n---\n".join(json.dumps(stage) for stage in _stages()))
    selector = ",".join(f"{key}={value}" for key, value in PLAYED.items())
    plane.start(
        "kwok",
        *[f"--config={stages}", f"--kubeconfig={plane.dir / 'inside.kubeconfig'}"],
        f"--manage-nodes-with-label-selector={selector}",
        *[f"--node-lease-duration-seconds={LEASE_S}", "--v=WARN"],
    )
    names = [f"played-{index}" for index in range(num_nodes)]
    try:
        for name in names:
            labels = {"kubernetes.io/hostname": name, **PLAYED}
            status = {"allocatable": SIZE, "capacity": SIZE}
            plane.api.create(
                NODES, {"metadata": {"name": name, "labels": labels}, "status": status}
            )
        for name in names:
            plane.api.wait(f"{NODES}/{name}", _is_ready, "the played node is not ready")
        yield
    finally:
        plane.stop("kwok")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: plane.api.delete(f"{NODES}/{name}"), names))


def _is_ready(node: Object | None) -> bool:
    conditions = ((node or {}).get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _stages() -> Iterator[Object]:
    """What kwok does to its nodes and the pods on them; templates are of Go."""
    ready = '.status.conditions.[] | select( .type == "Ready" ) | .status'
    deleted = ".metadata.deletionTimestamp"
    yield _stage("Node", "node-ready", [(ready, "NotIn", "True")], statusTemplate=_running("Ready"))
    alive = [(deleted, "DoesNotExist"), (".status.phase", "In", "Pending")]
    conditions = ("Initialized", "ContainersReady", "Ready")
    yield _stage("Pod", "pod-ready", alive, statusTemplate=_running(*conditions))
    yield _stage("Pod", "pod-deleted", [(deleted, "Exists")], delete=True)


def _stage(kind: str, name: str, where: list[tuple[str, ...]], **then: object) -> Object:
    expressions = [
        {"key": key, "operator": operator, **({"values": values} if values else {})}
        for key, operator, *values in where
    ]
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "next": then,
        },
    }


def _running(*conditions: str) -> str:
    """A status: running, and these conditions hold since now."""
    now = "{{ Now }}"
    times = {"lastTransitionTime": now, "lastHeartbeatTime": now}
    return json.dumps(
        {
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": "True", "reason": "Played", **times} for kind in conditions
            ],
        }
    )
