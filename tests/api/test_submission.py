"""Jobs whose definition lives elsewhere: submitted again and again, summarized, deleted."""

from __future__ import annotations

import copy
from typing import Any

from tests.api.conftest import MANIFEST


def submit(api: Any, job: Any, change: Any = None, *, status: int = 200) -> Any:
    manifest = copy.deepcopy(api.get(job.path)["manifest"])
    if change is not None:
        change(manifest["spec"])
    return api.post("/v1/jobs", {"manifest": manifest, "uid": job.uid}, status=status)


def test_the_same_uid_again_changes_nothing(api: Any, new_job: Any) -> None:
    job = new_job(api, uid="uid-again", namespace="training")
    events = api.get(f"{job.path}/events")
    body = {"manifest": api.get(job.path)["manifest"], "uid": job.uid, "namespace": "training"}
    again = api.post("/v1/jobs", body, status=200)
    assert (again["uid"], again["state"]) == ("uid-again", "forming")
    assert api.get(f"{job.path}/events") == events
    assert api.get(f"{job.path}/summary")["namespace"] == "training"


def test_replicas_and_spares_may_change(api: Any, job: Any) -> None:
    job.start(num_pods=4)
    assert api.get(f"{job.path}/pods")["num_pods"] == 4

    def change(spec: dict[str, Any]) -> None:
        spec["parallelism"]["replicas"] = 1
        spec["spares"] = {"replicas": 3}
        containers = [{"name": "trainer", "image": "i"}]
        labels = {"metadata": {"labels": {"team": "a"}}}
        spec["template"] = {**labels, "spec": {"containers": containers}}

    assert submit(api, job, change)["replicas_wanted"] == 1
    assert api.get(f"{job.path}/pods")["num_pods"] == 2 + 3
    manifest = api.get(job.path)["manifest"]
    assert manifest["spec"]["template"]["metadata"]["labels"] == {"team": "a"}
    messages = [e["message"] for e in api.get(f"{job.path}/events") if e["reason"] == "Submitted"]
    assert messages == ["the job's definition has changed: replicas 2 -> 1, spares 0 -> 3"]


def test_a_wish_from_elsewhere_stands_until_the_definition_changes(api: Any, job: Any) -> None:
    api.post(f"{job.path}/scale", {"replicas": 1})
    assert submit(api, job)["replicas_wanted"] == 1
    assert submit(api, job, lambda s: s["parallelism"].update(minReplicas=2))[
        "replicas_wanted"
    ] == (2)


def test_what_identifies_the_job_is_refused_by_its_field(api: Any, job: Any) -> None:
    for section, field, value in (
        ("training", "steps", 61),
        ("training", "seed", 2),
        ("parallelism", "stages", 1),
        ("workload", "config", {"layers": 3}),
    ):

        def change(
            spec: Any, section: str = section, field: str = field, value: object = value
        ) -> None:
            spec[section][field] = value

        refused = submit(api, job, change, status=422)
        assert refused["field"] == f"spec.{section}.{field}"
        assert "cannot change" in refused["detail"]
    assert api.get(job.path)["steps"] == 60


def test_another_order_of_the_pipeline_is_refused_by_its_field(api: Any, job: Any) -> None:
    """Guards and the cut follow from it: the one thing that has changed is named."""
    refused = submit(api, job, lambda spec: spec.update(pipeline={"order": "Swapped"}), status=422)
    assert refused["field"] == "spec.pipeline.order"
    assert "is 'Swapped', was 'InOrder': it cannot change in a job that exists" in refused["detail"]
    cut = submit(api, job, lambda spec: spec.update(pipeline={"cut": "Equal"}), status=422)
    assert cut["field"] == "spec.pipeline.cut"
    assert "is 'Equal', was 'Balanced'" in cut["detail"]


def test_a_permission_may_be_switched_off_with_its_limit_left_where_it_is(
    api: Any, new_job: Any
) -> None:
    manifest = copy.deepcopy(MANIFEST)
    limit = {"allowApproximate": True, "approximateAfterLostSteps": 3}
    manifest["spec"] |= {"parallelism": {"stages": 3}, "recovery": limit}
    job = new_job(api, manifest)
    assert api.get(f"{job.path}/lineage")["allowed"]
    submit(api, job, lambda spec: spec["recovery"].update(allowApproximate=False))
    assert not api.get(f"{job.path}/lineage")["allowed"]


def test_a_deleted_job_is_forgotten_for_good(api: Any, job: Any, new_job: Any) -> None:
    job.start()
    job.commit(0)
    plan = job.plan()
    assert api.client.delete(job.path).json() == {"uid": job.uid, "deleted": True}
    assert api.client.delete(job.path).json() == {"uid": job.uid, "deleted": False}
    assert api.client.delete("/v1/jobs/never-was").json()["deleted"] is False
    assert api.get(job.path, status=410)["error"] == "job-deleted"
    assert job.uid not in [each["uid"] for each in api.get("/v1/jobs")]
    # Supervisors that outlive it a while cannot bring it back.
    assert job.beat("pod-0", status=410)["error"] == "job-deleted"
    job.restore("pod-0", plan, status=410)
    job.agent("pods", {}, status=410)
    # Nor does it keep its name from another job.
    later = new_job(api)
    assert api.get("/v1/jobs/demo")["uid"] == later.uid


def test_other_replicas_of_the_api_learn_of_the_deletion(api: Any, job: Any, new_api: Any) -> None:
    other = new_api()
    assert other.get(job.path)["uid"] == job.uid
    job.start()
    api.client.delete(job.path)
    beat = {"pod": "pod-0", "slots": [], "quorum": None}
    codes = [
        other.client.post(f"{job.path}/agent/heartbeats", json=beat).status_code for _ in range(2)
    ]
    assert codes[-1] == 410


def test_the_summary_is_the_status(api: Any, job: Any) -> None:
    empty = api.get(f"{job.path}/summary")
    assert (empty["state"], empty["quorum"], empty["pods"]["wanted"]) == ("forming", None, 4)
    assert (empty["training"]["loss"], empty["training"]["ettr"]) == (None, None)
    job.start(num_pods=5)
    job.commit(0)
    job.commit(1)
    summary = api.get(f"{job.path}/summary")
    assert summary["replicas"] == {"whole": 2, "wanted": 2, "min": 1, "lanes": 2, "followers": 0}
    assert summary["pods"] == {
        "wanted": 4,
        "living": 5,
        "serving": 4,
        "leaving": 0,
        "spares_wanted": 0,
        "spares_free": 1,
    }
    training = summary["training"]
    assert (training["step"], training["steps"], training["loss"]) == (2, 60, 2.9)
    assert training["step_seconds"] == 0.1
    assert training["goodput"] == 1.0
    assert 0 < training["ettr"] <= 1
    assert not summary["recovering"]


def test_the_summary_tells_of_recoveries(api: Any, job: Any) -> None:
    job.start(num_pods=5)
    job.commit(0)
    job.kill(1)
    summary = api.get(f"{job.path}/summary")
    assert summary["recovering"]
    assert summary["replicas"]["whole"] == 1
    (active,) = summary["recovery"]["active"]
    assert (active["method"], active["exact"], active["slots"]) == ("mask", True, ["pod-2/0"])
    job.settle(step=1)
    job.settle(step=1)
    job.commit(1)
    recovery = api.get(f"{job.path}/summary")["recovery"]
    last = recovery["last"]
    assert (recovery["active"], last["method"]) == ([], "join")
    assert all(last[f"{part}_s"] >= 0 for part in ("detect", "decide", "fence", "load", "resume"))
    assert recovery["counts"] == {"mask": 1, "join": 1}


def test_the_pods_are_told_by_what_they_do(api: Any, job: Any) -> None:
    job.start(num_pods=5)
    pods = api.get(f"{job.path}/pods")
    assert [p["name"] for p in pods["pods"]] == [f"pod-{i}" for i in range(5)]
    assert [p["serving"] for p in pods["pods"]] == [True] * 4 + [False]
    assert pods["ending"] == ["pod-4"]
    api.post(f"{job.path}/stop")
    assert api.get(f"{job.path}/pods")["num_pods"] == 0


def test_a_suspended_jobs_pods_are_told_to_end_until_it_goes_on(api: Any, job: Any) -> None:
    assert submit(api, job, lambda s: s.update(suspend=True))["state"] == "suspended"
    assert api.get(f"{job.path}/pods")["num_pods"] == 0
    # One that comes too late, known or not, hears it with its first heartbeat.
    assert job.beat("pod-0")["state"] == "suspended"
    job.register("pod-0")
    assert api.get(f"{job.path}/pods")["ending"] == ["pod-0"]
    beat = job.beat("pod-0")
    assert beat["state"] == "suspended"
    assert submit(api, job, lambda s: s.update(suspend=False))["state"] == "forming"
    assert api.get(f"{job.path}/pods")["num_pods"] == 4
    # It was not listened to meanwhile, so it is to tell of itself again.
    assert job.beat("pod-0")["restored_at_s"] != beat["restored_at_s"]
    job.start()
    assert api.get(f"{job.path}/summary")["state"] == "running"


def test_a_running_job_without_checkpoints_is_not_suspended(api: Any, job: Any) -> None:
    job.start()
    refused = submit(api, job, lambda s: s.update(suspend=True), status=422)
    assert refused["field"] == "spec.suspend"
    api.post(f"{job.path}/suspend", status=422)
    assert not api.get(f"{job.path}/summary")["suspend"]
