"""Pods and nodes as Kubernetes shows them, made into what decisions take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mainstay_core.base.ids import PodUid
from mainstay_core.job.pod_templates import SUPERVISOR
from mainstay_core.job.spec import KIND
from mainstay_core.pool.conditions import code_of
from mainstay_core.pool.observed import (
    ContainerEnd,
    Disruption,
    EndCause,
    ObservedNode,
    ObservedPod,
    PodPhase,
    Taint,
    Toleration,
)
from mainstay_operator.resources import ENDED_AS, ENDED_FOR, LABEL_INDEX, parse_time

_DISRUPTIONS = {
    "PreemptionByScheduler": Disruption.PREEMPTED,
    "EvictionByEvictionAPI": Disruption.EVICTED,
    "DeletionByTaintManager": Disruption.TAINTED,
    "TerminationByKubelet": Disruption.NODE_SHUTDOWN,
    "DeletionByPodGC": Disruption.TAINTED,
}
"""Reasons of the condition DisruptionTarget (KEP-3329)."""
_IMAGE = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})
_STUCK = _IMAGE | {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
}


def observe_pod(body: Mapping[str, Any]) -> ObservedPod:
    """Return what decisions need of a pod object."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    target = conditions.get("DisruptionTarget", {})
    disrupted = target.get("status") == "True"
    containers = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    stuck_as, stuck = _stuck(containers)
    failure, out_of_memory = _failure(status, containers)
    terminating = bool(metadata.get("deletionTimestamp"))
    said = metadata.get("annotations") or {}
    ready = conditions.get("Ready", {})
    scheduled = conditions.get("PodScheduled", {})
    unscheduled = scheduled.get("status") == "False" and code_of(scheduled) == "Unschedulable"
    return ObservedPod(
        uid=PodUid(metadata["uid"]),
        name=metadata["name"],
        index=_index(metadata),
        node=spec.get("nodeName") or "",
        phase=PodPhase(status.get("phase") or "Pending"),
        ready=ready.get("status") == "True",
        ready_since_s=parse_time(ready.get("lastTransitionTime")),
        terminating=terminating,
        ends_by_s=parse_time(metadata.get("deletionTimestamp")),
        ended_for=said.get(ENDED_FOR, ""),
        ended_as=_ended_as(said),
        disruption=_DISRUPTIONS.get(code_of(target), Disruption.OTHER) if disrupted else None,
        disruption_why=str(target.get("message", "")) if disrupted else "",
        failure=failure,
        out_of_memory=out_of_memory,
        stuck=stuck,
        stuck_on_image=stuck_as in _IMAGE,
        unscheduled=str(scheduled.get("message", "")) if unscheduled else "",
        created_at_s=parse_time(metadata.get("creationTimestamp")),
        container_ends=_ends(containers),
        tolerations=tuple(_see_toleration(t) for t in spec.get("tolerations") or ()),
        agent_image=_agent_image(spec),
    )


def _ended_as(annotations: Mapping[str, str]) -> EndCause:
    """Return the cause for which the operator ended a pod.

    The operator of the version before wrote the sentence alone, so its beginning is the cause.
    """
    told = annotations.get(ENDED_AS)
    if told is None:
        is_image = annotations.get(ENDED_FOR, "").startswith("its image cannot be pulled")
        return EndCause.IMAGE if is_image else EndCause.OTHER
    return EndCause(told) if told in set(EndCause) else EndCause.OTHER


def _agent_image(spec: Mapping[str, Any]) -> str:
    containers = spec.get("initContainers") or ()
    return next((c.get("image") or "" for c in containers if c["name"] == SUPERVISOR), "")


def _see_toleration(body: Mapping[str, Any]) -> Toleration:
    return Toleration(
        key=body.get("key") or "",
        operator=body.get("operator") or "Equal",
        value=body.get("value") or "",
        effect=body.get("effect") or "",
        for_a_while=body.get("tolerationSeconds") is not None,
    )


def job_of(body: Mapping[str, Any]) -> str | None:
    """Return the uid of the job whose pod this is; None of a copy that only has its labels."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == KIND:
            return str(owner["uid"])
    return None


def observe_node(body: Mapping[str, Any]) -> ObservedNode:
    """Return what decisions need of a node object."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or ()}
    ready = conditions.get("Ready") or {}
    return ObservedNode(
        name=body["metadata"]["name"],
        ready=ready.get("status") == "True",
        not_ready_since_s=parse_time(ready.get("lastTransitionTime")),
        cordoned=bool(spec.get("unschedulable")),
        taints=tuple(
            sorted(
                Taint(key=t["key"], effect=t["effect"], value=t.get("value") or "")
                for t in spec.get("taints") or ()
            )
        ),
        labels=dict(body["metadata"].get("labels") or {}),
    )


def _index(metadata: Mapping[str, Any]) -> int:
    text = (metadata.get("labels") or {}).get(LABEL_INDEX, "")
    return int(text) if text.isdigit() else int(metadata["name"].rpartition("-")[2])


def _stuck(containers: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the code and the sentence of the first container that cannot start."""
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        code = code_of(waiting)
        if code in _STUCK:
            message = waiting.get("message") or code
            return code, f"container {container['name']}: {code}: {message}"
    return "", ""


def _failure(
    status: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]
) -> tuple[str, bool]:
    if status.get("phase") != "Failed":
        return "", False
    for container in containers:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            code = code_of(ended) or "Error"
            text = f"container {container['name']} ended with code {ended['exitCode']} ({code})"
            return text, code == "OOMKilled"
    parts = [status.get("reason") or "Failed", status.get("message") or ""]
    return ": ".join(p for p in parts if p), False


def _ends(containers: Sequence[Mapping[str, Any]]) -> tuple[ContainerEnd, ...]:
    ends = []
    for container in containers:
        last = (container.get("lastState") or {}).get("terminated")
        if last and container.get("restartCount"):
            ends.append(
                ContainerEnd(
                    container=container["name"],
                    restarts=int(container["restartCount"]),
                    code=code_of(last) or "Error",
                    exit_code=int(last.get("exitCode") or 0),
                )
            )
    return tuple(ends)
