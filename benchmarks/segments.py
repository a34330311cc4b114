"""Measures how fast a pod's store sends segments to a holder, beside a bare ``sendfile``.

    python benchmarks/segments.py [--quick] [--rounds 20]

Two processes on loopback addresses. One has a store of segments and a trainer's client of it, and
the arena of another memory file; the other has the holder's store, and a thread that receives bytes
into such a file. In turns, round by round, the same number of bytes goes from the first process to
the second:

- bare: ``os.sendfile`` over one blocking connection, ``recv_into`` at the other end, and one byte
  back for each segment;
- store: the client says that the segments are written, and waits until the holder has confirmed
  them all. Their bytes are in the arena already, as copying them there is the trainer's.

What is wanted is that the store reaches at least 0.8 of the bare rate, by the medians.

On a machine that does other work, rates are those of the scheduler as well. So the processor time
of each way is told beside them. The busier one of the two processes bounds the rate: the last
column is its time the bare way over its time with the store.
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


def receive() -> None:
    """Run the second process: a holder's store, and the other end of the bare connection."""
    store = make_store("holder", Path(sys.argv[2]))
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


Took = tuple[float, list[float]]
"""Seconds, and those of CPU of each process."""


def send_bare(
    connection: socket.socket, fd: int, size: int, number: int, pids: Sequence[int]
) -> Took:
    """Return what it took from the first byte to the last confirmation."""
    cpu = [cpu_s(pid) for pid in pids]
    offset, begun_s = 0, time.perf_counter()
    for end in range(size, (number + 1) * size, size):
        connection.sendall(size.to_bytes(8, "big"), socket.MSG_MORE)
        while offset < end:
            offset += os.sendfile(connection.fileno(), fd, offset, end - offset)
    connection.recv(number, socket.MSG_WAITALL)
    took_s = time.perf_counter() - begun_s
    return took_s, [cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]


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
) -> Took:
    """Return what it took from the first word of written segments to the last confirmation."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    rounds = 5 if args.quick else args.rounds
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    print(
        "| segments | bare, MiB/s | store, MiB/s | ratio of medians | median of ratios "
        "| CPU of sender and receiver, us per MiB: bare | store | busier, bare / store |"
    )
    print("| --- |" + " --- |" * 7)
    worst = 1e9
    with tempfile.TemporaryDirectory(prefix="mainstay-") as directory:
        other = subprocess.Popen(
            [sys.executable, __file__, "--receive", directory],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout is not None
        address, bare_port = other.stdout.readline().split()
        pids = (os.getpid(), other.pid)
        store = make_store("writer", Path(directory))
        threading.Thread(target=store.serve, daemon=True).start()
        path = str(Path(directory) / f"writer-{SOCKET_NAME}")
        client = SegmentClient(path, 0, "bench", HOST)
        holder, version = Holder(pod=PodUid("holder"), address=address), 0
        fd, _ = memory_file()
        with socket.create_connection((HOST, int(bare_port))) as bare:
            for size, number in SIZES:
                bare_s, store_s = [], []
                cpu = [[0.0, 0.0], [0.0, 0.0]]
                for at in range(rounds + 2):
                    version += 1
                    plain, bare_cpu = send_bare(bare, fd, size, number, pids)
                    ours, store_cpu = send_segments(client, holder, version, size, number, pids)
                    if at >= 2:  # two rounds until all pages are mapped
                        bare_s.append(plain)
                        store_s.append(ours)
                        for way, took in enumerate((bare_cpu, store_cpu)):
                            cpu[way] = [a + b for a, b in zip(cpu[way], took, strict=True)]
                ratio = statistics.median(bare_s) / statistics.median(store_s)
                pairs = statistics.median(b / s for b, s in zip(bare_s, store_s, strict=True))
                total, worst = size * number / MIB, min(worst, ratio)
                each = [
                    ", ".join(f"{1e6 * s / total / rounds:.0f}" for s in took) for took in cpu
                ]
                print(
                    f"| {number} of {size // MIB} MiB | {total / statistics.median(bare_s):.0f} "
                    f"| {total / statistics.median(store_s):.0f} | {ratio:.2f} | {pairs:.2f} "
                    f"| {each[0]} | {each[1]} | {max(cpu[0]) / max(cpu[1]):.2f} |",
                    flush=True,
                )
        client.shutdown("measured")
        store.close()
        other.kill()
        other.wait()
    print(f"load average after: {os.getloadavg()[0]:.1f}")
    return 0 if worst >= 0.8 else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--receive"]:
        receive()
    else:
        sys.exit(main())
