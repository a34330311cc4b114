"""The operator as a process on a real control plane: what it makes, tells and repairs."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from tests.cluster.client import ApiError
from tests.core.base.test_logs import read
from tests.worlds.served_namespace import Job, ServedNamespace, condition_of, manifest, wait

REQUESTS = "mainstay_operator_kube_requests_total"
OBJECTS = ("services", "serviceaccounts", "secrets", "poddisruptionbudgets")


def names(job: str, num: int = 5) -> list[str]:
    return [f"{job}-{i}" for i in range(num)]


def ranked(job: Job, index: int = 0) -> dict[str, Any]:
    """The pod of a member of the plan."""
    uid = job.plan()["members"][index]["slot"]["pod"]
    return next(p for p in job.pods() if p["metadata"]["uid"] == uid)


def test_a_job_gets_its_objects_and_is_submitted_with_its_uid(served: ServedNamespace) -> None:
    job = served.submit(manifest("made"))
    pods = job.wait_pods(*names("made"))
    own = [job.own_path(resource) for resource in OBJECTS]

    for path in [*own, *(served.path("pods", p["metadata"]["name"]) for p in pods)]:
        found = served.kube.wait(path, lambda found: found is not None)
        assert found is not None
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (job.uid, True)
    assert served.api.get(f"/v1/jobs/{job.uid}")["uid"] == job.uid
    job.wait_condition("Initialized", "True")
    assert job.wait_condition("Ready", "False", "WaitingForPods")["message"]
    assert "finalizers" not in job.get()["metadata"]
    assert not any("kopf" in key for key in job.get()["metadata"].get("annotations", {}))


def test_a_job_that_trains_says_so_in_one_line(served: ServedNamespace) -> None:
    job = served.submit(manifest("trains"))
    job.run(*names("trains"))
    job.commit(0)

    status = job.wait_status(
        lambda s: (s.get("training") or {}).get("step") and s.get("ready") == "4/4", "the step"
    )

    assert (status["state"], status["spares"]) == ("Running", "1/1")
    assert status["quorum"]["replicas"] == 2
    assert condition_of(status, "SparesAvailable")["status"] == "True"
    budget = job.own_path("poddisruptionbudgets")
    served.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 4)
    started = [e for e in served.events("Started") if e["involvedObject"]["name"] == "trains"]
    assert len(started) == 1
    logged = [read(line) for line in served.operator.log().splitlines()]
    own = [pairs for pairs in logged if pairs.get("job") == f"{served.namespace}/trains"]
    decisions = [pairs["decision"] for pairs in own if "decision" in pairs]
    assert decisions[:3] == ["Keep", "Sizes", "Submit"]
    (sizes,) = (e for e in served.events("Sizes") if e["involvedObject"]["name"] == "trains")
    assert "is not known here, as the model is that of package.module:workload" in sizes["message"]
    assert decisions.count("Started") == 1
    assert {pairs["uid"] for pairs in own} == {job.uid}
    line = served.plane.kubectl("-n", served.namespace, "get", "mtj", "trains")
    assert "Running" in line
    assert "4/4" in line


def test_a_deleted_pod_is_told_at_once_and_made_anew(served: ServedNamespace) -> None:
    job = served.submit(manifest("deleted"))
    job.run(*names("deleted"))
    job.wait_condition("Ready", "True", "Training")
    lost = ranked(job)
    uid = lost["metadata"]["uid"]

    served.kube.delete(served.path("pods", lost["metadata"]["name"]), gracePeriodSeconds="0")

    wait(lambda: uid not in {p["uid"] for p in job.wanted()["pods"]}, "the fact at the api")
    wait(lambda: len(job.pods()) == 5, "the pool's refill")
    wait(lambda: served.events("PodDeleted"), "the Event")
    status = job.wait_status(lambda s: s.get("recovery", {}).get("total"), "the recovery's count")
    assert status["repair"]["uncounted"] == 1
    wait(
        lambda: [e for e in served.events() if e["reason"].startswith("Recovery")],
        "the recovery's Event",
    )


def test_a_rack_s_pods_are_made_anew_all_at_once(served: ServedNamespace) -> None:
    job = served.submit(manifest("rack"))
    pods = job.run(*names("rack"))
    gone = pods[:3]

    for pod in gone:
        served.kube.delete(served.path("pods", pod["metadata"]["name"]), gracePeriodSeconds="0")

    uids = {p["metadata"]["uid"] for p in gone}
    wait(lambda: not uids & {p["uid"] for p in job.wanted()["pods"]}, "the facts")
    wait(lambda: len(job.pods()) == 5, "the refill")
    assert not uids & {p["metadata"]["uid"] for p in job.pods()}


def test_a_cordoned_node_s_work_is_handed_over_before_its_pod_is_ended(
    served: ServedNamespace,
) -> None:
    job = served.submit(manifest("cordon"))
    pods = job.wait_pods(*names("cordon"))
    served.make_node("cordon-a")
    served.make_node("cordon-b")
    for pod in pods:
        job.bind(pod, "cordon-a" if pod is pods[0] else "cordon-b")
    job.run(*names("cordon"))
    lost = pods[0]["metadata"]["uid"]
    assert lost in {m["slot"]["pod"] for m in job.plan()["members"]}

    served.kube.patch("/api/v1/nodes/cordon-a", {"spec": {"unschedulable": True}})

    wait(lambda: lost in job.wanted()["leaving"], "the fact")
    assert not ranked(job)["metadata"].get("deletionTimestamp")
    wait(lambda: len(job.pods()) == 6, "another pod in its place")

    def handed_over() -> bool:
        job.settle(1)
        return lost not in {m["slot"]["pod"] for m in job.plan()["members"]}

    wait(handed_over, "the hand-over to the spare")
    job.settle(1)
    # There is no kubelet that would end it for good.
    path = served.path("pods", pods[0]["metadata"]["name"])
    ended = served.kube.wait(path, lambda p: p and p["metadata"].get("deletionTimestamp"))
    assert ended is not None
    why = ended["metadata"]["annotations"]["mainstay.dev/ended-for"]
    assert why == "node cordon-a is cordoned"
    served.kube.delete(path, gracePeriodSeconds="0")
    wait(lambda: len(job.pods()) == 5, "the rest")
    status = job.wait_status(lambda s: s.get("repair"), "the record")
    assert (status["repair"]["counted"], status["repair"]["uncounted"]) == (0, 0)


def test_chains_stay_in_a_rack_by_the_labels_of_the_nodes(served: ServedNamespace) -> None:
    key = "example.com/rack"
    job = served.submit(manifest("racks", scheduling={"replicaTopologyKey": key}))
    for rack in "ab":
        served.make_node(f"rack-{rack}", **{key: rack})
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


def test_fewer_replicas_end_pods_and_more_make_them(served: ServedNamespace) -> None:
    job = served.submit(manifest("scaled"))
    job.wait_pods(*names("scaled"))

    job.patch(parallelism={"replicas": 1})
    wait(lambda: len(job.pods()) == 3, "fewer pods")
    job.patch(parallelism={"replicas": 2}, spares={"replicas": 2})
    wait(lambda: len(job.pods()) == 6, "more pods")

    assert not served.events("PodFailed")


def test_a_suspended_job_has_no_pods_until_it_is_resumed(served: ServedNamespace) -> None:
    job = served.submit(manifest("suspended", suspend=True))
    job.wait_condition("Suspended", "True")
    assert job.pods() == []

    job.patch(suspend=False)
    job.wait_pods(*names("suspended"))
    job.wait_condition("Suspended", "False", "NotAsked")

    job.patch(suspend=True)
    wait(lambda: not job.pods(), "the pods' end")
    status = job.wait_status(lambda s: s.get("state") == "Suspended", "the state")
    assert status["repair"]["counted"] == 0


def test_what_somebody_else_changed_becomes_as_it_should_be(served: ServedNamespace) -> None:
    job = served.submit(manifest("conflict"))
    job.run(*names("conflict"))
    budget = job.own_path("poddisruptionbudgets")
    served.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 4)

    served.kube.patch(budget, {"spec": {"minAvailable": 0}})
    served.kube.delete(job.own_path("services"))

    served.kube.wait(budget, lambda found: found and found["spec"]["minAvailable"] == 4)
    served.kube.wait(job.own_path("services"), lambda found: found is not None)


def test_a_job_of_another_manager_is_left_alone(served: ServedNamespace) -> None:
    job = served.submit(manifest("others", managedBy="kueue.x-k8s.io/multikueue"))
    ours = served.submit(manifest("ours"))

    ours.wait_pods(*names("ours"))

    assert job.pods() == []
    assert "status" not in job.get()
    assert not job.get()["metadata"].get("finalizers")


def test_a_job_that_is_late_fails_and_expires(served: ServedNamespace) -> None:
    job = served.submit(manifest("late"))
    job.run(*names("late"))

    job.patch(activeDeadlineSeconds=1)  # it may have run longer already, so it is late from now on

    job.wait_condition("Failed", "True", "DeadlineExceeded")
    (failed,) = served.events("Failed")
    assert (failed["type"], failed["involvedObject"]["uid"]) == ("Warning", job.uid)
    job.patch(ttlSecondsAfterFinished=0)

    served.kube.wait(job.path, lambda found: found is None)
    wait(lambda: not job.pods(), "the pods' end")
    wait(lambda: served.is_forgotten(job.uid), "the api's record goes")


def test_a_specification_that_is_refused_is_told_and_may_be_mended(
    served: ServedNamespace,
) -> None:
    body = manifest("wrong")
    del body["spec"]["template"]["spec"]["containers"][0]["image"]
    job = served.submit(body)

    message = job.wait_condition("Failed", "True", "InvalidSpec")["message"]
    assert "spec.template.spec.containers[0].image" in message
    shown = {c["type"]: c["status"] for c in job.get()["status"]["conditions"]}
    assert shown.pop("Failed") == "True"
    assert shown.pop("Exact") == "Unknown", "it has no state yet"
    assert set(shown.values()) == {"False"}
    (told,) = served.events("InvalidSpec")
    assert (told["message"], told["type"]) == (message, "Warning")
    assert job.pods() == []

    job.patch(suspend=True)
    job.patch(template=manifest()["spec"]["template"])
    job.patch(suspend=False)

    job.wait_pods(*names("wrong"))
    job.wait_condition("Failed", "False", "NotFailed")


def conflicts(served: ServedNamespace) -> float:
    """Conflicts about jobs. An object that goes with its job while it is kept is none of them."""
    about = ("trainingjobs", "trainingjobs/status")
    return sum(served.operator.metric(REQUESTS, code="409", resource=r) or 0 for r in about)


def test_no_request_conflicts_with_what_others_change(served: ServedNamespace) -> None:
    """Status writes and other people's changes give a job a new version all the time."""
    before = conflicts(served)
    body = manifest("busy")
    body["metadata"]["finalizers"] = ["example.com/first"]
    ended = threading.Event()

    def change() -> None:
        kube, count = served.plane.api_as("admin"), 0
        while not ended.is_set():
            with contextlib.suppress(ApiError):
                kube.patch(job.path, {"metadata": {"annotations": {"count": str(count)}}})
            count += 1

    job = served.submit(body)
    busy = threading.Thread(target=change)
    busy.start()
    try:
        job.run(*names("busy"))
        job.wait_condition("Ready", "True")
        job.delete()
        # Somebody else's finalizer holds the object, not the operator.
        wait(lambda: served.is_forgotten(job.uid), "the api's record goes")
        assert job.get()["metadata"]["finalizers"] == ["example.com/first"]
    finally:
        ended.set()
        busy.join()

    job.served.kube.patch(job.path, {"metadata": {"finalizers": None}})
    served.kube.wait(job.path, lambda found: found is None)
    assert conflicts(served) == before
    assert served.operator.metric(REQUESTS, resource="trainingjobs/status", code="200")


def test_nothing_is_left_of_a_deleted_job(served: ServedNamespace) -> None:
    job = served.submit(manifest("gone"))
    job.run(*names("gone"))

    job.delete()

    served.kube.wait(job.path, lambda found: found is None)
    for resource in OBJECTS:
        served.kube.wait(job.own_path(resource), lambda found: found is None)
    wait(lambda: not job.pods(), "the pods' end")
    wait(lambda: served.is_forgotten(job.uid), "the api's record goes")


def test_a_job_that_is_applied_again_has_nothing_of_the_deleted_one(
    served: ServedNamespace,
) -> None:
    """A kubelet gives pods an immutable Secret as it once read it under that name."""

    def mounted(job: Job) -> str:
        """The Secret of the job's pods."""
        wait(lambda: len(job.pods()) == 5, "five pods")
        (name,) = {
            source["secret"]["name"]
            for pod in job.pods()
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", ())
            if "secret" in source
        }
        found = served.kube.get(served.path("secrets", name))
        assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == [job.uid]
        return name

    seen = []
    for _ in range(3):
        job = served.submit(manifest("again"))
        seen.append(mounted(job))
        account = job.pods()[0]["spec"]["serviceAccountName"]
        (owner,) = served.kube.get(served.path("serviceaccounts", account))["metadata"][
            "ownerReferences"
        ]
        assert owner["uid"] == job.uid
        job.delete()
        served.kube.wait(job.path, lambda found: found is None)
    assert len(set(seen)) == 3


def test_pods_that_are_refused_are_shown_and_tried_again(served: ServedNamespace) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "0"}},
    }
    path = served.path("resourcequotas")
    served.kube.create(path, quota)
    served.kube.wait(f"{path}/few", lambda found: found and "hard" in found.get("status", {}))
    wide = {"training": {"steps": 60, "lanes": 16, "shardsPerLane": 2}}
    job = served.submit(manifest("refused", **wide))
    assert "quota" in job.wait_condition("Degraded", "True", "PodsRefused")["message"]

    # Many at once compete for the quota: several API servers refuse some with 409.
    served.kube.patch(f"{path}/few", {"spec": {"hard": {"pods": "200"}}})

    job.wait_pods(*names("refused", 33))
    job.wait_status(lambda s: condition_of(s, "Degraded").get("reason") != "PodsRefused", "repair")
    assert not served.events("NameTaken")
    served.kube.delete(f"{path}/few")
