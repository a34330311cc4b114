"""The operator, the api or Redis is away: nothing is lost, and nothing waits for ever."""

from __future__ import annotations

import pytest
from tests.worlds.served_namespace import ServedNamespace, manifest, wait

NUM_PODS = 33


def wait_idle(served: ServedNamespace) -> None:
    """Wait until an operator that did not get on would have said so: for half a dozen resyncs."""

    def lists() -> float:
        labels = {"verb": "GET", "resource": "trainingjobs", "code": "200"}
        return served.operator.metric("mainstay_operator_kube_requests_total", **labels) or 0.0

    enough = lists() + 6
    wait(lambda: lists() >= enough, "resyncs")


@pytest.mark.chaos
def test_an_operator_that_is_killed_in_mid_repair_is_taken_over_from(
    own_served: ServedNamespace,
) -> None:
    served = own_served
    wide = {"training": {"steps": 60, "lanes": 16, "shardsPerLane": 2}}
    job = served.submit(manifest("wide", **wide))
    wait(lambda: len(job.pods()) > 0, "the first pods")
    served.operator.kill()
    half = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.pods()}

    served.operator.start()

    wait(lambda: len(job.pods()) == NUM_PODS, "all pods")
    pods = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.pods()}
    assert set(pods) == {f"wide-{i}" for i in range(NUM_PODS)}
    assert half.items() <= pods.items()

    # What happens while nobody looks is found out later.
    job.run(*pods)
    job.wait_condition("Ready", "True")
    served.operator.kill()
    lost = job.plan()["members"][0]["slot"]["pod"]
    name = next(name for name, uid in pods.items() if uid == lost)
    served.kube.delete(served.path("pods", name), gracePeriodSeconds="0")
    served.operator.start()

    wait(lambda: lost not in {p["uid"] for p in job.wanted()["pods"]}, "the fact at the api")
    wait(lambda: len(job.pods()) == NUM_PODS, "the refill")
    assert {p["metadata"]["name"] for p in job.pods()} == set(pods)


def test_a_deletion_waits_neither_for_the_api_nor_for_redis(own_served: ServedNamespace) -> None:
    served = own_served
    first = served.submit(manifest("first"))
    second = served.submit(manifest("second"))
    for job in (first, second):
        job.wait_condition("Initialized", "True")

    stays = served.submit(manifest("stays"))
    stays.wait_condition("Initialized", "True")
    served.api.redis.stop()
    first.wait_condition("Ready", "Unknown", "ApiUnreachable")
    wait_idle(served)
    assert served.operator.is_alive()
    first.delete()
    served.kube.wait(first.path, lambda found: found is None)
    served.api.stop()
    second.delete()
    served.kube.wait(second.path, lambda found: found is None)

    wait(lambda: not first.pods() and not second.pods(), "the pods' end")
    wait_idle(served)
    assert served.operator.is_alive()
    # What was deleted meanwhile is forgotten when both are back, also by another operator.
    served.operator.kill()
    third = served.submit(manifest("third"))
    third.delete()
    stays.delete()
    served.kube.wait(stays.path, lambda found: found is None)
    served.api.redis.start()
    served.api.start()
    served.operator.start()
    for job in (first, second, stays):
        wait(lambda uid=job.uid: served.is_forgotten(uid), f"{job.name} is forgotten")
