"""Measures how long a joiner takes to copy a state from living cells, per GiB.

    python benchmarks/heal.py [--mebibytes 512] [--rounds 5]

Sources and joiner are processes of this machine, with one thread for torch each; sources do nothing
else. Each round copies the same state from one, two and three sources, in an order that changes
from round to round, and sends as many bytes through a bare socket: ``sendfile`` from a file in
memory on one side, ``recv_into`` a buffer on the other. So *bare* is what the machine's sockets
give without a digest, without chunks, without a check. *Digests* is the time to digest the state
once in the joiner's process, which a copy does with each chunk as it arrives, and once more as a
whole with the masters. Medians; ratios are of one round.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402

import torch  # noqa: E402

from mainstay_core.rank.serving import Source, Wanted  # noqa: E402
from mainstay_train.comm.registered import read_exactly  # noqa: E402
from mainstay_train.exact import optimizer  # noqa: E402
from mainstay_train.exact.optimizer import StageState  # noqa: E402
from mainstay_train.model import blocks, split  # noqa: E402
from mainstay_train.state.chunks import cut  # noqa: E402
from mainstay_train.state.heal import HealClient, HealServer, masters_digest  # noqa: E402
from mainstay_train.sums import digests  # noqa: E402

ADDRESS = "127.0.0.1"
WANTED = Wanted("q1-bench", 0, 1)
MOST_SOURCES = 3
GIB = 1 << 30
BYTES_PER_ELEMENT = 12
"""Of a state: a master and two moments, in fp32."""
WIDTH = 1024


def make_state(size_bytes: int) -> StageState:
    """Return a state of about that size in blocks of one matrix, with the same bits everywhere."""
    rows = max(1, size_bytes // (BYTES_PER_ELEMENT * WIDTH * 4))
    made = [
        blocks.Block(blocks.BlockSpec(name=f"b{i}", build=lambda: split.Linear(WIDTH, rows)))
        for i in range(4)
    ]
    state = StageState(made, optimizer.adamw())
    state.initialize(1)
    for number, flat in enumerate(state.flats()):
        if flat.kind != "step":
            values = torch.arange(flat.tensor.numel(), dtype=torch.float32)
            flat.tensor.copy_(values.add_(number).sin_())
    state.refresh()
    return state


def size_of(state: StageState) -> int:
    """Return the bytes that a copy moves."""
    return sum(chunk.size_bytes for chunk in cut(state.flats()))


def serve(pipe: Connection, size_bytes: int) -> None:
    """Be a source, and send as many bytes through a bare socket when asked for."""
    torch.set_num_threads(1)
    state = make_state(size_bytes)
    server = HealServer(ADDRESS, lambda *_: state)
    size = size_of(state)
    with socket.create_server((ADDRESS, 0)) as listener:
        file = os.memfd_create("state")
        os.truncate(file, size)
        for start in range(0, size, 1 << 20):  # its pages are there before the clock runs
            os.pwrite(file, os.urandom(min(1 << 20, size - start)), start)
        pipe.send((server.address, listener.getsockname()[1]))
        while pipe.recv():
            peer, _ = listener.accept()
            with peer:
                sent = 0
                while sent < size:
                    sent += os.sendfile(peer.fileno(), file, sent, size - sent)
        os.close(file)


class Joiner:
    """This process: a state to be filled, and a buffer for the bare socket.

    Args:
        size_bytes: of the state, about.
        sources: pipes, addresses and bare ports of the sources.
    """

    def __init__(self, size_bytes: int, sources: list[tuple[Connection, str, int]]) -> None:
        self._state, self._sources = make_state(size_bytes), sources
        self._expected = masters_digest(self._state)
        self.size_bytes = size_of(self._state)
        self._buffer = bytearray(self.size_bytes)

    def heal(self, count: int) -> float:
        """Return the seconds that a copy from so many sources takes."""
        for flat in self._state.flats():
            flat.tensor.zero_()
        sources = [Source(f"{i}/0", at) for i, (_, at, _) in enumerate(self._sources[:count])]
        client = HealClient(ADDRESS)
        began_s = time.perf_counter()
        client.copy(self._state, sources=sources, wanted=WANTED, expected=self._expected)
        return time.perf_counter() - began_s

    def receive_bare(self) -> float:
        """Return the seconds that the same bytes take through a bare socket."""
        pipe, _, port = self._sources[0]
        pipe.send(True)
        began_s = time.perf_counter()
        with socket.create_connection((ADDRESS, port)) as connection:
            read_exactly(connection, memoryview(self._buffer))
        return time.perf_counter() - began_s

    def digest(self) -> float:
        """Return the seconds that the digests of the whole state take here."""
        began_s = time.perf_counter()
        for chunk in cut(self._state.flats()):
            chunk.digest()
        return time.perf_counter() - began_s


def measure(joiner: Joiner, rounds: int) -> None:
    """Print a line for each way, over all rounds."""
    ways = {
        "bare": joiner.receive_bare,
        **{
            f"{count} source{'s' * (count > 1)}": lambda count=count: joiner.heal(count)  # type: ignore[misc]
            for count in range(1, MOST_SOURCES + 1)
        },
        "digests": joiner.digest,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for number in range(rounds + 1):
        for way in order[number % len(order) :] + order[: number % len(order)]:
            took_s = ways[way]()
            if number:  # the first round fills caches and starts threads
                times[way].append(took_s)
    gibs = joiner.size_bytes / GIB
    print(f"{joiner.size_bytes / 2**20:.0f} MiB, {rounds} rounds, {os.cpu_count()} cores")
    print(f"{'way':>10}  s per GiB  times bare (least..most)")
    for way, taken in times.items():
        ratios = [mine / bare for mine, bare in zip(taken, times["bare"], strict=True)]
        print(
            f"{way:>10}  {statistics.median(taken) / gibs:9.2f}  {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}..{max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    digests.warm_up()
    size_bytes = options.mebibytes << 20
    context = multiprocessing.get_context("spawn")
    started = []
    for _ in range(MOST_SOURCES):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, size_bytes), daemon=True)
        process.start()
        started.append((process, ours))
    try:
        sources = [(pipe, *pipe.recv()) for _, pipe in started]
        measure(Joiner(size_bytes, sources), options.rounds)
    finally:
        for process, _ in started:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
