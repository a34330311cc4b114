"""A job of very many pods on nodes that kwok plays: what its test and its benchmark share."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.cluster.played_nodes import PLAYED
from tests.worlds import played
from tests.worlds.served_namespace import Job, condition_of, manifest, wait

STAGES = 4
SPARES = 8
AT_ONCE = 4
GIVE_UP_S = 800.0
"""A thousand pods are a minute's work of two cores that nobody else needs."""


def wide_manifest(num_pods: int) -> dict[str, Any]:
    """A job of so many pods, some spares among them."""
    replicas = (num_pods - SPARES) // STAGES
    container = {"name": "trainer", "image": "torch:test"}
    return manifest(
        "wide",
        training={"steps": 100_000, "lanes": replicas, "shardsPerLane": 1},
        parallelism={"stages": STAGES},
        spares={"replicas": num_pods - replicas * STAGES},
        # Nobody is to be missed while hundreds of others are played.
        detection={"heartbeatTimeoutSeconds": 100_000},
        scheduling={"startupDeadlineSeconds": 3600},
        template={"spec": {"nodeSelector": PLAYED, "containers": [container]}},
    )


def wait_ready(job: Job, num_pods: int, made: int | None = None) -> None:
    """Wait until the status says that so many pods are ready, and so many were made by then."""
    wanted = {"ready": num_pods, "made": made or num_pods}

    def holds(found: dict[str, Any] | None) -> bool:
        pods = ((found or {}).get("status") or {}).get("pods") or {}
        return wanted.items() <= pods.items()

    job.served.kube.wait(job.path, holds, f"pods {wanted}", give_up_s=GIVE_UP_S)


def register_all(job: Job, pods: Sequence[dict[str, Any]]) -> None:
    """The pods' supervisors come, all their trainers are up, and the plan that follows settles."""
    uids = [pod["metadata"]["uid"] for pod in pods]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda pod: job.introduce(pod), pods))
    up = [
        played.fact("trainer-up", uid, job.new_life(), fingerprint={"torch": "2"}) for uid in uids
    ]
    job.tell(up)
    wait(job.plan, "a plan")
    job.settle()


def beat(job: Job, plan: dict[str, Any], members: Iterable[dict[str, Any]], step: int) -> None:
    """A heartbeat of each of these members' pods."""
    for member in members:
        slot = {
            "index": 0,
            "incarnation": member["incarnation"],
            "pid": 1,
            "phase": "computing",
            "step": step,
            "progress": step,
            "quorum": plan["quorum"],
        }
        body = {"pod": member["slot"]["pod"], "slots": [slot], "quorum": plan["quorum"]}
        job.agent("heartbeats", body)


def commit(job: Job, plan: dict[str, Any], step: int) -> None:
    """All stages commit a step."""
    entries = [played.ledger_entry(step, stage, plan["quorum"]) for stage in range(STAGES)]
    job.agent("ledger", {"entries": entries})


def serving(job: Job) -> set[str]:
    """The pods of the plan's members."""
    return {member["slot"]["pod"] for member in job.plan().get("members") or ()}


def finish_recoveries(job: Job, step: int) -> None:
    """Train on until all replicas do and no fault is open, and the status says so."""
    steps = itertools.count(step)

    def closed() -> bool:
        now = next(steps)
        with contextlib.suppress(AssertionError):  # what is known already is refused
            job.settle(now)
        commit(job, job.plan(), now)
        summary = job.served.api.get(f"/v1/jobs/{job.uid}/summary")
        replicas, active = summary["replicas"], summary["recovery"]["active"]
        return all(r["done"] for r in active) and replicas["whole"] == replicas["wanted"]

    wait(closed, "recoveries that close, and all replicas")
    quorum = job.plan()["quorum"]
    shown = f"q{quorum['id']}-{quorum['nonce']}"

    def shows(status: dict[str, Any]) -> bool:
        newest = (status.get("quorum") or {}).get("id") == shown
        return newest and condition_of(status, "Recovering").get("status") == "False"

    job.wait_status(shows, f"{shown}, no fault open")


def wait_budget(job: Job) -> None:
    """Wait until evictions are to leave as many pods as the plan has."""
    num_serving = len(serving(job))
    job.served.kube.wait(
        job.own_path("poddisruptionbudgets"),
        lambda budget: budget is not None and budget["spec"]["minAvailable"] == num_serving,
        f"a budget of {num_serving}",
    )


def delete_pods(job: Job, pods: Iterable[dict[str, Any]]) -> None:
    """Delete pods without any time to end."""
    paths = [job.served.path("pods", pod["metadata"]["name"]) for pod in pods]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda path: job.served.kube.delete(path, gracePeriodSeconds="0"), paths))
