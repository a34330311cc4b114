"""Pods as Kubernetes shows them, made into values; nodes that could not pull an image."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.losses import Loss, LossCause
from mainstay_core.pool.observed import Disruption, EndCause, Toleration
from mainstay_operator.observed import observe_pod
from mainstay_operator.resources import ENDED_AS, ENDED_FOR
from mainstay_operator.status import PodRecord

OLD_IMAGE_SENTENCE = "its image cannot be pulled on node n1, where others have theirs: no such tag"


def pod(status: dict[str, Any], **spec: Any) -> dict[str, Any]:
    metadata = {"name": "demo-3", "uid": "u3", "labels": {"mainstay.dev/pod-index": "3"}}
    return {"metadata": metadata, "spec": {"nodeName": "n1", **spec}, "status": status}


def test_a_pod_bears_what_its_own_tolerations_say_and_some_only_for_a_while() -> None:
    tolerations = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "slow", "value": "disk", "effect": "NoExecute", "tolerationSeconds": 60},
    ]

    gpu, slow = observe_pod(pod({}, tolerations=tolerations)).tolerations

    assert gpu == Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
    assert slow.for_a_while


def test_since_when_a_pod_is_ready_and_why_it_is_disrupted_are_conditions() -> None:
    conditions = [
        {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:01:40Z"},
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
    ]

    seen = observe_pod(pod({"phase": "Running", "conditions": conditions}))

    assert (seen.ready, seen.ready_since_s) == (True, 100.0)
    assert seen.disruption is Disruption.TAINTED


@pytest.mark.parametrize(
    ("annotations", "cause"),
    [
        ({}, EndCause.OTHER),
        ({ENDED_FOR: "the job does not need it", ENDED_AS: "other"}, EndCause.OTHER),
        ({ENDED_FOR: OLD_IMAGE_SENTENCE, ENDED_AS: "image"}, EndCause.IMAGE),
        ({ENDED_FOR: OLD_IMAGE_SENTENCE, ENDED_AS: "other"}, EndCause.OTHER),
        ({ENDED_FOR: OLD_IMAGE_SENTENCE}, EndCause.IMAGE),
        ({ENDED_FOR: "node n1 is cordoned"}, EndCause.OTHER),
        ({ENDED_FOR: "the job is suspended", ENDED_AS: "suspended"}, EndCause.SUSPENDED),
        ({ENDED_FOR: "of a newer operator", ENDED_AS: "newer"}, EndCause.OTHER),
    ],
)
def test_a_pod_that_the_operator_of_the_version_before_ended_keeps_its_cause(
    annotations: dict[str, str], cause: EndCause
) -> None:
    body = pod({})
    body["metadata"]["annotations"] = annotations

    assert observe_pod(body).ended_as is cause


def test_a_node_without_the_image_is_shunned_now_and_for_a_while() -> None:
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}
    stuck = observe_pod(pod({"containerStatuses": [waiting]}))

    def lost(at_s: float, cause: LossCause) -> Loss:
        uid = PodUid(str(at_s))
        return Loss(uid=uid, name="p", node=f"n{at_s:.0f}", cause=cause, evidence="", at_s=at_s)

    record = PodRecord().with_losses(
        [lost(10, LossCause.IMAGE), lost(20, LossCause.IMAGE), lost(21, LossCause.FAILED)]
    )

    assert record.nodes_without_image([stuck], since_s=15) == {"n1", "n20"}


def test_a_pod_shows_which_version_of_ours_it_runs() -> None:
    containers = [{"name": "install", "image": "ours:1"}, {"name": "supervisor", "image": "ours:1"}]

    assert observe_pod(pod({}, initContainers=containers)).agent_image == "ours:1"
    assert observe_pod(pod({})).agent_image == ""
