"""The operator, the api or Redis is away: nothing is lost, and nothing waits for ever."""

from __future__ import annotations

from tests.worlds.served_namespace import ServedNamespace, manifest, wait

NUM_PODS = 33


def wait_idle(world: ServedNamespace) -> None:
    """Wait until an operator that did not get on would have said so: for half a dozen resyncs."""

    def lists() -> float:
        labels = {"verb": "GET", "resource": "trainingjobs", "code": "200"}
        return world.operator.metric("mainstay_operator_kube_requests_total", **labels) or 0.0

    enough = lists() + 6
    wait(lambda: lists() >= enough, "resyncs")


def test_an_operator_that_is_killed_in_mid_repair_is_taken_over_from(
    own_world: ServedNamespace,
) -> None:
    world = own_world
    wide = {"training": {"steps": 60, "lanes": 16, "shardsPerLane": 2}}
    job = world.submit(manifest("wide", **wide))
    wait(lambda: len(job.pods()) > 0, "the first pods")
    world.operator.kill()
    half = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.pods()}

    world.operator.start()

    wait(lambda: len(job.pods()) == NUM_PODS, "all pods")
    pods = {p["metadata"]["name"]: p["metadata"]["uid"] for p in job.pods()}
    assert set(pods) == {f"wide-{i}" for i in range(NUM_PODS)}
    assert half.items() <= pods.items()

    # What happens while nobody looks is found out later.
    job.run(*pods)
    job.wait_condition("Ready", "True")
    world.operator.kill()
    lost = job.plan()["members"][0]["slot"]["pod"]
    name = next(name for name, uid in pods.items() if uid == lost)
    world.kube.delete(world.path("pods", name), gracePeriodSeconds="0")
    world.operator.start()

    wait(lambda: lost not in {p["uid"] for p in job.wanted()["pods"]}, "the fact at the api")
    wait(lambda: len(job.pods()) == NUM_PODS, "the refill")
    assert {p["metadata"]["name"] for p in job.pods()} == set(pods)


def test_a_deletion_waits_neither_for_the_api_nor_for_redis(own_world: ServedNamespace) -> None:
    world = own_world
    first = world.submit(manifest("first"))
    second = world.submit(manifest("second"))
    for job in (first, second):
        job.wait_condition("Initialized", "True")

    stays = world.submit(manifest("stays"))
    stays.wait_condition("Initialized", "True")
    world.api.redis.stop()
    first.wait_condition("Ready", "Unknown", "ApiUnreachable")
    wait_idle(world)
    assert world.operator.is_alive()
    first.delete()
    world.kube.wait(first.path, lambda found: found is None)
    world.api.stop()
    second.delete()
    world.kube.wait(second.path, lambda found: found is None)

    wait(lambda: len(world.events("RecordKept")) == 2, "the Events")
    wait(lambda: not first.pods() and not second.pods(), "the pods' end")
    wait_idle(world)
    assert world.operator.is_alive()
    world.api.start()
