"""Plays strangers: peers without the job's secret, who hold idle connections or send anything.

    python benchmarks/support/strangers.py --to HOST:PORT [--to ...] --idle 1000 --senders 100

Idle ones connect and say nothing; who is closed comes back after a pause. Senders connect, announce
a frame of 2 GiB, send of it as long as they are listened to, and come back after a pause. Each
group comes from as many loopback addresses as it is told. One process, one thread; it ends with its
standard input. It prints ``ready`` once everybody has tried to connect, and at the end a line of
JSON with what it did.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import heapq
import itertools
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mainstay_core.base.frames import PREFIX
from mainstay_net.acceptor import raise_descriptor_limit

ANNOUNCED_BYTES = 2 << 30
BURST = PREFIX.pack(100, ANNOUNCED_BYTES) + b"x" * 16384
"""Sent at a time."""
CONNECTING = (errno.EINPROGRESS, errno.EAGAIN)


@dataclass(slots=True)
class Stranger:
    """One that comes again and again."""

    to: tuple[str, int]
    local: str
    sends: bool
    pause_s: float
    socket: socket.socket | None = None


@dataclass(slots=True)
class Crowd:
    """All strangers of one process."""

    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    due: list[tuple[float, int, Stranger]] = field(default_factory=list)
    order: Iterator[int] = field(default_factory=itertools.count)
    num_connected: int = 0
    num_failed: int = 0
    num_closed: int = 0
    sent_bytes: int = 0

    def later(self, stranger: Stranger, delay_s: float) -> None:
        heapq.heappush(self.due, (time.monotonic() + delay_s, next(self.order), stranger))

    def connect(self, stranger: Stranger) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: many per address
            sock.bind((stranger.local, 0))
            code = sock.connect_ex(stranger.to)
            if code not in (0, *CONNECTING):
                raise OSError(code, "refused")
        except OSError:
            sock.close()
            self.num_failed += 1
            self.later(stranger, stranger.pause_s)
            return
        stranger.socket = sock
        self.selector.register(sock, selectors.EVENT_WRITE, stranger)

    def end(self, stranger: Stranger) -> None:
        sock = stranger.socket
        assert sock is not None
        self.selector.unregister(sock)
        # A reset: no port waits for a minute until it can be used again.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        stranger.socket = None
        self.num_closed += 1
        self.later(stranger, stranger.pause_s)

    def ready(self, stranger: Stranger, events: int) -> None:
        sock = stranger.socket
        assert sock is not None
        if events & selectors.EVENT_WRITE:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.num_failed += 1
                self.end(stranger)
                return
            if self.selector.get_key(sock).events == selectors.EVENT_WRITE:
                self.num_connected += 1
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                wanted = both if stranger.sends else selectors.EVENT_READ
                self.selector.modify(sock, wanted, stranger)
                return
        try:
            if events & selectors.EVENT_READ and not sock.recv(4096):
                self.end(stranger)
            elif events & selectors.EVENT_WRITE:
                self.sent_bytes += sock.send(BURST)
        except BlockingIOError:
            return
        except OSError:
            self.end(stranger)

    def turn(self) -> None:
        """Do what is due, then what is ready."""
        now_s = time.monotonic()
        while self.due and self.due[0][0] <= now_s:
            self.connect(heapq.heappop(self.due)[2])
        wait_s = self.due[0][0] - now_s if self.due else 0.1
        for key, events in self.selector.select(min(0.1, max(0.0, wait_s))):
            if isinstance(key.data, Stranger):
                self.ready(key.data, events)
            else:
                raise EOFError


def run(arguments: Sequence[str] | None = None) -> None:
    """Play until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", action="append", required=True, help="HOST:PORT, may be repeated")
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--senders", type=int, default=100)
    parser.add_argument("--addresses", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds before one comes back")
    args = parser.parse_args(arguments)
    raise_descriptor_limit()
    targets = [(host, int(port)) for host, _, port in (to.rpartition(":") for to in args.to)]
    crowd = Crowd()
    for number in range(args.idle + args.senders):
        sends = number >= args.idle
        local = f"127.254.{1 + sends}.{1 + number % args.addresses}"
        to = targets[number % len(targets)]
        crowd.later(Stranger(to, local, sends, args.pause), args.pause * number / 1000)
    crowd.selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    said = False
    with contextlib.suppress(EOFError):
        while True:
            crowd.turn()
            if not said and crowd.num_connected + crowd.num_failed >= args.idle + args.senders:
                print("ready", flush=True)
                said = True
    did = {
        "connected": crowd.num_connected,
        "failed": crowd.num_failed,
        "closed": crowd.num_closed,
        "sent_bytes": crowd.sent_bytes,
    }
    print(json.dumps(did))


@contextlib.contextmanager
def strangers(
    to: Sequence[str], idle: int = 1000, senders: int = 100, pause_s: float = 0.2
) -> Iterator[dict[str, int]]:
    """Have strangers come to these addresses while the block lasts; filled with what they did."""
    command = [sys.executable, str(Path(__file__).resolve())]
    command += [f"--to={address}" for address in to]
    command += [f"--idle={idle}", f"--senders={senders}", f"--pause={pause_s}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    did: dict[str, int] = {}
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the strangers did not come")
        yield did
    finally:
        process.stdin.close()
        last = process.stdout.read()
        process.wait()
        process.stdout.close()
        if last:
            did.update(json.loads(last))


if __name__ == "__main__":
    run()
