"""Two api processes on one Redis: one decision per fault, and no watcher that is missed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import MANIFEST, Job, Redis, wait_for_line

TOKEN = "one-token"


class Replica:
    """An api process, as the classes of conftest see it."""

    def __init__(self, redis: Redis, directory: Path, name: str) -> None:
        port_file = directory / f"{name}.port"
        environment = os.environ | {"MAINSTAY_REDIS_URL": redis.url, "MAINSTAY_TOKEN": TOKEN}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mainstay_api", "--port-file", str(port_file)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        wait_for_line(self.process.stderr, b"serving on http://")
        self.url = f"http://127.0.0.1:{int(port_file.read_text())}"
        self.client = self.new_client(TOKEN)
        # The socket listens before the application does: the first request waits.
        self.get("/readyz")

    def new_client(self, token: str) -> httpx.Client:
        del token
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=30)

    def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        reply = self.client.post(path, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str, *, status: int = 200) -> Any:
        reply = self.client.get(path)
        assert reply.status_code == status, reply.text
        return reply.json()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def new_replica(shared_redis: Redis, tmp_path: Path) -> Iterator[Any]:
    made: list[Replica] = []

    def make() -> Replica:
        made.append(Replica(shared_redis, tmp_path, f"replica-{len(made)}"))
        return made[-1]

    yield make
    for replica in made:
        replica.kill()
        replica.client.close()


def patient_job(replica: Replica) -> Job:
    manifest = MANIFEST | {
        "spec": MANIFEST["spec"] | {"detection": {"heartbeatTimeoutSeconds": 3}},
    }
    return Job(replica, manifest)  # type: ignore[arg-type]


def test_two_replicas_that_get_one_fault_make_one_plan(new_replica: Any) -> None:
    replicas = [new_replica() for _ in range(2)]
    job = patient_job(replicas[0])
    job.start()
    victim = job.plan()["members"][3]
    fact = {
        "kind": "trainer-down",
        "pod": victim["slot"]["pod"],
        "slot": 0,
        "incarnation": victim["incarnation"],
    }
    together = threading.Barrier(8)
    answers: list[Any] = []

    def tell(replica: Replica) -> None:
        with replica.new_client(TOKEN) as client:
            together.wait()
            reply = client.post(f"{job.path}/agent/facts", json={"facts": [fact]})
            answers.append(reply.json()["plan"]["quorum"])

    tellers = [threading.Thread(target=tell, args=(replicas[i % 2],)) for i in range(8)]
    for teller in tellers:
        teller.start()
    for teller in tellers:
        teller.join()
    assert answers == [answers[0]] * 8
    assert answers[0]["id"] == 2
    plans = [e for e in replicas[1].get(f"{job.path}/events") if e["reason"] == "PlanPublished"]
    assert len(plans) == 2, "the first one and one for the fault"


def test_whichever_replica_dies_the_other_finds_silent_pods_and_goes_on_with_streams(
    new_replica: Any, listen: Any
) -> None:
    first, second = new_replica(), new_replica()
    job = patient_job(first)
    job.start()
    listener = listen(job)
    listener.wait(lambda each: each.plans() == [1])
    last_id = listener.events[-1][0]
    # One of the two holds the lease; each is killed once while a pod falls silent.
    first.kill()
    job.api = second
    with job.beating(range(3)):
        assert {"pod-3"} == gone_after(job, 2)
    again = listen(job, last_id)
    again.wait(lambda each: 2 in each.plans())
    third = new_replica()
    second.kill()
    job.api = third
    with job.beating(range(2)):
        assert {"pod-2", "pod-3"} == gone_after(job, 3)


def gone_after(job: Job, quorum_id: int) -> set[str]:
    """Wait for a plan; return the pods that have no member in it."""
    plan = job.wait_for_plan(quorum_id)
    return {f"pod-{i}" for i in range(4)} - {m["slot"]["pod"] for m in plan["members"]}
