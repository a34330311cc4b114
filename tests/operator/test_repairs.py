"""What becomes of pods that the cluster takes: images, nodes, taints, evictions, stuck ones."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.client import ApiError
from tests.worlds import played
from tests.worlds.served_namespace import Job, ServedNamespace, condition_of, manifest, wait

MAINTENANCE = "example.com/maintenance"
FORCED = "mainstay_operator_pods_ended_total"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def names(job: str, num: int = 5) -> list[str]:
    return [f"{job}-{i}" for i in range(num)]


def uid_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])


def spread(served: ServedNamespace, name: str) -> tuple[Job, list[dict[str, Any]]]:
    """A job that trains, its first pod on the node NAME-bad, the others on NAME-good."""
    job = served.submit(manifest(name))
    pods = job.wait_pods(*names(name))
    for node in ("bad", "good"):
        served.make_node(f"{name}-{node}")
    job.bind_all(pods, f"{name}-bad", f"{name}-good")
    return job, job.run(*names(name))


def wait_end(served: ServedNamespace, pod: dict[str, Any]) -> dict[str, Any]:
    path = served.path("pods", pod["metadata"]["name"])
    ended = served.kube.wait(path, lambda p: p and p["metadata"].get("deletionTimestamp"))
    assert ended is not None
    return ended


def wait_record(job: Job, reason: str) -> dict[str, Any]:
    """The loss that the status remembers."""

    def of(status: dict[str, Any]) -> list[dict[str, Any]]:
        recent = (status.get("repair") or {}).get("recent") or ()
        return [item for item in recent if item["reason"] == reason]

    return of(job.wait_status(of, f"the record of a {reason}"))[0]


def test_no_pod_is_ended_for_an_answer_from_before_it_had_a_rank(
    seldom_served: ServedNamespace,
) -> None:
    job, pods = spread(seldom_served, "old")
    lost = uid_of(pods[0])
    assert lost in {m["slot"]["pod"] for m in job.plan()["members"]}

    seldom_served.kube.patch("/api/v1/nodes/old-bad", {"spec": {"unschedulable": True}})

    wait(lambda: lost in job.wanted()["leaving"], "the fact")
    found = seldom_served.kube.get(seldom_served.path("pods", pods[0]["metadata"]["name"]))
    assert not found["metadata"].get("deletionTimestamp")


def test_an_image_is_waited_for_unless_other_nodes_have_it(served: ServedNamespace) -> None:
    job = served.submit(manifest("image"))
    pods = job.wait_pods(*names("image"))
    for node in ("image-bad", "image-good"):
        served.make_node(node)
    job.bind_all(pods, "image-bad", "image-good")
    for pod in pods:
        job.set_waiting(pod, "ErrImagePull")
    job.wait_condition("Degraded", "True", "ImagePullFailed")
    assert {uid_of(p) for p in job.pods()} == {uid_of(p) for p in pods}

    for pod in pods[1:]:
        job.set_waiting(pod, "ContainerCreating")
    job.set_ready(pods[1:])

    why = wait_end(served, pods[0])["metadata"]["annotations"]["mainstay.dev/ended-for"]
    assert why.startswith("its image cannot be pulled on node image-bad")
    wait(lambda: len(job.pods()) == 6, "another pod")
    job.remove(pods[0])
    (new,) = [p for p in job.pods() if uid_of(p) not in {uid_of(p) for p in pods}]
    (wish,) = new["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert wish["preference"]["matchExpressions"][0]["values"] == ["image-bad"]
    assert wait_record(job, "ImagePullFailed")["counts"]
    assert served.events("ImagePullFailed")


def test_a_stuck_pod_is_removed_by_force_only_where_its_node_is_silent(
    served: ServedNamespace,
) -> None:
    job, pods = spread(served, "stuck")
    served.set_node_ready("stuck-bad", ready=False)
    for pod in pods[:2]:
        path = served.path("pods", pod["metadata"]["name"])
        served.kube.delete(path, gracePeriodSeconds="1")
    given_up = [played.fact("pod-gone", uid_of(p), "", evidence="silent") for p in pods[:2]]
    wait(lambda: {uid_of(p) for p in pods[:2]} <= job.leaving(), "that they leave")
    assert served.operator.metric(FORCED, force="true") is None

    served.api.post(f"/v1/jobs/{job.uid}/provider/facts", {"facts": given_up})

    silent = served.path("pods", pods[0]["metadata"]["name"])
    served.kube.wait(silent, lambda p: p is None or uid_of(p) != uid_of(pods[0]))
    wait(lambda: served.events("PodForcedOut"), "the Event")
    assert uid_of(pods[1]) in {uid_of(p) for p in job.pods()}
    assert served.operator.metric(FORCED, force="true") == 1


def test_work_leaves_a_tainted_node_but_not_for_a_taint_that_the_pods_bear(
    served: ServedNamespace,
) -> None:
    job, pods = spread(served, "taint")
    # What admission adds for devices is in no template.
    for pod in pods[1:]:
        path = served.path("pods", pod["metadata"]["name"])
        borne = [*pod["spec"]["tolerations"], {"key": "example.com/gpu", "operator": "Exists"}]
        served.kube.patch(path, {"spec": {"tolerations": borne}})
    served.taint_node("taint-good", "example.com/gpu", "NoSchedule")

    served.taint_node("taint-bad", MAINTENANCE, "NoSchedule")

    wait(lambda: len(job.pods()) == 6, "another pod in its place")
    assert job.leaving() == {uid_of(pods[0])}
    assert not any(p["metadata"].get("deletionTimestamp") for p in job.pods())

    def handed_over() -> bool:
        job.settle(1)
        return uid_of(pods[0]) not in {m["slot"]["pod"] for m in job.plan()["members"]}

    wait(handed_over, "the hand-over to the spare")
    job.settle(1)
    why = wait_end(served, pods[0])["metadata"]["annotations"]["mainstay.dev/ended-for"]
    assert why == f"node taint-bad has taint {MAINTENANCE}:NoSchedule"


def test_what_a_taint_evicts_is_handed_over_and_does_not_count(served: ServedNamespace) -> None:
    job, pods = spread(served, "thrown")

    served.taint_node("thrown-bad", MAINTENANCE, "NoExecute")

    wait(lambda: uid_of(pods[0]) in job.leaving(), "that it leaves")
    wait_end(served, pods[0])
    job.remove(pods[0])
    wait(lambda: uid_of(pods[0]) not in job.living(), "the fact")
    wait(lambda: len(job.pods()) == 5, "the refill")
    # Whether the taint or the operator, which sees it coming, has ended the pod: none counts.
    assert job.wait_status(lambda s: s["pods"]["made"] == 6, "the pod")["repair"]["counted"] == 0


@pytest.mark.parametrize(
    "how", ["deleted", pytest.param("out-of-service", marks=pytest.mark.chaos)]
)
def test_a_lost_node_s_pods_are_gone_at_once(served: ServedNamespace, how: str) -> None:
    name = how.partition("-")[0]
    job, pods = spread(served, f"node-{name}")
    lost = uid_of(pods[0])
    if how == "deleted":
        served.kube.delete(f"/api/v1/nodes/node-{name}-bad")
    else:
        served.set_node_ready(f"node-{name}-bad", ready=False)
        served.taint_node(f"node-{name}-bad", OUT_OF_SERVICE, "NoExecute")

    wait(lambda: lost not in job.living(), "the fact at the api")
    wait(lambda: f"node-{name}-5" in job.names(), "another pod in its place")
    loss = wait_record(job, "NodeLost")
    assert (loss["pod"], loss["node"]) == (f"node-{name}-0", f"node-{name}-bad")
    # The taint evicts the pod as well. If the operator hears of that first the pod is to leave, and
    # who leaves does not count: which watch is faster decides.
    assert loss["counts"] or how == "out-of-service"
    # The cluster itself removes a pod of a lost node without grace: it may be gone already.
    served.kube.wait(
        served.path("pods", pods[0]["metadata"]["name"]),
        lambda p: p is None or p["metadata"].get("deletionTimestamp"),
        "the end of the lost node's pod",
    )


def test_evictions_take_spares_and_nobody_who_computes(served: ServedNamespace) -> None:
    job = served.submit(manifest("evict"))
    pods = job.run(*names("evict"))
    ranked = {m["slot"]["pod"] for m in job.plan()["members"]}
    budget = job.own_path("poddisruptionbudgets")
    served.kube.wait(budget, lambda b: b and b.get("status", {}).get("disruptionsAllowed") == 1)

    def evict(pod: dict[str, Any]) -> None:
        metadata = {"name": pod["metadata"]["name"], "namespace": served.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        served.kube.create(served.path("pods", metadata["name"]) + "/eviction", body)

    (spare,) = [p for p in pods if uid_of(p) not in ranked]
    evict(spare)

    wait(lambda: uid_of(spare) not in job.living(), "the fact")
    with pytest.raises(ApiError, match="disruption budget"):
        evict(next(p for p in pods if uid_of(p) in ranked))
    wait(lambda: len(job.pods()) == 5, "the refill")
    # Whether the taint or the operator, which sees it coming, has ended the pod: none counts.
    assert job.wait_status(lambda s: s["pods"]["made"] == 6, "the pod")["repair"]["counted"] == 0
    status = job.wait_status(lambda s: condition_of(s, "Degraded"), "the conditions")
    assert status["repair"]["counted"] == 0
