"""Measures how much slower steps are with strangers at our listeners than with them elsewhere.

    python benchmarks/strangers.py [--quick] [--rounds 6] [--seconds 10]

One local run of two replicas of two stages. In turns, the same strangers (1,000 idle ones and 100
who send; benchmarks/support/strangers.py) come to

- nowhere: nobody comes;
- nobody's: as many listeners as the run has, in a process that accepts everybody, holds up to 256
  and reads nothing, so the machine has the strangers' own work and the kernel's to do;
- ours: the run's gather servers, heal servers and its api.

The step times are those of the ledger while they are there. What is wanted is that steps beside
strangers of ours take at most 1.2 times those beside strangers of nobody's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support.local_run import LocalRun, local_run, make_job
from support.spread import median_and_p90
from support.strangers import strangers

from mainstay_core.base.proofs import ANSWER_BYTES, NONCE_BYTES, CallerProof, Purpose

LANES, STAGES = 2, 2
NOBODYS = """
import collections, select, socket, sys
held, poll, listeners = collections.deque(), select.poll(), {}
for _ in range(int(sys.argv[1])):
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    listeners[listener.fileno()] = listener
    poll.register(listener, select.POLLIN)
    print(listener.getsockname()[1], flush=True)
poll.register(sys.stdin, select.POLLIN)
while True:
    for fd, _ in poll.poll():
        if fd not in listeners:
            sys.exit()
        held.append(listeners[fd].accept()[0])
        if len(held) > 256:
            held.popleft().close()
    select.select([], [], [], 0.001)
"""


def addresses_of(run: LocalRun) -> list[str]:
    """Return where the run's processes listen for each other, as ``host:port``."""
    inodes: dict[str, str] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            host, _, port = fields[1].partition(":")
            name = ".".join(str(byte) for byte in bytes.fromhex(host)[::-1])
            inodes[fields[9]] = f"{name}:{int(port, 16)}"
    wanted: set[str] = set()
    plan = run.fetch("plan")["plan"]
    wanted |= {host["gather"] for host in plan["hosts"]}
    wanted.add(re.sub(r"^http://|/.*$", "", run.url))
    trainers = {int(m["pid"]) for m in run.fetch("members") if m["pid"]}
    for pid in trainers:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = re.match(r"socket:\[(\d+)\]", os.readlink(fd))
                if inode and inode[1] in inodes and is_heal_server(inodes[inode[1]]):
                    wanted.add(inodes[inode[1]])
    return sorted(wanted)


def is_heal_server(address: str) -> bool:
    """Whether a listener answers as one: a trainer has listeners of gloo's as well."""
    host, _, port = address.rpartition(":")
    hello = CallerProof("", bytes(NONCE_BYTES), address, Purpose.HEAL).hello
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0) as caller:
        caller.sendall(hello)
        return len(caller.recv(ANSWER_BYTES)) == ANSWER_BYTES
    return False


@contextlib.contextmanager
def nobodys(number: int) -> Iterator[list[str]]:
    """Listen at so many addresses in a process of nobody's."""
    process = subprocess.Popen(
        [sys.executable, "-c", NOBODYS, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield [f"127.0.0.1:{process.stdout.readline().strip()}" for _ in range(number)]
    finally:
        process.communicate()


def steps_during(run: LocalRun, seconds: float) -> list[float]:
    """Return the seconds between commits for so long."""
    first = run.newest() + 2
    time.sleep(seconds)
    last = run.newest()
    times = [run.steps[n].committed_at_s for n in range(first, last) if n in run.steps]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 rounds of 5 seconds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    rounds, seconds = (2, 5.0) if args.quick else (args.rounds, args.seconds)
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    job = make_job(
        "strangers",
        training={"steps": 1_000_000, "seed": 7, "lanes": LANES, "shardsPerLane": 1},
        parallelism={"stages": STAGES},
    )
    times: dict[str, list[float]] = {"nowhere": [], "nobody's": [], "ours": []}
    with local_run(job) as run:
        run.members(LANES * STAGES)
        run.go_on(20)
        ours = addresses_of(run)
        with nobodys(len(ours)) as theirs:
            for number in range(rounds):
                times["nowhere"] += steps_during(run, seconds)
                for place, addresses in (("nobody's", theirs), ("ours", ours)):
                    with strangers(addresses) as did:
                        times[place] += steps_during(run, seconds)
                    print(f"round {number}, {place}: {did}", file=sys.stderr)
        recoveries = run.recoveries()
        print(f"{len(ours)} listeners, {len(recoveries)} recoveries")
    print("| strangers | steps | step time, median (90th percentile) ms | ratio |")
    print("| --- | --- | --- | --- |")
    base = statistics.median(times["nobody's"])
    for place, found in times.items():
        ratio = statistics.median(found) / base
        print(f"| {place} | {len(found)} | {median_and_p90(found)} | {ratio:.2f} |")
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    return 0 if statistics.median(times["ours"]) <= 1.2 * base else 1


if __name__ == "__main__":
    sys.exit(main())
