"""Templates of pods that a cluster refuses before any pod is made."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.pod_templates import check_template
from mainstay_core.job.spec import parse_training_job

MOUNT = {"name": "data", "mountPath": "/data"}
SHARED = {"name": "data", "persistentVolumeClaim": {"claimName": "c"}}
POD: dict[str, Any] = {
    "containers": [{"name": "a", "image": "log"}, {"name": "trainer", "image": "torch"}]
}


def check(pod: dict[str, Any], metadata: dict[str, Any] | None = None, **spec: Any) -> None:
    job = parse_training_job(
        {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "demo"},
            "spec": {
                "training": {"steps": 9, "lanes": 2},
                "workload": {"entrypoint": "a:b"},
                "template": {"spec": pod, **({"metadata": metadata} if metadata else {})},
                **spec,
            },
        }
    )
    check_template(job.spec)


def with_trainer(**fields: Any) -> dict[str, Any]:
    pod = copy.deepcopy(POD)
    pod["containers"][1] |= fields
    return pod


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no container": ({}, "spec.template.spec.containers", "whose image has torch"),
    "containers that are none": ({"containers": "a"}, "spec.template.spec.containers", "no list"),
    "a container without a name": (
        {"containers": [{"image": "a"}]},
        "spec.template.spec.containers[0].name",
        "is missing",
    ),
    "a volume without a name": (
        {**POD, "volumes": [{"emptyDir": {}}]},
        "spec.template.spec.volumes[0].name",
        "is missing",
    ),
    "a trainer without an image": (
        with_trainer(image=""),
        "spec.template.spec.containers[1].image",
        "any image with torch",
    ),
    "a variable without a name": (
        with_trainer(env=[{"value": "1"}]),
        "spec.template.spec.containers[1].env[0].name",
        "is missing",
    ),
    "a mount without a path": (
        with_trainer(volumeMounts=[{"name": "a"}]),
        "spec.template.spec.containers[1].volumeMounts[0].mountPath",
        "is missing",
    ),
    "too little time for a hand-over": (
        {**POD, "terminationGracePeriodSeconds": 30},
        "spec.template.spec.terminationGracePeriodSeconds",
        "must be larger than spec.recovery.handoverSeconds, 30",
    ),
    "a restart policy of its own": (
        {**POD, "restartPolicy": "Never"},
        "spec.template.spec.restartPolicy",
        "is 'Never', must be OnFailure or left out",
    ),
    "a host name": ({**POD, "hostname": "me"}, "spec.template.spec.hostname", "left out"),
    "a subdomain": ({**POD, "subdomain": "me"}, "spec.template.spec.subdomain", "left out"),
    "the account by its old name": (
        {**POD, "serviceAccount": "me"},
        "spec.template.spec.serviceAccount",
        "use serviceAccountName",
    ),
    "the account of a job's pods": (
        {**POD, "serviceAccountName": "mtj-demo-1234"},
        "spec.template.spec.serviceAccountName",
        "must not begin with mtj-",
    ),
    "a node": ({**POD, "nodeName": "n1"}, "spec.template.spec.nodeName", "use nodeSelector"),
    "a container of the supervisor's name": (
        {"containers": [*POD["containers"], {"name": "supervisor", "image": "a"}]},
        "spec.template.spec.containers[2].name",
        "must be another",
    ),
    "an init container of the installer's name": (
        {**POD, "initContainers": [{"name": "install", "image": "a"}]},
        "spec.template.spec.initContainers[0].name",
        "must be another",
    ),
    "a volume of ours": (
        {**POD, "volumes": [{"name": "mainstay-shm", "emptyDir": {}}]},
        "spec.template.spec.volumes[0].name",
        "must not begin with mainstay-",
    ),
    "a variable of ours": (
        with_trainer(env=[{"name": "MAINSTAY_JOB", "value": "another"}]),
        "spec.template.spec.containers[1].env[0].name",
        "left out; it is set in every trainer",
    ),
    "a mount where ours is": (
        with_trainer(volumeMounts=[{"name": "a", "mountPath": "/opt/mainstay/"}]),
        "spec.template.spec.containers[1].volumeMounts[0].mountPath",
        "a volume of ours",
    ),
}


@pytest.mark.parametrize(("pod", "field", "words"), REFUSED.values(), ids=REFUSED)
def test_a_template_that_no_pod_can_be_made_of_is_refused_by_the_field(
    pod: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidSpecError, match=words) as refused:
        check(pod)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"name": "me"}, "spec.template.metadata.name"),
        ({"finalizers": ["a/b"]}, "spec.template.metadata.finalizers"),
        ({"labels": {"mainstay.dev/job-uid": "u"}}, "metadata.labels[mainstay.dev/job-uid]"),
        ({"labels": {"app.kubernetes.io/name": "me"}}, "metadata.labels[app.kubernetes.io/name]"),
        ({"annotations": {"mainstay.dev/ended-as": "x"}}, "annotations[mainstay.dev/ended-as]"),
    ],
)
def test_metadata_that_a_pod_would_not_have_is_refused_by_the_field(
    metadata: dict[str, Any], field: str
) -> None:
    check(POD, metadata={"labels": {"team": "a"}, "annotations": {"a/b": "c"}})
    with pytest.raises(InvalidSpecError, match="must be left out") as refused:
        check(POD, metadata=metadata)
    assert refused.value.field.endswith(field)


def test_two_priority_classes_are_refused_and_one_is_not() -> None:
    named = {**POD, "priorityClassName": "high"}
    check(named)
    check(named, priorityClassName="high")
    with pytest.raises(InvalidSpecError, match=r"as spec\.priorityClassName: low"):
        check(named, priorityClassName="low")


def test_what_a_pod_can_be_made_of_is_accepted() -> None:
    check(POD)
    check({**POD, "restartPolicy": "OnFailure", "serviceAccountName": "mine"})
    check({**POD, "terminationGracePeriodSeconds": 31})
    check({**POD, "terminationGracePeriodSeconds": 1}, recovery={"handoverSeconds": 0})


@pytest.mark.parametrize("field", ["storage", "resumeFrom"])
def test_checkpoints_are_kept_where_pods_share_a_volume(field: str) -> None:
    checkpoint = {"everySteps": 5, "storage": "/data/a", field: "/data/a"}
    mounted = with_trainer(volumeMounts=[MOUNT])
    check({**mounted, "volumes": [SHARED]}, checkpoint=checkpoint)
    with pytest.raises(InvalidSpecError, match="an emptyDir: each pod has its own"):
        check({**mounted, "volumes": [{"name": "data", "emptyDir": {}}]}, checkpoint=checkpoint)
    checkpoint[field] = "/database"
    with pytest.raises(InvalidSpecError, match=r"mounts no volume \(it mounts /data\)") as refused:
        check({**mounted, "volumes": [SHARED]}, checkpoint=checkpoint)
    assert refused.value.field == f"spec.checkpoint.{field}"
