"""The operator as a process on a real control plane: what it makes, tells and repairs."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from tests.cluster.client import ApiError
from tests.worlds.served_namespace import Job, ServedNamespace, condition_of, manifest, wait

REQUESTS = "mainstay_operator_kube_requests_total"
OBJECTS = {
    "services": "{}",
    "serviceaccounts": "{}",
    "secrets": "{}-secret",
    "poddisruptionbudgets": "{}",
}


def names(job: str, num: int = 5) -> list[str]:
    return [f"{job}-{i}" for i in range(num)]


def ranked(job: Job, index: int = 0) -> dict[str, Any]:
    """The pod of a member of the plan."""
    uid = job.plan()["members"][index]["slot"]["pod"]
    return next(p for p in job.pods() if p["metadata"]["uid"] == uid)


def test_a_job_gets_its_objects_and_is_submitted_with_its_uid(world: ServedNamespace) -> None:
    job = world.submit(manifest("made"))
    pods = job.wait_pods(*names("made"))
    objects = [(resource, name.format("made")) for resource, name in OBJECTS.items()]

    for resource, name in [*objects, *(("pods", p["metadata"]["name"]) for p in pods)]:
        found = world.kube.wait(world.path(resource, name), lambda found: found is not None)
        assert found is not None
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (job.uid, True)
    assert world.api.get(f"/v1/jobs/{job.uid}")["uid"] == job.uid
    job.wait_condition("Initialized", "True")
    assert job.wait_condition("Ready", "False", "WaitingForPods")["message"]
    assert job.get()["metadata"]["finalizers"] == ["mainstay.dev/finalizer"]
    assert not any("kopf" in key for key in job.get()["metadata"].get("annotations", {}))


def test_a_job_that_trains_says_so_in_one_line(world: ServedNamespace) -> None:
    job = world.submit(manifest("trains"))
    job.run(*names("trains"))
    job.commit(0)

    status = job.wait_status(
        lambda s: (s.get("training") or {}).get("step") and s.get("ready") == "4/4", "the step"
    )

    assert (status["state"], status["spares"]) == ("Running", "1/1")
    assert status["quorum"]["replicas"] == 2
    assert condition_of(status, "SparesAvailable")["status"] == "True"
    budget = world.path("poddisruptionbudgets", "trains")
    world.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 4)
    line = world.plane.kubectl("-n", world.namespace, "get", "mtj", "trains")
    assert "Running" in line
    assert "4/4" in line


def test_a_deleted_pod_is_told_at_once_and_made_anew(world: ServedNamespace) -> None:
    job = world.submit(manifest("deleted"))
    job.run(*names("deleted"))
    job.wait_condition("Ready", "True", "Training")
    lost = ranked(job)
    uid = lost["metadata"]["uid"]

    world.kube.delete(world.path("pods", lost["metadata"]["name"]), gracePeriodSeconds="0")

    wait(lambda: uid not in {p["uid"] for p in job.wanted()["pods"]}, "the fact at the api")
    wait(lambda: len(job.pods()) == 5, "the pool's refill")
    wait(lambda: world.events("PodDeleted"), "the Event")
    status = job.wait_status(lambda s: s.get("recovery", {}).get("total"), "the recovery's count")
    assert status["repair"]["uncounted"] == 1
    wait(
        lambda: [e for e in world.events() if e["reason"].startswith("Recovery")],
        "the recovery's Event",
    )


def test_a_rack_s_pods_are_made_anew_all_at_once(world: ServedNamespace) -> None:
    job = world.submit(manifest("rack"))
    pods = job.run(*names("rack"))
    gone = pods[:3]

    for pod in gone:
        world.kube.delete(world.path("pods", pod["metadata"]["name"]), gracePeriodSeconds="0")

    uids = {p["metadata"]["uid"] for p in gone}
    wait(lambda: not uids & {p["uid"] for p in job.wanted()["pods"]}, "the facts")
    wait(lambda: len(job.pods()) == 5, "the refill")
    assert not uids & {p["metadata"]["uid"] for p in job.pods()}


def test_a_cordoned_node_s_work_is_handed_over_before_its_pod_is_ended(
    world: ServedNamespace,
) -> None:
    job = world.submit(manifest("cordon"))
    pods = job.wait_pods(*names("cordon"))
    world.make_node("cordon-a")
    world.make_node("cordon-b")
    for pod in pods:
        job.bind(pod, "cordon-a" if pod is pods[0] else "cordon-b")
    job.run(*names("cordon"))
    lost = pods[0]["metadata"]["uid"]
    assert lost in {m["slot"]["pod"] for m in job.plan()["members"]}

    world.kube.patch("/api/v1/nodes/cordon-a", {"spec": {"unschedulable": True}})

    wait(lambda: lost in job.wanted()["leaving"], "the fact")
    assert not ranked(job)["metadata"].get("deletionTimestamp")
    wait(lambda: len(job.pods()) == 6, "another pod in its place")

    def handed_over() -> bool:
        job.settle(1)
        return lost not in {m["slot"]["pod"] for m in job.plan()["members"]}

    wait(handed_over, "the hand-over to the spare")
    job.settle(1)
    # There is no kubelet that would end it for good.
    path = world.path("pods", pods[0]["metadata"]["name"])
    ended = world.kube.wait(path, lambda p: p and p["metadata"].get("deletionTimestamp"))
    assert ended is not None
    why = ended["metadata"]["annotations"]["mainstay.dev/ended-for"]
    assert why == "node cordon-a is cordoned"
    world.kube.delete(path, gracePeriodSeconds="0")
    wait(lambda: len(job.pods()) == 5, "the rest")
    status = job.wait_status(lambda s: s.get("repair"), "the record")
    assert (status["repair"]["counted"], status["repair"]["uncounted"]) == (0, 0)


def test_chains_stay_in_a_rack_by_the_labels_of_the_nodes(world: ServedNamespace) -> None:
    key = "example.com/rack"
    job = world.submit(manifest("racks", scheduling={"replicaTopologyKey": key}))
    for rack in "ab":
        world.make_node(f"rack-{rack}", **{key: rack})
    pods = job.wait_pods(*names("racks"))
    racks = {p["metadata"]["uid"]: "ab"[i % 2] for i, p in enumerate(pods)}
    for pod in pods:
        job.bind(pod, f"rack-{racks[pod['metadata']['uid']]}")
    spec = pods[0]["spec"]["affinity"]["podAffinity"]
    assert spec["preferredDuringSchedulingIgnoredDuringExecution"]
    wait(lambda: len(job.topology()) == 2, "the nodes' places at the api")

    job.run(*names("racks"), domains={uid: f"rack-{rack}" for uid, rack in racks.items()})

    plan = job.plan()
    for chain in plan["chains"]:
        assert len({racks[plan["members"][i]["slot"]["pod"]] for i in chain["cells"]}) == 1


def test_fewer_replicas_end_pods_and_more_make_them(world: ServedNamespace) -> None:
    job = world.submit(manifest("scaled"))
    job.wait_pods(*names("scaled"))

    job.patch(parallelism={"replicas": 1})
    wait(lambda: len(job.pods()) == 3, "fewer pods")
    job.patch(parallelism={"replicas": 2}, spares={"replicas": 2})
    wait(lambda: len(job.pods()) == 6, "more pods")

    assert not world.events("PodFailed")


def test_a_suspended_job_has_no_pods_until_it_is_resumed(world: ServedNamespace) -> None:
    job = world.submit(manifest("suspended", suspend=True))
    job.wait_condition("Suspended", "True")
    assert job.pods() == []

    job.patch(suspend=False)
    job.wait_pods(*names("suspended"))
    job.wait_condition("Suspended", "False", "NotAsked")

    job.patch(suspend=True)
    wait(lambda: not job.pods(), "the pods' end")
    status = job.wait_status(lambda s: s.get("state") == "Suspended", "the state")
    assert status["repair"]["counted"] == 0


def test_what_somebody_else_changed_becomes_as_it_should_be(world: ServedNamespace) -> None:
    job = world.submit(manifest("conflict"))
    job.run(*names("conflict"))
    budget = world.path("poddisruptionbudgets", "conflict")
    world.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 4)

    world.kube.patch(budget, {"spec": {"minAvailable": 0}})
    world.kube.delete(world.path("services", "conflict"))

    world.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 4)
    world.kube.wait(world.path("services", "conflict"), lambda found: found is not None)


def test_a_job_of_another_manager_is_left_alone(world: ServedNamespace) -> None:
    job = world.submit(manifest("others", managedBy="kueue.x-k8s.io/multikueue"))
    ours = world.submit(manifest("ours"))

    ours.wait_pods(*names("ours"))

    assert job.pods() == []
    assert "status" not in job.get()
    assert not job.get()["metadata"].get("finalizers")


def test_a_job_that_is_late_fails_and_expires(world: ServedNamespace) -> None:
    job = world.submit(manifest("late", activeDeadlineSeconds=1))
    job.run(*names("late"))

    job.wait_condition("Failed", "True", "DeadlineExceeded")
    job.patch(ttlSecondsAfterFinished=0)

    world.kube.wait(job.path, lambda found: found is None)
    wait(lambda: not job.pods(), "the pods' end")
    assert world.api.client.get(f"/v1/jobs/{job.uid}").status_code == 410


def test_no_request_conflicts_with_what_others_change(world: ServedNamespace) -> None:
    """Status writes and other people's changes give a job a new version all the time."""
    before = world.operator.metric(REQUESTS, code="409") or 0
    body = manifest("busy")
    body["metadata"]["finalizers"] = ["example.com/first"]
    ended = threading.Event()

    def change() -> None:
        kube, count = world.plane.api_as("admin"), 0
        while not ended.is_set():
            with contextlib.suppress(ApiError):
                kube.patch(job.path, {"metadata": {"annotations": {"count": str(count)}}})
            count += 1

    job = world.submit(body)
    busy = threading.Thread(target=change)
    busy.start()
    try:
        job.run(*names("busy"))
        job.wait_condition("Ready", "True")
        finalizers = job.get()["metadata"]["finalizers"]
        assert finalizers == ["example.com/first", "mainstay.dev/finalizer"]
        job.delete()
        left = ["example.com/first"]
        world.kube.wait(job.path, lambda found: found and found["metadata"]["finalizers"] == left)
    finally:
        ended.set()
        busy.join()

    job.world.kube.patch(job.path, {"metadata": {"finalizers": None}})
    world.kube.wait(job.path, lambda found: found is None)
    assert (world.operator.metric(REQUESTS, code="409") or 0) == before
    assert world.operator.metric(REQUESTS, resource="trainingjobs/status", code="200")


def test_nothing_is_left_of_a_deleted_job(world: ServedNamespace) -> None:
    job = world.submit(manifest("gone"))
    job.run(*names("gone"))

    job.delete()

    world.kube.wait(job.path, lambda found: found is None)
    for resource, name in OBJECTS.items():
        path = world.path(resource, name.format("gone"))
        world.kube.wait(path, lambda found: found is None)
    wait(lambda: not job.pods(), "the pods' end")
    assert world.api.client.get(f"/v1/jobs/{job.uid}").status_code == 410


def test_pods_that_are_refused_are_shown_and_tried_again(world: ServedNamespace) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "0"}},
    }
    path = world.path("resourcequotas")
    world.kube.create(path, quota)
    world.kube.wait(f"{path}/few", lambda found: found and "hard" in found.get("status", {}))
    wide = {"training": {"steps": 60, "lanes": 16, "shardsPerLane": 2}}
    job = world.submit(manifest("refused", **wide))
    assert "quota" in job.wait_condition("Degraded", "True", "PodsRefused")["message"]

    # Many at once compete for the quota: several API servers refuse some with 409.
    world.kube.patch(f"{path}/few", {"spec": {"hard": {"pods": "200"}}})

    job.wait_pods(*names("refused", 33))
    job.wait_status(lambda s: condition_of(s, "Degraded").get("reason") != "PodsRefused", "repair")
    assert not world.events("NameTaken")
    world.kube.delete(f"{path}/few")
