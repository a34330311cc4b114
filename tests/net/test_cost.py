"""Counts what strangers cost each listener: the numbers of docs/security.md are the bounds."""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from benchmarks.support.strangers import strangers
from tests.api.conftest import Redis
from tests.api.test_process import TOKEN, environment

from mainstay_core.base.proofs import Purpose
from mainstay_net.caller import prove

ROOT = Path(__file__).resolve().parents[2]
IDLE, SENDERS = 1000, 100
WHILE_S = 10.0
SECRET = "known to the job's pods"
GATHER = f"""
import asyncio
from mainstay_agent.gather import GatherServer
async def run():
    server = GatherServer(secret={SECRET!r})
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()
asyncio.run(run())
"""
HEAL = """
import threading
from mainstay_train.state.heal import HealServer
print(HealServer("127.0.0.1", lambda *_: None).address, flush=True)
threading.Event().wait()
"""
SEGMENTS = f"""
import tempfile
from pathlib import Path
from mainstay_agent.snapshots.store import SegmentStore
with tempfile.TemporaryDirectory() as directory:
    store = SegmentStore(
        job="job-1", pod="a", address="127.0.0.1", path=Path(directory) / "s",
        memory_bytes=1 << 20, secret={SECRET!r},
    )
    print(store.address, flush=True)
    store.serve()
"""
OPERATOR = """
import asyncio, socket
from mainstay_operator.metrics import Metrics
from mainstay_operator.serving import serving
async def run():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with serving(f"http://{address}/healthz", lambda: ("", {}), Metrics()):
        print(address, flush=True)
        await asyncio.Event().wait()
asyncio.run(run())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a process holds or has used beyond what it did before the strangers came."""

    memory_mib: float
    """At most at any time, the kernel's buffers not counted."""
    threads: int
    descriptors: int
    cpu_s: float


@contextmanager
def program(code: str, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """Run a listener of ours as a process; yield its pid and address."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environ["MAINSTAY_SECRET_FILE"] = str(secret)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def api_process(tmp_path: Path) -> Iterator[tuple[int, str]]:
    redis, port_file = Redis(tmp_path), tmp_path / "port"
    redis.start()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mainstay_api", "--port-file", str(port_file)],
            env=environment(redis.url), stderr=log,
        )  # fmt: skip
    try:
        while not port_file.exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield process.pid, f"127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.kill()
        process.wait()
        redis.stop()


def field_of(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def count(pid: int, address: str, still_served: Callable[[str], None]) -> Cost:
    """Return what strangers cost a process while it serves whom it should."""
    still_served(address)
    memory_kib, threads = field_of(pid, "VmRSS"), field_of(pid, "Threads")
    descriptors = most_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    with strangers([address], IDLE, SENDERS):
        cpu_s, end_s = cpu_s_of(pid), time.monotonic() + WHILE_S
        while time.monotonic() < end_s:
            still_served(address)
            most_descriptors = max(most_descriptors, len(os.listdir(f"/proc/{pid}/fd")))
            select.select([], [], [], 0.2)
        return Cost(
            memory_mib=(field_of(pid, "VmHWM") - memory_kib) / 1024,
            threads=field_of(pid, "Threads") - threads,
            descriptors=most_descriptors - descriptors,
            cpu_s=cpu_s_of(pid) - cpu_s,
        )


def by_proof(purpose: Purpose) -> Callable[[str], None]:
    def enter(address: str) -> None:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), 60) as caller:
            prove(caller, SECRET, address, purpose)

    return enter


def by_token(address: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    reply = httpx.get(f"http://{address}/v1/jobs", headers=headers, trust_env=False, timeout=60)
    assert reply.status_code == 200


def by_probe(address: str) -> None:
    reply = httpx.get(f"http://{address}/healthz", trust_env=False, timeout=60)
    assert reply.status_code == 200


LISTENERS = {
    "gather server": (lambda path: program(GATHER, path), by_proof(Purpose.MEET)),
    "heal server": (lambda path: program(HEAL, path), by_proof(Purpose.HEAL)),
    "store of segments": (lambda path: program(SEGMENTS, path), by_proof(Purpose.SNAPSHOT)),
    "api": (api_process, by_token),
    "operator's probe and metrics": (lambda path: program(OPERATOR, path), by_probe),
}


def told_of(listener: str) -> Cost:
    """Return the bounds that the page names for a listener."""
    page = (ROOT / "docs/security.md").read_text()
    row = re.search(rf"^\| {listener} \|.*\|$", page, re.MULTILINE)
    assert row is not None, f"docs/security.md has no row for the {listener}"
    memory, threads, descriptors, cpu = row[0].strip("| ").split(" | ")[-4:]
    return Cost(
        memory_mib=float(memory), threads=int(threads), descriptors=int(descriptors),
        cpu_s=float(cpu),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "listener",
    [
        pytest.param(name, marks=[] if name == "gather server" else [pytest.mark.chaos])
        for name in LISTENERS
    ],
)
def test_strangers_cost_a_listener_no_more_than_is_told(listener: str, tmp_path: Path) -> None:
    start, still_served = LISTENERS[listener]
    told = told_of(listener)
    with start(tmp_path) as (pid, address):
        cost = count(pid, address, still_served)
    print(listener, cost)  # noqa: T201 - what the page is written from

    assert cost.memory_mib <= told.memory_mib
    assert cost.threads <= told.threads
    assert cost.descriptors <= told.descriptors
    assert cost.cpu_s <= told.cpu_s
