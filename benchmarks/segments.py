"""Measures how fast a pod's store sends segments to a holder, beside a bare ``sendfile``.

    python benchmarks/segments.py [--quick] [--rounds 20]

Three processes on loopback addresses, as in a job: a trainer with its client, the writer's store
and the holder's. Both stores' processes have another memory file as well. In turns, round by round,
the same number of bytes goes from the writer's process to the holder's:

- bare: ``os.sendfile`` over one blocking connection, ``recv_into`` at the other end, and one byte
  back for each segment;
- store: the trainer says that the segments are written, and waits until the holder has confirmed
  them all. Their bytes are in the arena already, as copying them there is the trainer's.

What is wanted is that the store reaches at least 0.8 of the bare rate, by the medians.

On a machine that does other work, rates are those of the scheduler as well. So the processor time
of each way is told beside them, of trainer, sender and receiver. Of these two the busier one bounds
the rate, where there are cores enough: the last column is its time the bare way over its time with
the store.
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mainstay_agent.snapshots.store import SegmentStore
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.segments.frames import SOCKET_NAME
from mainstay_core.wire.segments import Holder, SegmentHeader, SegmentKey, SegmentKind
from mainstay_train.state.segments import SegmentClient

HOST = "127.0.0.1"
MIB = 1 << 20
SIZES = ((1 * MIB, 128), (16 * MIB, 16), (64 * MIB, 4))
"""Bytes of a segment, and how many go in one round."""
ROUND_BYTES = 256 * MIB
"""The most that goes in one round."""
ARENA_BYTES = 3 * ROUND_BYTES
"""Room for the segments of two rounds: a holder drops those of the last one with the next."""


def make_store(name: str, directory: Path) -> SegmentStore:
    path = directory / f"{name}-{SOCKET_NAME}"
    return SegmentStore(
        job=JobUid("bench"),
        pod=PodUid(name),
        address=HOST,
        path=path,
        memory_bytes=ARENA_BYTES,
    )


def memory_file() -> tuple[int, memoryview]:
    """Return a memory file with its mapping, all pages of it there."""
    fd = os.memfd_create("bare")
    os.posix_fallocate(fd, 0, ROUND_BYTES)
    return fd, memoryview(mmap.mmap(fd, ROUND_BYTES))


def receive(directory: str) -> None:
    """Run the holder's process: its store, and the other end of the bare connection."""
    store = make_store("holder", Path(directory))
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=store.serve, daemon=True).start()
    print(store.address, listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    _, memory = memory_file()
    offset = 0
    while prefix := connection.recv(8, socket.MSG_WAITALL):
        size = int.from_bytes(prefix, "big")
        offset = offset if offset + size <= ROUND_BYTES else 0
        left, offset = memory[offset : offset + size], offset + size
        while left.nbytes:
            left = left[connection.recv_into(left) :]
        connection.sendall(b"k")


def send(directory: str, port: int) -> None:
    """Run the writer's process: its store, and the near end of the bare connection."""
    store = make_store("writer", Path(directory))
    threading.Thread(target=store.serve, daemon=True).start()
    fd, _ = memory_file()
    with socket.create_connection((HOST, port)) as connection:
        print("ready", flush=True)
        for line in sys.stdin:
            size, number = map(int, line.split())
            print(send_bare(connection, fd, size, number), flush=True)


def send_bare(connection: socket.socket, fd: int, size: int, number: int) -> float:
    """Return the seconds from the first byte to the last confirmation."""
    offset, begun_s = 0, time.perf_counter()
    for end in range(size, (number + 1) * size, size):
        connection.sendall(size.to_bytes(8, "big"), socket.MSG_MORE)
        while offset < end:
            offset += os.sendfile(connection.fileno(), fd, offset, end - offset)
    connection.recv(number, socket.MSG_WAITALL)
    return time.perf_counter() - begun_s


class Process:
    """One of the processes of the stores."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self.said = self._read().split()

    def ask(self, *words: object) -> str:
        """Return the answer to a line."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def header_of(version: int, unit: int, size: int) -> SegmentHeader:
    key = SegmentKey(lineage=0, position=0, unit=unit, kind=SegmentKind.STATE, version=version)
    return SegmentHeader(
        key=key,
        job=JobUid("bench"),
        fingerprint="f",
        unit_name=f"layer.{unit}",
        num_units=1,
        nonce="a",
        window=0,
        num_instalments=1,
        size_bytes=size,
        digest="d",
    )


def send_segments(
    client: SegmentClient,
    holder: Holder,
    version: int,
    size: int,
    number: int,
    pids: Sequence[int],
) -> tuple[float, list[float]]:
    """Return the seconds from the first word of written segments to the last confirmation.

    And those of CPU that each process has used for it.
    """
    rooms = [client.room(size) for _ in range(number)]
    for room in rooms:
        room.memory[:] = bytes([version % 256]) * size
    headers = [header_of(version, unit, size) for unit in range(number)]
    cpu = [cpu_s(pid) for pid in pids]
    begun_s = time.perf_counter()
    for room, header in zip(rooms, headers, strict=True):
        client.written(room, header, [holder], version)
    why_not = client.wait_held([header.key for header in headers])
    took_s = time.perf_counter() - begun_s
    took_cpu = [cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]
    assert not why_not, why_not
    client.keep_from(0, version + 1)
    return took_s, took_cpu


def compare(
    client: SegmentClient, sender: Process, receiver: Process, version: int, size: int, rounds: int
) -> float:
    """Send rounds of segments of one size both ways, and print what they took.

    Returns:
        The ratio of the rates.
    """
    number = dict(SIZES)[size]
    holder = Holder(pod=PodUid("holder"), address=receiver.said[0])
    pids = (os.getpid(), sender.pid, receiver.pid)
    took: dict[str, list[float]] = {"bare": [], "store": []}
    cpu = {way: [0.0] * len(pids) for way in took}

    def note(way: str, seconds: float, used: Sequence[float]) -> None:
        took[way].append(seconds)
        cpu[way] = [a + b for a, b in zip(cpu[way], used, strict=True)]

    for at in range(rounds + 2):
        before = [cpu_s(pid) for pid in pids]
        bare_s = float(sender.ask(size, number))
        bare_cpu = [cpu_s(pid) - b for pid, b in zip(pids, before, strict=True)]
        store_s, store_cpu = send_segments(client, holder, version + at, size, number, pids)
        if at >= 2:  # two rounds until all pages are mapped
            note("bare", bare_s, bare_cpu)
            note("store", store_s, store_cpu)
    medians = {way: statistics.median(values) for way, values in took.items()}
    ratio = medians["bare"] / medians["store"]
    pairs = statistics.median(b / s for b, s in zip(*took.values(), strict=True))
    total = size * number / MIB
    each = {
        way: ", ".join(f"{1e6 * s / total / rounds:.0f}" for s in used) for way, used in cpu.items()
    }
    busier = max(cpu["bare"][1:]) / max(cpu["store"][1:])
    print(
        f"| {number} of {size // MIB} MiB | {total / medians['bare']:.0f} "
        f"| {total / medians['store']:.0f} | {ratio:.2f} | {pairs:.2f} "
        f"| {each['bare']} | {each['store']} | {busier:.2f} |",
        flush=True,
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", type=int, metavar="MIB", help="segments of one size")
    args = parser.parse_args()
    rounds = 5 if args.quick else args.rounds
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    print(
        "| segments | bare, MiB/s | store, MiB/s | ratio of medians | median of ratios | CPU of "
        "trainer, sender, receiver, us per MiB: bare | store | busier, bare / store |"
    )
    print("| --- |" + " --- |" * 7)
    ratios, version = [], 1
    with tempfile.TemporaryDirectory(prefix="mainstay-") as directory:
        receiver = Process("--receive", directory)
        sender = Process("--send", directory, receiver.said[1])
        path = str(Path(directory) / f"writer-{SOCKET_NAME}")
        client = SegmentClient(path, 0, "bench", HOST)
        for size, _ in SIZES:
            if args.only in (None, size // MIB):
                ratios.append(compare(client, sender, receiver, version, size, rounds))
                version += rounds + 2
        client.shutdown("measured")
        sender.end()
        receiver.end()
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    return 0 if min(ratios) >= 0.8 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--receive"]:
        receive(sys.argv[2])
    elif sys.argv[1:2] == ["--send"]:
        send(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
