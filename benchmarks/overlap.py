"""Measures how much of a reduction's time on a link goes by while the step is still computed.

    python benchmarks/overlap.py [--rounds 20] [--micro-batches 1 4] [--cells 2] [--share 0.5]

One cell computes one shard type and reduces it with others that are played: what they send are
zeros, and a thread lets every byte take its time, one exchange after the other, as one link does
that carries both directions at once. All of a step's bytes take ``share`` of the time in which the
step is computed. The cell computes on this host, and on a device that is played by sleeping
(``emulated_accelerator``), so that other work on the machine matters less. Each round does three
steps, in an order that changes: one without a reduction, one whose reduction begins when all is
computed, and one whose reduction begins with the last micro-batch's gradients. Medians; the ratio
is to the longer of computation and link in the same round. Sums, copies and digests are part of a
reduction and not of its link.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import queue  # noqa: E402
import statistics  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from emulated_accelerator import workload as emulated  # noqa: E402

from mainstay_core.base.shape import JobShape  # noqa: E402
from mainstay_core.job.config import JobConfig  # noqa: E402
from mainstay_core.rank.early import EarlyReduction  # noqa: E402
from mainstay_core.rank.steps.step_plan import Supply  # noqa: E402
from mainstay_core.wire.plan import Partial  # noqa: E402
from mainstay_train.compute.engine import Engine  # noqa: E402
from mainstay_train.compute.loader import Loader  # noqa: E402
from mainstay_train.exact import numerics  # noqa: E402
from mainstay_train.model import workload as workloads  # noqa: E402
from mainstay_train.model.workload import Workload  # noqa: E402
from mainstay_train.sums import digests  # noqa: E402

LLAMA = {"dim": 256, "layers": 8, "heads": 4, "kvHeads": 4, "hidden": 704, "sequence": 256}
HELD = {"deviceMillisecondsPerToken": 6.25, "sequence": 64, "width": 512, "layers": 16}
MODELS: dict[str, Callable[[], Workload]] = {
    "host": lambda: workloads.load("", LLAMA),
    "played device": lambda: emulated(HELD, []),
}
BUCKET_BYTES = 1 << 20
WARM_UP_ROUNDS = 3
SEED = 7


@dataclass(eq=False)
class Transfer:
    """An exchange on the link."""

    received: torch.Tensor
    num_bytes: int
    over: threading.Event = field(default_factory=threading.Event)


class Link:
    """A group of which one rank is here; its link is a thread.

    Args:
        rank: of this cell; the others are played.
    """

    def __init__(self, rank: int) -> None:
        self.seconds_per_byte = 0.0
        self.num_bytes = 0
        """What has gone in the direction that carried more, exchange by exchange."""
        self._rank = rank
        self._transfers: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
        threading.Thread(target=self._carry, name="link", daemon=True).start()

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Transfer:
        """Give an exchange to the link."""
        own = slice(sum(sent_sizes[: self._rank]), sum(sent_sizes[: self._rank + 1]))
        received.zero_()
        start = sum(received_sizes[: self._rank])
        received[start : start + received_sizes[self._rank]] = sent[own]
        outward = sent.numel() - sent_sizes[self._rank]
        inward = received.numel() - received_sizes[self._rank]
        transfer = Transfer(received, max(outward, inward) * sent.element_size())
        self.num_bytes += transfer.num_bytes
        self._transfers.put(transfer)
        return transfer

    def finish_exchange(self, transfer: Transfer) -> None:
        """Wait until the link has carried it."""
        transfer.over.wait()

    def abandon(self, transfers: Sequence[Transfer]) -> None:
        """Leave them to the link."""
        del transfers

    def shutdown(self, why: str) -> None:
        """Go on: nobody else waits."""
        del why

    def _carry(self) -> None:
        free_s = 0.0
        while True:
            transfer = self._transfers.get()
            # From when the link was free: what a sleep is late by does not add up.
            now_s = time.perf_counter()
            begins_s = now_s if now_s - free_s > 1e-3 else free_s
            free_s = begins_s + transfer.num_bytes * self.seconds_per_byte
            time.sleep(max(0.0, free_s - time.perf_counter()))
            transfer.over.set()


class Cell:
    """One cell of a data-parallel job.

    Args:
        model: what it trains.
        cells: how many there are.
        micro_batches: of its type.
    """

    def __init__(self, model: Workload, cells: int, micro_batches: int) -> None:
        shape = JobShape(
            lanes=cells,
            shards_per_lane=1,
            replicas=cells,
            min_replicas=1,
            stages=1,
            steps=1_000_000,
            seed=SEED,
            micro_batches=micro_batches,
        )
        config = JobConfig(
            job="bench",  # type: ignore[arg-type]
            name="bench",
            shape=shape,
            entrypoint="",
            workload={},
            bucket_bytes=BUCKET_BYTES,
        )
        self.engine = Engine.build(
            model,
            config,
            Loader(model.dataset, ahead=False),
            stage=0,
            num_stages=1,
            device="cpu",
            hook=lambda _: None,
        )
        self.engine.state.initialize(SEED)
        self.link = Link(0)
        self.table = tuple(
            Supply(partial=Partial(lane=i, first=i, last=i), index=i) for i in range(cells)
        )
        self.members = tuple(range(cells))
        self.number = 0

    def compute(self, early: Any = None) -> None:
        """Compute the type of the next step."""
        self.engine.drop_held()
        self.engine.compute((0,), self.number, None, early)
        self.number += 1

    def late(self) -> None:
        """Compute, then reduce."""
        self.compute()
        self._reduce()

    def early(self) -> None:
        """Reduce while the last gradients are computed."""
        partial = self.table[0].partial
        self.compute(
            EarlyReduction(
                group=self.link, table=self.table, members=self.members, index=0, partial=partial
            )
        )
        self._reduce()

    def _reduce(self) -> None:
        self.engine.reduce(self.link, self.table, self.members, 0)  # type: ignore[arg-type]


def seconds(do: Callable[[], None]) -> float:
    """Return how long ``do`` takes."""
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


def measure(computes: str, cells: int, micro_batches: int, share: float, rounds: int) -> None:
    """Print one line."""
    cell = Cell(MODELS[computes](), cells, micro_batches)
    cell.late()
    before = cell.link.num_bytes
    cell.late()
    step_bytes = cell.link.num_bytes - before
    compute_s = statistics.median(seconds(cell.compute) for _ in range(WARM_UP_ROUNDS + 2))
    cell.link.seconds_per_byte = share * compute_s / step_bytes
    link_s = share * compute_s
    kinds = {"compute": cell.compute, "late": cell.late, "early": cell.early}
    times: list[dict[str, float]] = []
    for turn in range(rounds + WARM_UP_ROUNDS):
        names = [*kinds]
        order = names[turn % 3 :] + names[: turn % 3]
        took = {name: seconds(kinds[name]) for name in order}
        if turn >= WARM_UP_ROUNDS:
            times.append(took)
    ratios = {
        name: statistics.median(row[name] / max(row["compute"], link_s) for row in times)
        for name in ("late", "early")
    }
    ms = {name: statistics.median(row[name] for row in times) * 1e3 for name in kinds}
    print(
        f"| {computes} | {micro_batches} | {ms['compute']:.0f} | {link_s * 1e3:.0f} "
        f"| {ms['late']:.0f} | {ratios['late']:.2f} | {ms['early']:.0f} | {ratios['early']:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--cells", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5)
    args = parser.parse_args()
    numerics.setup("cpu")
    torch.set_num_threads(1)
    digests.warm_up()
    print("| on | micro-batches | compute ms | link ms | after ms | ratio | meanwhile ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for computes in MODELS:
        for micro_batches in args.micro_batches:
            measure(computes, args.cells, micro_batches, args.share, args.rounds)


if __name__ == "__main__":
    main()
