"""The operator with a job of a thousand pods: time, memory, and requests to the Kubernetes API.

    python benchmarks/operator_scale.py [--pods 1000] [--rack 40] [--nodes 10] [--kwok PATH]

A real control plane, api, Redis and operator, each a process of its own, with the operator's
default settings; nodes and kubelets are kwok's (``go install sigs.k8s.io/kwok/cmd/kwok@v0.7.0``),
supervisors are played by this program. Times depend on the machine; the counts of requests do not:
they are what the operator itself counts (its probe's answer).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.cluster import run_control_plane
from tests.cluster.control_plane import ControlPlane
from tests.operator.world import Job, World, manifest, wait, world_on

STAGES = 4
SPARES = 8
PROBE_S = 10.5
"""kopf answers a probe from its cache for 10 s."""
IDLE_S = 30


@contextlib.contextmanager
def kwok_on(plane: ControlPlane, program: str, num_nodes: int) -> Iterator[None]:
    """Nodes that are played, and pods that run on them at once."""
    log = (plane.dir / "kwok.log").open("wb")
    command = [program, "--kubeconfig", str(plane.kubeconfig), "--manage-all-nodes=true"]
    # Renewed four times as often: the control plane of tests gives nodes up after seconds.
    command += ["--node-lease-duration-seconds=8"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for index in range(num_nodes):
            size = {"cpu": "1k", "memory": "4Ti", "pods": "1000", "ephemeral-storage": "1Ti"}
            name = f"kwok-{index}"
            plane.api.create(
                "/api/v1/nodes",
                {
                    "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
                    "status": {"allocatable": size, "capacity": size},
                },
            )
        yield
    finally:
        process.kill()
        process.wait()
        log.close()


def requests_of(url: str) -> Counter[str]:
    """What the operator has asked the Kubernetes API for so far, once that stands still."""
    time.sleep(PROBE_S)
    answer = httpx.get(url, trust_env=False, timeout=30).json()
    return Counter(answer["operator"]["requests"])


def memory_of(pid: int) -> tuple[float, float]:
    """Resident memory now, and at its largest, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) / 1000, int(found["VmHWM"]) / 1000


def play_supervisors(job: Job, pods: list[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pod: job.register([pod]), pods))
    if job.plan():
        job.settle()


def measure_start(world: World, num_pods: int, url: str) -> Job:
    replicas = (num_pods - SPARES) // STAGES
    body = manifest(
        "wide",
        training={"steps": 100_000, "lanes": replicas, "shardsPerLane": 1},
        parallelism={"stages": STAGES},
        spares={"replicas": num_pods - replicas * STAGES},
        detection={"heartbeatTimeoutSeconds": 100_000},
        scheduling={"startupDeadlineSeconds": 3600},
    )
    began = time.monotonic()
    job = world.submit(body)
    wait(lambda: len(job.pods()) == num_pods, "all pods")
    made_s = time.monotonic() - began
    wait(lambda: count_ready(job) == num_pods, "all pods ready")
    ready_s = time.monotonic() - began
    job.wait_status(lambda s: (s.get("pods") or {}).get("ready") == num_pods, "the status")
    settled_s = time.monotonic() - began
    print(f"{num_pods} pods: made {made_s:.1f} s, ready {ready_s:.1f} s, status {settled_s:.1f} s")
    show("requests until then", requests_of(url))
    play_supervisors(job, job.pods())
    wait(job.plan, "the first plan")
    job.settle()
    job.wait_condition("Ready", "True", "Training")
    show_memory(world)
    return job


def count_ready(job: Job) -> int:
    conditions = [p.get("status", {}).get("conditions") or () for p in job.pods()]
    return sum(any(c["type"] == "Ready" and c["status"] == "True" for c in cs) for cs in conditions)


def measure_repair(world: World, job: Job, num_lost: int, url: str) -> None:
    before = requests_of(url)
    serving = {m["slot"]["pod"] for m in job.plan()["members"]}
    lost = [p for p in job.pods() if p["metadata"]["uid"] in serving][:num_lost]
    uids = {p["metadata"]["uid"] for p in lost}
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: delete(world, p), lost))
    wait(lambda: not uids & {p["uid"] for p in job.wanted()["pods"]}, "the facts at the api")
    told_s = time.monotonic() - began
    num_pods = job.wanted()["num_pods"]
    wait(lambda: count_ready(job) == num_pods, "the pool's refill")
    refilled_s = time.monotonic() - began
    play_supervisors(job, [p for p in job.pods() if p["metadata"]["uid"] not in serving])
    wait(lambda: not uids & {m["slot"]["pod"] for m in job.plan()["members"]}, "the plan")
    job.settle()
    spent = requests_of(url) - before
    spent.subtract({"GET pods": 0})
    print(f"{num_lost} pods deleted: told {told_s:.2f} s, ready again {refilled_s:.2f} s")
    show(f"requests of that repair, {sum(spent.values()) / num_lost:.1f} per pod", spent)
    show_memory(world)


def delete(world: World, pod: dict[str, Any]) -> None:
    world.kube.delete(world.path("pods", pod["metadata"]["name"]), gracePeriodSeconds="0")


def measure_idle(job: Job, url: str) -> None:
    """Requests while the job trains, a step every half second, and nothing happens."""
    before = requests_of(url)
    began, step = time.monotonic(), 0
    while time.monotonic() - began < IDLE_S:
        with contextlib.suppress(AssertionError):
            commit(job, step)
        step += 1
        time.sleep(0.5)
    spent, passed_s = requests_of(url) - before, time.monotonic() - began
    show(f"requests in {passed_s:.0f} s of training", spent)


def commit(job: Job, step: int) -> None:
    entry = {
        "step": step,
        "quorum": job.plan()["quorum"],
        "gradient": "0" * 32,
        "masters": f"{step:032x}",
        "data": "0" * 32,
        "loss": 3.0,
        "norm": 1.0,
        "tokens": 128,
        "step_s": 0.5,
        "replicas": 2,
        "committed_at_s": time.time(),
    }
    job.agent("ledger", {"entries": [{**entry, "stage": stage} for stage in range(STAGES)]})


def show(what: str, counts: Counter[str]) -> None:
    listed = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number)
    print(f"  {what}: {sum(counts.values())} ({listed})")


def show_memory(world: World) -> None:
    now_mb, most_mb = memory_of(world.operator.pid)
    print(f"  operator's memory: {now_mb:.0f} MB, at most {most_mb:.0f} MB", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--rack", type=int, default=40, help="pods that are deleted at once")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--kwok", default=shutil.which("kwok") or "kwok")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/healthz"
    defaults = {"MAINSTAY_POLL_S": "1", "MAINSTAY_STATUS_S": "3", "MAINSTAY_LIVENESS_URL": url}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plane = stack.enter_context(run_control_plane(lambda line: print(line, flush=True)))
        stack.enter_context(kwok_on(plane, args.kwok, args.nodes))
        world = stack.enter_context(world_on(plane, directory, **defaults))
        job = measure_start(world, args.pods, url)
        measure_repair(world, job, 1, url)
        measure_repair(world, job, args.rack, url)
        measure_idle(job, url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
