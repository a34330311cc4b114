"""Measures what the recoveries of a large job cost the control plane, in processor time.

    python benchmarks/control_plane.py [--pods 64 ...] [--kills 4]

A real api and a real Redis; this process plays the supervisors of a job with one rank per pod (four
stages, ``--pods`` / 4 lanes), so no trainer takes any processor time. For each pod that is killed:

* the survivors tell at once that they have parked, and the provider that the pod is gone;
* every survivor gets the plan by its stream, and tells in two requests that it adopted and settled;
* a stage at a time tells the ledger of the step;
* another pod registers, tells of its trainer, and all tell that they adopted and settled.

Printed are the medians for a loss and for a join: the processor seconds of api and Redis, requests,
bytes of the answers and of the streams, how long it took from the fault to the plan at the last
supervisor. One more row says what a round of heartbeats costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.local_run import make_job
from support.served_api import ServedApi, served_api

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.wire.facts import (
    FACT_FORMAT,
    FactKind,
    Heartbeat,
    PodRegistration,
    SlotStatus,
)

STAGES = 4
TOKEN = "benchmark"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GIVE_UP_S = 300.0
PLAN_ID = re.compile(rb'"quorum":\{"id":(\d+)')
"""In a plan as the stream carries it: only its own quorum has that name."""
DIGEST = "0" * 32


@dataclass(slots=True)
class Cost:
    """The cost of one loss, join or round of heartbeats."""

    api_s: float = 0.0
    """Processor seconds of the api."""
    redis_s: float = 0.0
    requests: int = 0
    answer_bytes: int = 0
    stream_bytes: int = 0
    plan_s: float = 0.0
    """Wall seconds from the fault until the last supervisor had the plan."""


@dataclass(slots=True)
class Counters:
    """The numbers of requests and bytes so far."""

    requests: int = 0
    answer_bytes: int = 0
    stream_bytes: int = 0


@dataclass(slots=True, eq=False)
class Supervisor:
    """A pod's supervisor, as far as the api sees it."""

    api: Api
    name: str
    life: Incarnation
    plan_id: int = 0
    """Quorum id of the newest plan that its stream has brought."""
    quorum: str = ""
    """The newest plan's quorum as text, as each request names it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    reading: asyncio.Task[None] | None = None

    async def ask(self, path: str, body: Any) -> dict[str, Any]:
        """Post to the api on this pod's connection."""
        if self.line is None:
            self.line = await asyncio.open_connection(*self.api.address)
        headers = {"Mainstay-Pod": self.name, "Mainstay-Quorum": self.quorum}
        return await self.api.ask(self.line, "POST", f"{self.api.job}/agent/{path}", body, headers)

    async def enter(self) -> None:
        """Register, open the stream, and tell of the trainer."""
        registration = PodRegistration(
            pod=PodUid(self.name),
            name=self.name,
            address="127.0.0.1",
            gather=f"{self.name}:1",
            num_slots=1,
            pid=1,
        )
        answer = await self.ask("pods", codec.encode(registration))
        self.reading = asyncio.create_task(self._follow(answer["cursor"]))
        await self.tell(FactKind.TRAINER_UP, quorum=None, fingerprint={"torch": "2"})

    async def tell(self, kind: FactKind, **fields: Any) -> None:
        """Tell a fact of the pod's trainer."""
        fact = {
            "kind": kind.value,
            "format": FACT_FORMAT,
            "pod": self.name,
            "slot": 0,
            "incarnation": self.life,
            "observed_at_s": time.time(),
            **fields,
        }
        await self.ask("facts", {"facts": [fact], "supervisor": ""})

    async def beat(self, quorum: Any, step: int) -> None:
        """Send a heartbeat."""
        status = SlotStatus(index=0, incarnation=self.life, pid=1, phase="computing", step=step)
        heartbeat = Heartbeat(pod=PodUid(self.name), slots=(status,))
        await self.ask("heartbeats", codec.encode(heartbeat) | {"quorum": quorum})

    async def wait_for(self, plan_id: int) -> None:
        """Wait until the stream has brought this plan."""
        while self.plan_id < plan_id:
            self.changed.clear()
            await self.changed.wait()

    async def _follow(self, cursor: str) -> None:
        reader, writer = await asyncio.open_connection(*self.api.address, limit=1 << 26)
        headers = {"Mainstay-Pod": self.name, "Last-Event-ID": cursor}
        writer.write(self.api.head("GET", f"{self.api.job}/agent/stream", headers))
        try:
            while line := await reader.readline():
                self.api.counters.stream_bytes += len(line)
                found = PLAN_ID.search(line) if line.startswith(b"data:") else None
                if found is not None:
                    self.plan_id = max(self.plan_id, int(found[1]))
                    self.changed.set()
        finally:
            writer.close()

    def leave(self) -> None:
        """End, as a killed pod does."""
        if self.reading is not None:
            self.reading.cancel()
        if self.line is not None:
            self.line[1].close()


class Api:
    """The api, as a person asks it.

    Args:
        served: its processes.
    """

    def __init__(self, served: ServedApi) -> None:
        self._served = served
        self.address = ("127.0.0.1", served.port)
        self.counters = Counters()
        self.job = ""
        """Path of the job."""
        self._line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def head(self, method: str, path: str, headers: dict[str, str], size: int = 0) -> bytes:
        """Return the head of a request."""
        told = {"Host": "api", "Authorization": f"Bearer {TOKEN}", **headers}
        if size:
            told |= {"Content-Type": "application/json", "Content-Length": str(size)}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in told.items() if v)]
        return "\r\n".join([*lines, "", ""]).encode()

    async def ask(
        self,
        line: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Ask on a connection, and return what the answer says.

        Raises:
            RuntimeError: the api refuses.
        """
        content = b"" if body is None else json.dumps(body).encode()
        reader, writer = line
        writer.write(self.head(method, path, headers or {}, len(content)) + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split(" ", 2)[1])
        size = int(re.search(r"content-length: (\d+)", head, re.IGNORECASE)[1])  # type: ignore[index]
        answer = await reader.readexactly(size)
        self.counters.requests += 1
        self.counters.answer_bytes += size
        # A fact that the newest plan has overtaken is stale: its teller gets the plan.
        if status >= 400 and b'"stale"' not in answer[:40]:
            raise RuntimeError(f"{method} {path}: {status} {answer[:500]!r}")
        return json.loads(answer or b"null")

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Ask as a person does."""
        if self._line is None:
            self._line = await asyncio.open_connection(*self.address, limit=1 << 26)
        return await self.ask(self._line, method, path, body)

    def used_s(self) -> tuple[float, float]:
        """Return the processor seconds of api and Redis so far."""
        return _processor_s(self._served.process.pid), _processor_s(self._served.redis.pid)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Played:
    """A job whose supervisors are played.

    Args:
        api: that has the job.
        lanes: of the job; it has four stages, and a pod for each cell.
    """

    def __init__(self, api: Api, lanes: int) -> None:
        self.api, self.lanes = api, lanes
        self.pods: dict[str, Supervisor] = {}
        self.plan: dict[str, Any] = {}
        self.step = 0
        self._made = 0

    async def start(self) -> None:
        """Submit the job and bring all its pods up."""
        manifest = make_job(
            "wide",
            training={"steps": 1_000_000, "seed": 7, "lanes": self.lanes, "shardsPerLane": 1},
            parallelism={"stages": STAGES},
        )
        job = await self.api.call("POST", "/v1/jobs", {"manifest": manifest})
        self.api.job = f"/v1/jobs/{job['uid']}"
        new = [self._make() for _ in range(self.lanes * STAGES)]
        await asyncio.gather(*(pod.enter() for pod in new))
        await self._take_plan(1)
        await self._settle()
        await self._commit()

    async def lose(self, pod: Supervisor) -> Cost:
        """Kill a pod; return what it cost until the next commit."""
        old, number = self.plan["quorum"], self.plan["quorum"]["id"] + 1
        del self.pods[pod.name]
        pod.leave()
        return await self._measured(number, self._tell_loss(pod, old))

    async def _tell_loss(self, pod: Supervisor, old: Any) -> None:
        gone = {"kind": "pod-gone", "format": FACT_FORMAT, "pod": pod.name, "evidence": "killed"}
        parked = [
            each.tell(FactKind.PARKED, quorum=old, step=self.step, cause="reduction")
            for each in self.pods.values()
        ]
        await asyncio.gather(
            self.api.call("POST", f"{self.api.job}/provider/facts", {"facts": [gone]}), *parked
        )

    async def replace(self) -> Cost:
        """Have another pod take the place; return what it cost until the next commit."""
        return await self._measured(self.plan["quorum"]["id"] + 1, self._make().enter())

    async def beat(self) -> Cost:
        """Send a heartbeat of each pod; return what that cost."""

        async def all_beat() -> None:
            quorum, step = self.plan["quorum"], self.step
            await asyncio.gather(*(pod.beat(quorum, step) for pod in self.pods.values()))

        return await self._measured(self.plan["quorum"]["id"], all_beat(), settles=False)

    async def _measured(self, plan_id: int, fault: Any, *, settles: bool = True) -> Cost:
        before, (api_s, redis_s) = Counters(**_values(self.api.counters)), self.api.used_s()
        began_s = time.monotonic()
        await fault
        await self._take_plan(plan_id)
        plan_s = time.monotonic() - began_s
        if settles:
            await self._settle()
            await self._commit()
        (api_end_s, redis_end_s), after = self.api.used_s(), self.api.counters
        return Cost(
            api_s=api_end_s - api_s,
            redis_s=redis_end_s - redis_s,
            requests=after.requests - before.requests,
            answer_bytes=after.answer_bytes - before.answer_bytes,
            stream_bytes=after.stream_bytes - before.stream_bytes,
            plan_s=plan_s,
        )

    def _make(self) -> Supervisor:
        self._made += 1
        name = f"wide-{self._made}"
        pod = Supervisor(self.api, name, Incarnation(f"life-{self._made}"))
        self.pods[name] = pod
        return pod

    async def _take_plan(self, plan_id: int) -> None:
        async with asyncio.timeout(GIVE_UP_S):
            await asyncio.gather(*(pod.wait_for(plan_id) for pod in self.pods.values()))
        if self.plan and self.plan["quorum"]["id"] == plan_id:
            return
        counters = Counters(**_values(self.api.counters))
        self.plan = (await self.api.call("GET", f"{self.api.job}/plan"))["plan"]
        self.api.counters.requests = counters.requests
        self.api.counters.answer_bytes = counters.answer_bytes
        quorum = self.plan["quorum"]
        for pod in self.pods.values():
            pod.quorum = f"q{quorum['id']}-{quorum['nonce']}"

    async def _settle(self) -> None:
        quorum = self.plan["quorum"]
        members = [self.pods[m["slot"]["pod"]] for m in self.plan["members"]]

        async def settle(pod: Supervisor) -> None:
            await pod.tell(FactKind.ADOPTED, quorum=quorum, step=self.step, reached=self.step)
            await pod.tell(FactKind.SETTLED, quorum=quorum, step=self.step)

        await asyncio.gather(*(settle(pod) for pod in members))

    async def _commit(self) -> None:
        """Commit a few steps, so that everybody counts as at work."""
        members = [self.pods[m["slot"]["pod"]] for m in self.plan["members"]]
        stages = [m["rank"]["stage"] for m in self.plan["members"]]
        for _ in range(4):
            entries = [
                (members[stages.index(stage)], _entry(self.step, stage, self.plan))
                for stage in range(STAGES)
            ]
            await asyncio.gather(*(pod.ask("ledger", {"entries": [e]}) for pod, e in entries))
            self.step += 1


def _entry(step: int, stage: int, plan: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "stage": stage,
        "quorum": plan["quorum"],
        "gradient": DIGEST,
        "masters": f"{step * 16 + stage:032x}",
        "data": DIGEST,
        "loss": 3.0,
        "norm": 1.0,
        "tokens": 128,
        "step_s": 0.1,
        "replicas": len(plan["chains"]),
        "committed_at_s": time.time(),
    }


def _values(counters: Counters) -> dict[str, int]:
    return {name: getattr(counters, name) for name in ("requests", "answer_bytes", "stream_bytes")}


def show(label: str, costs: Sequence[Cost]) -> None:
    """Print a line of the table."""

    def middle(name: str) -> float:
        return float(statistics.median(getattr(cost, name) for cost in costs))

    print(
        f"| {label} | {len(costs)} | {middle('api_s'):.2f} | {middle('redis_s'):.2f} "
        f"| {middle('requests'):.0f} | {middle('answer_bytes') / 1e6:.2f} "
        f"| {middle('stream_bytes') / 1e6:.2f} | {middle('plan_s'):.2f} |",
        flush=True,
    )


async def measure(num_pods: int, kills: int) -> None:
    """Print the rows of a job."""
    with served_api({"MAINSTAY_TOKEN": TOKEN}) as served:
        api = Api(served)
        job = Played(api, num_pods // STAGES)
        await job.start()
        losses, joins, beats = [], [], []
        for turn in range(kills):
            victim = tuple(job.pods.values())[(turn * 7 + 3) % len(job.pods)]
            losses.append(await job.lose(victim))
            joins.append(await job.replace())
            beats.append(await job.beat())
        show(f"loss, {num_pods} pods", losses)
        show(f"join, {num_pods} pods", joins)
        show(f"a heartbeat of each of {num_pods}", beats)
        for pod in job.pods.values():
            pod.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, nargs="+", default=[64], help="(64)")
    parser.add_argument("--kills", type=int, default=4, help="(4)")
    args = parser.parse_args()
    print("| what | times | api s | redis s | requests | answers MB | streams MB | plan at all s |")
    print("| --- |" + " --- |" * 7, flush=True)
    for num_pods in args.pods:
        asyncio.run(measure(num_pods, args.kills))


if __name__ == "__main__":
    main()
