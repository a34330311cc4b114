"""Compares the canonical reduction with gloo's all_reduce.

    python benchmarks/reduction.py [--elements 1800000] [--rounds 30] [--overheads]

Every round runs both, one after the other, in the same processes and on the same sizes; the table
shows medians of the slowest rank's time per round and their ratio. Design section 12 asks for at
most 1.3 with one partial per rank and 1.3 (p + 1) / 2 with p.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import multiprocessing  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from datetime import timedelta  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402

import torch  # noqa: E402
from support import demo  # noqa: E402
from support.groups import ADDRESS, make_group  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

from mainstay_core.base.shape import JobShape  # noqa: E402
from mainstay_core.job.config import JobConfig  # noqa: E402
from mainstay_core.rank.steps.step_plan import Supply  # noqa: E402
from mainstay_core.wire.plan import Partial  # noqa: E402
from mainstay_train.compute.engine import Engine  # noqa: E402
from mainstay_train.compute.loader import Loader  # noqa: E402
from mainstay_train.exact.gradients import GradientSums  # noqa: E402
from mainstay_train.exact.layout import BlockLayout, StageLayout  # noqa: E402
from mainstay_train.exact.reduction import Reducer  # noqa: E402
from mainstay_train.model import workload  # noqa: E402
from mainstay_train.state.heal import masters_digest  # noqa: E402
from mainstay_train.sums import digests  # noqa: E402

WARM_UP_ROUNDS = 3
BLOCKS = 5
"""The elements are cut into so many blocks, as a stage's are."""


def run_rank(
    pipe: Connection, store: str, rank: int, size: int, elements: int, rounds: int
) -> None:
    """One process: for each p, time both reductions, round by round."""
    torch.set_num_threads(1)
    group = make_group(f"bench-{size}", store, rank, size)
    group.connect()
    layout = StageLayout(
        blocks=tuple(BlockLayout.of(f"b{i}", {"w": (elements // BLOCKS,)}) for i in range(BLOCKS))
    )
    reducer = Reducer(layout)
    for num_partials in (1, 2, 4):
        table = [
            Supply(partial=Partial(lane=lane, first=t, last=t), index=lane)
            for lane in range(size)
            for t in range(lane * num_partials, (lane + 1) * num_partials)
        ]
        own = {s.partial: layout.allocate().normal_() for s in table if s.index == rank}
        plain = layout.allocate()
        times: list[tuple[float, float]] = []
        for number in range(rounds + WARM_UP_ROUNDS):
            group._group.barrier().wait()
            began = time.perf_counter()
            group._group.allreduce([plain]).wait()
            middle = time.perf_counter()
            group._group.barrier().wait()
            again = time.perf_counter()
            reducer.reduce(group, table, list(range(size)), rank, own)
            ended = time.perf_counter()
            if number >= WARM_UP_ROUNDS:
                times.append((middle - began, ended - again))
        pipe.send(times)


def compare(size: int, elements: int, rounds: int) -> None:
    """Print one line per number of partials for ``size`` ranks."""
    # Not from here: the store has a thread. The server has torch imported, and one thread.
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["mainstay_train.compute.engine"])
    store = TCPStore(ADDRESS, 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    pipes = []
    for rank in range(size):
        ours, theirs = fork.Pipe()
        args = (theirs, f"{ADDRESS}:{store.port}", rank, size, elements, rounds)
        fork.Process(target=run_rank, args=args, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for num_partials in (1, 2, 4):
        by_rank = [pipe.recv() for pipe in pipes]
        slowest = [tuple(map(max, zip(*each, strict=True))) for each in zip(*by_rank, strict=True)]
        plain_s = statistics.median(s[0] for s in slowest)
        ours_s = statistics.median(s[1] for s in slowest)
        ratio = statistics.median(s[1] / s[0] for s in slowest)
        aim = 1.3 * (num_partials + 1) / 2
        print(
            f"| {size} | {num_partials} | {plain_s * 1e3:.1f} | {ours_s * 1e3:.1f} "
            f"| {ours_s / plain_s:.2f} | {ratio:.2f} | {aim:.2f} |",
            flush=True,
        )


def overheads(rounds: int) -> None:
    """Print what a cell adds to a step of the demo (stage 0 of 2) beside compute and reduction."""
    torch.set_num_threads(1)
    digests.warm_up()
    config = JobConfig(
        job="bench",  # type: ignore[arg-type]
        name="bench",
        shape=JobShape(
            lanes=4, shards_per_lane=1, replicas=4, min_replicas=1, stages=2, steps=1, seed=1
        ),
        entrypoint="",
        workload=demo.MODEL,
    )
    model = workload.load("", demo.MODEL)
    engine = Engine.build(
        model,
        config,
        Loader(model.dataset),
        stage=0,
        num_stages=2,
        device="cpu",
        hook=lambda _: None,
    )
    engine.state.initialize(1)
    engine.reducer.reduced.normal_()
    blocks = engine.state.layout.block_views(engine.reducer.reduced)
    reduced = engine.reducer.reduced
    sums = GradientSums(engine.state.layout, engine.reducer.bounds)
    parts = {
        "norms": lambda: [part.norms.squares(reduced[part.within]) for part in sums.parts],
        "digest of the reduced gradient": engine.gradient_digest,
        "digest of the masters": lambda: masters_digest(engine.state),
        "apply (AdamW)": lambda: engine.state.apply(blocks, 1e-3, 1e-4),
    }
    print(f"\n{engine.state.layout.size} elements per stage; a partial's digest costs as the")
    print("gradient's.\n\n| part | median ms |\n| --- | --- |")
    for name, part in parts.items():
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            part()
            times.append(time.perf_counter() - began)
        print(f"| {name} | {statistics.median(times) * 1e3:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1_800_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--overheads", action="store_true", help="also a step's other parts")
    args = parser.parse_args()
    print("| ranks | p | all_reduce ms | canonical ms | ratio | median of ratios | aim |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in args.ranks:
        compare(size, args.elements, args.rounds)
    if args.overheads:
        overheads(args.rounds)


if __name__ == "__main__":
    main()
