"""Mainstay as users run it: the chart on three nodes, pods that train, and everything that dies."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import toolbox
from tests.cluster.client import Object
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import reason_told
from tests.cluster.platform import JOBS, SYSTEM, TRAINING_JOBS, Platform, make_job
from tests.e2e.harness import local_job

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]
STEPS = 24
GATES = (3, 7, 11, 15, 19)
POLL_S = 0.1


@pytest.fixture(scope="module")
def platform(cluster: Callable[[int], Cluster]) -> Platform:
    with reason_told():
        made = Platform(cluster(3), toolbox.say_to_stdout)
    made.install()
    return made


def wait_for(condition: Callable[[], Any], what: str, give_up_s: float = 240.0) -> Any:
    """Wait for what no watch shows; return it."""
    deadline = time.monotonic() + give_up_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            found = condition()
            if found:
                return found
        time.sleep(POLL_S)
    raise AssertionError(f"{what}: not in {give_up_s:.0f} s")


def is_whole(job: Object | None) -> bool:
    """Whether all pods are there and ready, and nothing is being recovered."""
    status = (job or {}).get("status", {})
    pods = status.get("pods", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
    return (
        pods.get("ready") == pods.get("wanted") == 4
        and pods.get("leaving") == 0
        and conditions.get("Recovering") == "False"
        and conditions.get("SparesAvailable") == "True"
    )


def condition(job: Object | None, kind: str) -> str:
    found = [c for c in (job or {}).get("status", {}).get("conditions", []) if c["type"] == kind]
    return str(found[0]["status"]) if found else "Unknown"


class Story:
    """One job, and what happens to it at each gate."""

    def __init__(self, platform: Platform, name: str) -> None:
        self.platform = platform
        self.name = name
        job = make_job(platform, name, STEPS, *GATES)
        # Every copy of the state on a node of its own, as far as there are nodes.
        job["spec"]["scheduling"] = {"spreadTopologyKey": "kubernetes.io/hostname"}
        self.uid = platform.apply(job)["metadata"]["uid"]

    def stand_at(self, gate: int) -> None:
        wait_for((self.platform.gates / f"at-{gate}").exists, f"training before step {gate}")

    def pass_gate(self, gate: int) -> None:
        self.platform.open_gates(gate)

    def be_whole(self) -> None:
        self.platform.wait(self.name, is_whole, "the job is not whole again")

    def serving(self) -> list[Object]:
        """Pods that hold a rank."""
        listed = self.platform.fetch(self.uid, "pods")["pods"]
        uids = {pod["uid"] for pod in listed if pod["serving"]}
        return [p for p in self.platform.pods(self.name) if p["metadata"]["uid"] in uids]

    def count(self, container: str, pod: str) -> int:
        """Restarts of a pod's container."""
        status = self.platform.api.get(f"/api/v1/namespaces/{JOBS}/pods/{pod}")["status"]
        listed = status["containerStatuses"] + status.get("initContainerStatuses", [])
        return int(next(c["restartCount"] for c in listed if c["name"] == container))


def fill_memory(platform: Platform, pod: Object) -> None:
    """Have the kernel kill a pod's trainer container, whose memory goes to a file in its shm."""
    name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
    container = next(c for c in pod["status"]["containerStatuses"] if c["name"] == "trainer")[
        "containerID"
    ].rpartition("/")[2]
    listed = platform.cluster.nodes[node].run(
        "ctr", "-a", platform.cluster.nodes[node].socket, "-n", "k8s.io", "task", "ls"
    )
    pid = next(line.split()[1] for line in listed.splitlines() if line.startswith(container))
    # The container's first process goes first: with it, all of the container.
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    fill = "dd if=/dev/zero of=/dev/shm/fill bs=1M count=2000; rm -f /dev/shm/fill"
    platform.cluster.kubectl(
        *["exec", "-n", JOBS, name, "-c", "trainer", "--", "sh", "-c", fill], check=False
    )


def delete_now(platform: Platform, namespace: str, *selectors: str) -> None:
    """Delete pods without any grace."""
    for selector in selectors:
        for pod in platform.api.list(
            f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector
        ):
            path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
            platform.api.delete(path, gracePeriodSeconds="0")
