"""Measures how much slower one tenant's job is while another tenant misuses the same api.

    python benchmarks/tenants.py [--quick] [--rounds 6] [--seconds 10] [--kills 1]

One local run of two replicas of two stages, whose api has the limits of the chart, and a second job
at the same api. In turns, the owner of the second job does everything wrong that the token of its
pods allows (benchmarks/support/tenant.py: 24 connections that never wait)

- nowhere: it is quiet;
- at nobody's: at a process that takes whatever comes and answers it all the same, so the machine
  has the tenant's own work and the kernel's to do;
- at another: at an api with a store of its own on the same machine, which has the tenant's job and
  not the first one, so the machine has all the work that this tenant makes;
- at ours: at the first job's api.

Meanwhile the first job's steps are timed by its ledger, calls about it by a person, and at the end
of each turn a trainer is killed, ``--kills`` times: from that to the next commit is a recovery.
What is wanted is that each of the three takes at most 1.2 times as long beside the tenant at ours
as beside the same load spent elsewhere, at another. What one has to pay for the load itself is the
ratio to nobody's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx
from support.local_run import LocalRun, kill_trainer, local_run, make_job
from support.served_api import served_api
from support.spread import median_and_p90
from support.tenant import hostile_tenant

from mainstay_api.settings import CLUSTER

LANES, STAGES = 2, 2
TENANT_TOKEN, ADMIN_TOKEN = "the-tenants-own", "the-providers-own"
CALL_PAUSE_S = 0.1
BOUND = 1.2
INF = float("inf")
# Answers as the api does, as short as can be, and never asks anybody to wait.
NOBODYS = """
import asyncio, sys
async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            left = int(head.partition(b"content-length: ")[2].partition(b"\\r\\n")[0] or 0)
            while left:
                data = await reader.read(min(left, 65536))
                if not data:
                    return writer.close()
                left -= len(data)
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    except (OSError, asyncio.IncompleteReadError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@contextlib.contextmanager
def nobodys() -> Iterator[str]:
    """Serve in a process of nobody's; return where."""
    process = subprocess.Popen(
        [sys.executable, "-c", NOBODYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.communicate()


class Measured:
    """The times that were measured beside a tenant in one place, in seconds."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.calls: list[float] = []
        self.recoveries: list[float] = []

    def turn(self, run: LocalRun, seconds: float, kills: int, rng: random.Random) -> None:
        """Time steps and calls for so long, and then so many recoveries."""
        first = run.newest() + 2
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            began_s = time.perf_counter()
            run.fetch("summary")
            self.calls.append(time.perf_counter() - began_s)
            time.sleep(CALL_PAUSE_S)
        last = run.newest()
        times = [run.steps[n].committed_at_s for n in range(first, last) if n in run.steps]
        self.steps += [after - before for before, after in itertools.pairwise(times)]
        self.recoveries += [recover(run, rng) for _ in range(kills)]

    def all(self) -> dict[str, Sequence[float]]:
        return {"step": self.steps, "call": self.calls, "recovery": self.recoveries}


def recover(run: LocalRun, rng: random.Random) -> float:
    """Kill a trainer; return the seconds to the first commit without it, and wait until whole."""
    member = rng.choice(run.members(LANES * STAGES))
    run.newest()
    quorum = max(step.quorum for step in run.steps.values())
    killed_s = kill_trainer(member)

    def committed_s() -> float:
        run.newest()
        return min((s.committed_at_s for s in run.steps.values() if s.quorum > quorum), default=0)

    took_s = float(run.until(committed_s, "a commit after the kill")) - killed_s
    run.members(LANES * STAGES)
    return took_s


def submit(client: httpx.Client, api: str) -> str:
    """Submit the tenant's job to an api, ``http://HOST:PORT``; return its uid."""
    manifest = make_job("tenant", parallelism={"stages": 1})
    body = {"manifest": manifest, "uid": "tenant", "namespace": "tenant"}
    return str(client.post(f"{api}/v1/jobs", json=body).raise_for_status().json()["uid"])


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the ratio of the medians."""
    # On a machine that is full of other work a turn may see no step at all.
    return statistics.median(times) / statistics.median(base) if times and base else INF


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds of 5 seconds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=1)
    args = parser.parse_args()
    rounds, seconds = (2, 5.0) if args.quick else (args.rounds, args.seconds)
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    limits = {f"MAINSTAY_{name.upper()}": str(value) for name, value in CLUSTER.items()}
    os.environ.update(limits, MAINSTAY_AGENT_TOKEN=TENANT_TOKEN)
    job = make_job(
        "tenants",
        training={"steps": 1_000_000, "seed": 7, "lanes": LANES, "shardsPerLane": 1},
        parallelism={"stages": STAGES},
    )
    measured = {place: Measured() for place in ("nowhere", "nobody's", "another", "ours")}
    rng = random.Random(1)
    others_token = {"MAINSTAY_ADMIN_TOKEN": ADMIN_TOKEN}
    with local_run(job) as run, nobodys() as theirs, served_api(others_token) as other:
        run.members(LANES * STAGES)
        run.go_on(20)
        ours, another = re.sub(r"/v1/jobs/.*$", "", run.url), f"http://127.0.0.1:{other.port}"
        uid = submit(run.client, ours)
        with httpx.Client(headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}) as client:
            others_uid = submit(client, another)
        places = {"nobody's": (theirs, uid), "another": (another, others_uid), "ours": (ours, uid)}
        for number in range(rounds):
            measured["nowhere"].turn(run, seconds, args.kills, rng)
            for place, (api, job_uid) in places.items():
                address = api.removeprefix("http://")
                with hostile_tenant(address, job_uid, TENANT_TOKEN) as did:
                    measured[place].turn(run, seconds, args.kills, rng)
                print(f"round {number}, {place}: {did}", file=sys.stderr)
        lost = run.fetch("report")["steps"]["lost"]
    print(f"steps lost: {lost}")
    print("| tenant | what | times | median (90th percentile) ms | to nobody's | to another |")
    print("| --- | --- | --- | --- | --- | --- |")
    worst = 0.0
    for place, found in measured.items():
        for what, times in found.all().items():
            to_nobodys = ratio(times, measured["nobody's"].all()[what])
            to_another = ratio(times, measured["another"].all()[what])
            worst = max(worst, to_another) if place == "ours" else worst
            shown = f"{median_and_p90(times)} | {to_nobodys:.2f} | {to_another:.2f}"
            print(f"| {place} | {what} | {len(times)} | {shown} |")
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    return 0 if worst <= BOUND and not lost else 1


if __name__ == "__main__":
    sys.exit(main())
