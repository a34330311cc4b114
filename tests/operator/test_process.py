"""The operator as a process on a real control plane: what it makes, tells and repairs."""

from __future__ import annotations

from tests.operator.world import World, condition_of, manifest, wait

NAMES = [f"demo-{i}" for i in range(5)]


def test_a_job_gets_its_objects_and_is_submitted_with_its_uid(world: World) -> None:
    job = world.submit(manifest())
    pods = job.wait_pods(*NAMES)

    for resource, name in (
        ("services", "demo"),
        ("serviceaccounts", "demo"),
        ("secrets", "demo-secret"),
        ("poddisruptionbudgets", "demo"),
        *(("pods", p["metadata"]["name"]) for p in pods),
    ):
        path = world.path(resource, name)
        made = world.kube.wait(path, lambda found: found is not None)
        assert made is not None
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (job.uid, True)
    assert world.api.get(f"/v1/jobs/{job.uid}")["uid"] == job.uid
    job.wait_condition("Initialized", "True")
    status = job.wait_condition("Ready", "False", "WaitingForPods")
    assert status["message"]


def test_a_deleted_pod_is_told_at_once_and_made_anew(world: World) -> None:
    job = world.submit(manifest())
    pods = job.run(*NAMES)
    job.wait_condition("Ready", "True", "Training")
    lost = job.plan()["members"][0]["slot"]["pod"]
    name = next(p["metadata"]["name"] for p in pods if p["metadata"]["uid"] == lost)

    world.kube.delete(world.path("pods", name), gracePeriodSeconds="0")

    wait(lambda: lost not in {p["uid"] for p in job.wanted()["pods"]}, "the fact at the api")
    wait(lambda: len(job.pods()) == 5, "the pool's refill")
    wait(lambda: world.events("PodDeleted"), "the Event")
    status = job.wait_status(lambda s: s.get("recovery", {}).get("total"), "the recovery's count")
    assert condition_of(status, "Complete")["status"] == "False"
    assert lost not in {p["metadata"]["uid"] for p in job.pods()}
