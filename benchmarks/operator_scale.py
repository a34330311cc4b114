"""Measures the operator with a job of a thousand pods: time, memory, requests to Kubernetes.

    python benchmarks/operator_scale.py [--pods 1000] [--rack 40] [--nodes 10]

A real control plane, api, Redis and operator, each a process of its own, with the operator's
default settings; nodes and kubelets are kwok's, supervisors are played by this program. Times
depend on the machine; the counts of requests do not: they are the API server's own (its audit log
of the operator's user). `tests/operator/test_scale.py` asserts what is to hold of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.audit import Audit, count
from tests.cluster.cluster import run_control_plane
from tests.cluster.played_nodes import played_nodes
from tests.operator import wide
from tests.worlds.served_namespace import Job, ServedNamespace, serve_namespace, wait

STEP_S = 0.5
IDLE_STEPS = 60
BEATS = 50
"""Pods that beat in a step."""


def memory_of(pid: int) -> tuple[float, float]:
    """Resident memory now, and at its largest, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(found["VmRSS"]) / 1000, int(found["VmHWM"]) / 1000


def cpu_of(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_start(world: ServedNamespace, num_pods: int, audit: Audit) -> Job:
    began = time.monotonic()
    job = world.submit(wide.wide_manifest(num_pods))
    job.wait_status(lambda s: (s.get("pods") or {}).get("made", 0) >= num_pods, "all pods")
    made_s = time.monotonic() - began
    wide.wait_ready(job, num_pods)
    print(f"{num_pods} pods: made {made_s:.1f} s, all ready {time.monotonic() - began:.1f} s")
    show("requests until then", count(audit.take()))
    show_process(world)
    wide.register_all(job, job.pods())
    job.wait_condition("Ready", "True", "Training")
    wide.wait_budget(job)
    audit.take()
    return job


def measure_repair(
    world: ServedNamespace, job: Job, num_lost: int, audit: Audit, step: int
) -> None:
    before = {p["metadata"]["uid"]: p for p in job.pods()}
    members = sorted(wide.serving(job))
    lost = [before[uid] for uid in members[:num_lost]]
    uids = {p["metadata"]["uid"] for p in lost}
    made = job.get()["status"]["pods"]["made"]
    began = time.monotonic()
    wide.delete_pods(job, lost)
    deleted_s = time.monotonic() - began
    wait(lambda: not uids & {p["uid"] for p in job.wanted()["pods"]}, "the facts at the api")
    told_s = time.monotonic() - began
    wide.wait_ready(job, len(before), made=made + num_lost)
    refilled_s = time.monotonic() - began
    wait(lambda: not uids & wide.serving(job), "a plan without them")
    wide.register_all(job, [p for p in job.pods() if p["metadata"]["uid"] not in before])
    wide.finish_recoveries(job, step)
    wide.wait_budget(job)
    spent = count(audit.take())
    times = f"told {told_s:.2f} s, ready again {refilled_s:.2f} s"
    print(f"{num_lost} pods deleted, in {deleted_s:.2f} s: {times}")
    show(f"requests of that repair, {sum(spent.values()) / num_lost:.1f} per pod", spent)
    show_process(world)


def measure_idle(world: ServedNamespace, job: Job, audit: Audit, step: int) -> None:
    """Requests while the job trains, pods beat, and nothing happens."""
    began, plan = time.monotonic(), job.plan()
    for index in range(IDLE_STEPS):
        wide.beat(job, plan, plan["members"][:BEATS], step + index)
        wide.commit(job, plan, step + index)
        time.sleep(max(0.0, began + (index + 1) * STEP_S - time.monotonic()))
    passed_s = time.monotonic() - began
    beats = IDLE_STEPS * BEATS
    show(f"requests in {passed_s:.0f} s of training with {beats} heartbeats", count(audit.take()))
    show_process(world)


def show(what: str, counts: Counter[str]) -> None:
    found = Counter({"of discovery": 0})
    for name, number in counts.items():
        found["of discovery" if name.startswith("get /") else name] += number
    listed = ", ".join(f"{name} {number}" for name, number in found.most_common() if number)
    print(f"  {what}: {sum(found.values())} ({listed})")


def show_process(world: ServedNamespace) -> None:
    pid = world.operator.pid
    now_mb, most_mb = memory_of(pid)
    used = f"{now_mb:.0f} MB, at most {most_mb:.0f} MB, {cpu_of(pid):.1f} s of a processor"
    print(f"  operator so far: {used}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--rack", type=int, default=40, help="pods that are deleted at once")
    parser.add_argument("--nodes", type=int, default=10)
    args = parser.parse_args()
    defaults = {"MAINSTAY_POLL_S": "1", "MAINSTAY_STATUS_S": "3"}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plane = stack.enter_context(run_control_plane(lambda line: print(line, flush=True)))
        stack.enter_context(played_nodes(plane, args.nodes))
        audit = Audit(plane.dir)
        world = stack.enter_context(serve_namespace(plane, directory, **defaults))
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        job = measure_start(world, args.pods, audit)
        measure_repair(world, job, 1, audit, step=0)
        measure_repair(world, job, args.rack, audit, step=100)
        measure_idle(world, job, audit, step=200)
        print(f"load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
