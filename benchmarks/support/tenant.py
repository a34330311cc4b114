"""Plays a tenant that does everything wrong that the token of its pods allows.

    python benchmarks/support/tenant.py --to HOST:PORT --job UID --token TOKEN [--connections 24]

Each connection sends one request after another, of every kind, at a pace of its own: heartbeats,
pods that register again and again, some with more slots than a pod of the job may have, trainers
that die as soon as they live, each death told 200 times, entries of steps that nobody has
computed, bodies that are long and wrong, streams that nobody reads. Most of it is accepted: what is
refused at once costs its api the least. It waits for no answer longer than a moment, and never
heeds one that asks it to wait. One process, one thread; it ends with its standard input, and prints
how many answers of each status it has got.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 2.0
"""For an answer."""
NUM_PODS = 4
TOO_MANY_SLOTS = 8
STEPS = 900_000
"""Of its job, at least."""
LONG_BYTES = 900_000
"""Of a body that is long and still read."""
EVERY_LONG = 50
"""One request in so many has such a body, and one in four times so many one of 20 MiB."""


def a_body(rng: random.Random, pod: str, number: int) -> tuple[str, Any]:
    """Return a route and something to send there."""
    life = f"life-{number}"
    fact = {"pod": pod, "slot": 0, "incarnation": life}
    digest = f"{number:032x}"
    entry = {
        "stage": 0, "inner": 0, "quorum": {"id": 1, "nonce": "n"}, "gradient": "",
        "masters": digest, "data": "", "loss": 1.0, "norm": 1.0, "tokens": 1, "step_s": 0.1,
        "replicas": 1,
    }  # fmt: skip
    step = number * 200 % STEPS
    registration = {
        "pod": pod, "name": pod, "address": "127.0.0.1", "gather": "g:1",
        "num_slots": rng.choice((1, 1, 1, TOO_MANY_SLOTS)), "pid": 1,
    }  # fmt: skip
    up = {"kind": "trainer-up", **fact, "fingerprint": {"torch": "2"}}
    down = {"kind": "trainer-down", **fact, "evidence": "it was killed"}
    kinds: list[tuple[str, Any]] = [
        ("heartbeats", {"pod": pod, "slots": [], "quorum": None}),
        ("pods", registration),
        ("facts", {"facts": [up]}),
        ("facts", {"facts": [up, down]}),
        ("facts", {"facts": [down] * 200}),
        ("ledger", {"entries": [{**entry, "step": step + i} for i in range(200)]}),
        ("plan", None),
    ]
    return kinds[number % len(kinds)]


def a_request(job: str, token: str, pod: str, rng: random.Random, number: int) -> bytes:
    """Return the bytes of one request."""
    route, body = a_body(rng, pod, number)
    content = b"" if body is None else json.dumps(body).encode()
    if number % EVERY_LONG == 1:
        route, content = "facts", b'{"facts":[' + b"1," * (LONG_BYTES // 2) + b"1]}"
    if number % (4 * EVERY_LONG) == 2:
        route, content = "restore", b'{"config":"' + b"x" * (20 << 20) + b'"}'
    head = (
        f"{'POST' if content else 'GET'} /v1/jobs/{job}/agent/{route} HTTP/1.1\r\nHost: api\r\n"
        f"Authorization: Bearer {token}\r\nMainstay-Pod: {pod}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Sender:
    """One connection after another, and the requests that go over them."""

    def __init__(
        self, args: argparse.Namespace, number: int, did: collections.Counter[str]
    ) -> None:
        self._args, self._did = args, did
        self._rng = random.Random(number)
        self._pod = f"pod-{number % NUM_PODS}"
        self._numbers = itertools.count(number * 1_000_000)
        self._reads = number % 8 != 7
        """Others open a stream each time, and never read it."""

    async def run(self) -> None:
        while True:
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError, TimeoutError, ValueError
            ):
                async with asyncio.timeout(60):
                    await self._talk()
            await asyncio.sleep(self._args.pause)

    async def _talk(self) -> None:
        host, _, port = self._args.to.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            if not self._reads:
                await self._open_stream(reader, writer)
                return
            while True:
                await self._ask(reader, writer)
                await asyncio.sleep(self._args.pause)
        finally:
            writer.transport.abort()

    async def _open_stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        args = self._args
        writer.write(
            f"GET /v1/jobs/{args.job}/agent/stream HTTP/1.1\r\nHost: api\r\n"
            f"Authorization: Bearer {args.token}\r\nMainstay-Pod: {self._pod}\r\n\r\n".encode()
        )
        async with asyncio.timeout(PATIENCE_S):
            self._did[f"stream {(await reader.readline()).split()[1].decode()}"] += 1
        await asyncio.sleep(self._args.pause)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        args = self._args
        writer.write(a_request(args.job, args.token, self._pod, self._rng, next(self._numbers)))
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            self._did[head.split()[1]] += 1
            length = head.partition("content-length: ")[2].partition("\r\n")[0]
            await reader.readexactly(int(length or 0))
        if "connection: close" in head:
            raise OSError("closed")


async def play(args: argparse.Namespace) -> dict[str, int]:
    did: collections.Counter[str] = collections.Counter()
    senders = [Sender(args, number, did) for number in range(args.connections)]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return dict(did)


@contextlib.contextmanager
def hostile_tenant(
    to: str, job: str, token: str, connections: int = 24, pause_s: float = 0.1
) -> Iterator[dict[str, int]]:
    """Have such a tenant ask there while the block lasts; filled with the answers it got."""
    command = [sys.executable, str(Path(__file__).resolve())]
    command += [f"--to={to}", f"--job={job}", f"--token={token}"]
    command += [f"--connections={connections}", f"--pause={pause_s}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    did: dict[str, int] = {}
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the tenant did not come")
        yield did
    finally:
        process.stdin.close()
        last = process.stdout.read()
        process.wait()
        process.stdout.close()
        if last:
            did.update(json.loads(last))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, help="HOST:PORT of the api")
    parser.add_argument("--job", required=True, help="uid of the tenant's job")
    parser.add_argument("--token", required=True)
    parser.add_argument("--connections", type=int, default=24)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two requests")
    print(json.dumps(asyncio.run(play(parser.parse_args()))))
