"""Measures what exactness costs, part by part.

    python benchmarks/exactness.py [--quick] [--ranks 2] [--micro-batches 1 8] [--rounds 30]
                                   [--turns 2]

Our step is compared with the fastest one of the same model. Forked processes train the demo's
Llama data-parallel over gloo. Each round runs one step of every
variant, one after the other in an order that changes, after a barrier. ``cpu`` is the processor
time of a rank's process in a step, mean over the ranks: other work on the machine hardly changes
it. ``wall`` is the time of the slowest rank. Medians; what each part adds is of ``cpu``.

The first three are plain torch: one module, autograd through all of it, the gradient in one flat
buffer and one all_reduce (or DDP, which overlaps it), torch's norm, fused AdamW. The others
replace that piece by piece with what a trainer of ours does; ``whole product`` is a local run of
the same job, with its supervisors, api and Redis on the same cores. It cannot take turns with the
others step by step, so it runs behind them, ``--turns`` times each. Its ``cpu`` is that of all its
processes in a step, by rank; its ``wall`` is from commit to commit. Its trainers give way to other
processes of the machine (docs/local.md), which the forked ones do not: where others are at work,
its ``wall`` says more of that than of the product.
"""

from __future__ import annotations

from mainstay_train.base import environment, heap

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import asyncio  # noqa: E402
import itertools  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from datetime import timedelta  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from support import census, demo  # noqa: E402
from support.groups import ADDRESS, make_group  # noqa: E402
from support.local_run import local_run, make_job  # noqa: E402
from support.torchrun_llama import Plain, initialize  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from mainstay_agent.gather import GatherServer  # noqa: E402
from mainstay_core.base import codec  # noqa: E402
from mainstay_core.base.shape import JobShape  # noqa: E402
from mainstay_core.job.config import JobConfig  # noqa: E402
from mainstay_core.rank.steps.step_plan import Supply  # noqa: E402
from mainstay_core.rank.votes import clip  # noqa: E402
from mainstay_core.wire.plan import Partial  # noqa: E402
from mainstay_core.wire.votes import Vote  # noqa: E402
from mainstay_train.comm.gather_client import GatherClient  # noqa: E402
from mainstay_train.comm.group import Group  # noqa: E402
from mainstay_train.compute.engine import Engine  # noqa: E402
from mainstay_train.compute.loader import Loader  # noqa: E402
from mainstay_train.exact import numerics  # noqa: E402
from mainstay_train.exact.draws import Address  # noqa: E402
from mainstay_train.exact.gradients import GradientSums  # noqa: E402
from mainstay_train.model import workload  # noqa: E402
from mainstay_train.state.heal import masters_digest  # noqa: E402
from mainstay_train.sums.readout import Readout  # noqa: E402

SEED = 7
LEARNING_RATE = 1e-4
WARM_UP_ROUNDS = 3
LOCAL_STEPS = 40
PLAIN = ("all_reduce, kernels of any order", "DDP, kernels of any order")
DETERMINISTIC = "all_reduce, deterministic kernels"
OURS = (
    "blocks, addressed samples",
    "canonical reduction",
    "norms in fp64 on the chunk grid",
    "digests of partials, gradient, masters",
    "vote",
)
COPY = "copy of the whole state (a checkpoint's part in a step)"
WHOLE = "whole product"
VARIANTS = (*PLAIN, DETERMINISTIC, *OURS, COPY)
Step = Callable[[int], None]
Times = list[tuple[float, float]]
"""(wall, cpu) seconds by round."""


class PlainStep:
    """A step of plain torch on one flat gradient."""

    def __init__(self, rank: int, size: int, micro_batches: int, group: Group, ddp: bool) -> None:
        self._rank, self._size, self._micro_batches, self._group = rank, size, micro_batches, group
        self._workload = workload.load("", demo.MODEL)
        self._model: nn.Module = Plain(self._workload)
        initialize(self._model)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, fused=True)
        self._ddp = ddp
        if ddp:
            self._model = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
            return
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters))
        views = self._flat.split([p.numel() for p in self._parameters])
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)

    def __call__(self, number: int) -> None:
        if self._ddp:
            self._optimizer.zero_grad(set_to_none=False)
        else:
            self._flat.zero_()
        for index in range(self._micro_batches):
            address = Address(SEED, number, self._rank, index)
            batch = self._workload.dataset.batch(address)
            last = index == self._micro_batches - 1
            if self._ddp:
                self._model.require_backward_grad_sync = last  # type: ignore[assignment]
            loss = self._model(batch.tokens, batch.targets, address)
            (loss / (self._micro_batches * self._size)).backward()
        if not self._ddp:
            self._group._group.allreduce([self._flat]).wait()
        nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        self._optimizer.step()


class OurStep:
    """A trainer's step without its processes; ``depth`` parts of OURS are in it."""

    def __init__(
        self, rank: int, size: int, micro_batches: int, group: Group, gather: GatherClient
    ) -> None:
        shape = JobShape(
            lanes=size,
            shards_per_lane=1,
            replicas=size,
            min_replicas=1,
            stages=1,
            steps=1,
            seed=SEED,
            micro_batches=micro_batches,
        )
        config = JobConfig(
            job="bench",  # type: ignore[arg-type]
            name="bench",
            shape=shape,
            entrypoint="",
            workload=demo.MODEL,
        )
        self._rank, self._size, self._group, self._gather = rank, size, group, gather
        model = workload.load("", demo.MODEL)
        self._engine = Engine.build(
            model,
            config,
            Loader(model.dataset),
            stage=0,
            num_stages=1,
            device="cpu",
            hook=_no_hook,
        )
        self._engine.state.initialize(SEED)
        self._table = [
            Supply(partial=Partial(lane=lane, first=lane, last=lane), index=lane)
            for lane in range(size)
        ]
        self._masters = ""
        self._sums = GradientSums(self._engine.state.layout, self._engine.reducer.bounds)

    def __call__(self, number: int, depth: int, copy: bool = False) -> None:
        engine, part = self._engine, OURS[:depth]
        engine.drop_held()
        engine.compute((self._rank,), number, None)
        own = engine.store.partials[self._table[self._rank].partial]
        gradient = ""
        if OURS[3] in part:
            norms, gradient = self._reduce_digested(own)
        else:
            if OURS[1] in part:
                self._reduce()
                own = engine.reducer.reduced
            else:
                self._group._group.allreduce([own]).wait()
            norms = self._norms(own, OURS[2] in part)
        if OURS[4] in part:
            norms = self._vote(number, norms, gradient)
        tokens = self._size * demo.MODEL["sequence"]
        _, scale = clip(norms, tokens, 1.0)
        reduced = engine.reducer.reduced if OURS[1] in part else own
        blocks = engine.state.layout.block_views(reduced)
        engine.state.apply(blocks, scale, LEARNING_RATE)
        if OURS[3] in part:
            self._masters = masters_digest(engine.state)
        if copy:
            for flat in engine.state.flats():
                flat.tensor.clone()

    def _reduce(self, **during: Any) -> None:
        engine = self._engine
        partials, cells = engine.store.partials, list(range(self._size))
        engine.reducer.reduce(self._group, self._table, cells, self._rank, partials, **during)

    def _reduce_digested(self, own: torch.Tensor) -> tuple[list[float], str]:
        """The norms and the digest, each part's as soon as it is complete."""
        sums, reducer = self._sums, self._engine.reducer
        sums.begin()
        self._reduce(
            meanwhile=lambda: sums.digest(own).hex(),
            placed=lambda start: sums.take(reducer.reduced, start),
        )
        readout = Readout()
        read = sums.read(readout)
        readout.fetch()
        return [*read.norms_sq()], read.digest().hex()

    def _norms(self, flat: torch.Tensor, on_grid: bool) -> list[float]:
        if not on_grid:
            blocks = self._engine.state.layout.block_views(flat)
            return [float(torch.linalg.vector_norm(block)) ** 2 for block in blocks]
        parts = (part.norms.squares(flat[part.within]) for part in self._sums.parts)
        return [square for squares in parts for square in squares.tolist()]

    def _vote(self, number: int, norms: list[float], gradient: str) -> list[float]:
        result = self._engine.type_results[self._rank]
        loss: Any = result.loss_sum
        vote = Vote(
            step=number,
            attempt=0,
            ok=True,
            norms_sq=tuple(norms),
            gradient=gradient,
            state=self._masters,
            stats=(result.told(self._rank, lambda: loss, None),),
            newest_plan=1,
            newest_nonce="n",
        )
        key = f"vote/{number}"
        self._gather.post(key, codec.dumps(vote).encode())
        votes = [codec.loads(Vote, body) for body in self._gather.wait(key)]
        return [*votes[0].norms_sq]


def _no_hook(_: object) -> None:
    return None


def run_rank(
    pipe: Connection, store: str, gather: str, rank: int, size: int, micro: int, rounds: int
) -> None:
    """One process: every round a step of each variant; sends seconds by round and variant."""
    numerics.setup("cpu")
    heap.keep_freed()  # as a trainer does, for all variants
    host, _, port = store.rpartition(":")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo",
        store=TCPStore(host, int(port), None, False, wait_for_workers=False),
        rank=rank,
        world_size=size,
    )
    group = make_group("bench", store, rank, size)
    group.connect()
    client = GatherClient(gather, f"q{micro}-n", rank, size, f"life-{rank}", ADDRESS)
    plain = PlainStep(rank, size, micro, group, ddp=False)
    ddp = PlainStep(rank, size, micro, group, ddp=True)
    ours = OurStep(rank, size, micro, group, client)
    numbers = itertools.count()
    steps: dict[str, Step] = {PLAIN[0]: plain, PLAIN[1]: ddp, DETERMINISTIC: plain}
    for depth, name in enumerate(OURS, start=1):
        steps[name] = lambda number, depth=depth: ours(number, depth)  # type: ignore[misc]
    steps[COPY] = lambda number: ours(number, len(OURS), copy=True)
    times = []
    for turn in range(rounds + WARM_UP_ROUNDS):
        row = {}
        for place in range(len(VARIANTS)):
            name = VARIANTS[(place + turn) % len(VARIANTS)]
            torch.use_deterministic_algorithms(name not in PLAIN)
            number = next(numbers)
            group._group.barrier().wait()
            began, used = time.perf_counter(), time.process_time()
            steps[name](number)
            row[name] = (time.perf_counter() - began, time.process_time() - used)
        if turn >= WARM_UP_ROUNDS:
            times.append(row)
    pipe.send(times)
    pipe.recv()
    # As a trainer ends. A group that is let go is destroyed in a thread of its own, and one that
    # comes back from that while the interpreter ends would abort the process.
    os._exit(0)


def serve_gather() -> str:
    """Serve a gather in a thread of this process, until it ends; return its address."""
    ready: list[str] = []
    there = threading.Event()

    async def serve() -> None:
        ready.append(await GatherServer().start(ADDRESS))
        there.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    there.wait()
    return ready[0]


def compare(size: int, micro: int, rounds: int) -> dict[str, Times]:
    """Return (wall, cpu) seconds of each variant, by round."""
    spawn = multiprocessing.get_context("spawn")
    store = TCPStore(ADDRESS, 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    gather = serve_gather()
    pipes = []
    for rank in range(size):
        ours, theirs = spawn.Pipe()
        args = (theirs, f"{ADDRESS}:{store.port}", gather, rank, size, micro, rounds)
        spawn.Process(target=run_rank, args=args, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    by_rank: list[list[dict[str, tuple[float, float]]]] = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send("over")
    return {
        name: [
            (max(row[name][0] for row in rows), statistics.mean(row[name][1] for row in rows))
            for rows in zip(*by_rank, strict=True)
        ]
        for name in VARIANTS
    }


@dataclass(slots=True, kw_only=True)
class Whole:
    """Holds what a local run of the same job took."""

    walls_s: list[float] = field(default_factory=list)
    """From commit to commit."""
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    """By kind of process, of a mean step: one number for each turn."""

    def rank_cpu_s(self, size: int) -> float:
        """Return the processor time of a step by rank."""
        return sum(map(statistics.median, self.cpu_s.values())) / size


def measure_whole(whole: Whole, size: int, micro: int, num_steps: int) -> None:
    """Add a local run of the same job."""
    job = make_job(
        "exact",
        training={"steps": 1_000_000, "seed": SEED, "lanes": size, "shardsPerLane": 1},
        pipeline={"microBatches": micro},
        workload=demo.WORKLOAD,
    )
    # Whoever asks often how far the run is has a share of the cores that the run is measured on.
    with local_run(job, poll_s=5.0) as run:
        members = run.members(size)
        run.go_on(5)
        pids = census.roles(run.process.pid, members)
        first, began_s = run.newest(), time.monotonic()
        before = {role: census.cpu_s(pid) for role, pid in pids.items()}
        run.go_on(num_steps)
        took_s = time.monotonic() - began_s
        after = {role: census.cpu_s(pid) for role, pid in pids.items()}
        last = run.newest()
        ends = [run.steps[n].committed_at_s for n in range(first, last + 1)]
    walls_s = [after - before for before, after in itertools.pairwise(ends)]
    whole.walls_s += walls_s
    # A look begins and ends within a step: the steps that it saw are no whole number.
    num_seen = took_s / statistics.mean(walls_s)
    used: dict[str, float] = {}
    for role in pids:
        kind, _, rank = role.rpartition(" ")
        kind = kind if "." in rank else role  # without the rank, as in "trainer r0.s0"
        used[kind] = used.get(kind, 0.0) + (after[role] - before[role]) / num_seen
    for kind, seconds in used.items():
        whole.cpu_s.setdefault(kind, []).append(seconds)


def show(size: int, micro: int, times: dict[str, Times], whole: Whole) -> None:
    """Print one table, and what each kind of process of the whole product takes."""
    print(f"\n{size} ranks, {micro} x {demo.MODEL['sequence']} tokens per rank and step\n")
    print("| step | cpu ms | adds ms | of the fastest | wall ms | of the fastest |")
    print("| --- |" + " --- |" * 5)
    wall = {name: statistics.median(t[0] for t in rows) for name, rows in times.items()}
    cpu = {name: statistics.median(t[1] for t in rows) for name, rows in times.items()}
    least_wall, least_cpu = (min(values[name] for name in PLAIN) for values in (wall, cpu))
    before = least_cpu
    for name in VARIANTS:
        added = "" if name in PLAIN else f"{(cpu[name] - before) * 1e3:+.1f}"
        label = name if name in (*PLAIN, DETERMINISTIC) else f"+ {name}"
        print(
            f"| {label} | {cpu[name] * 1e3:.1f} | {added} | {cpu[name] / least_cpu:.2f} "
            f"| {wall[name] * 1e3:.1f} | {wall[name] / least_wall:.2f} |"
        )
        before = cpu[name] if name not in PLAIN else before
    middle, used = statistics.median(whole.walls_s), whole.rank_cpu_s(size)
    print(
        f"| {WHOLE} | {used * 1e3:.1f} | {(used - cpu[OURS[-1]]) * 1e3:+.1f} from the vote on "
        f"| {used / least_cpu:.2f} | {middle * 1e3:.1f} | {middle / least_wall:.2f} |"
    )
    print("\n| processes of the whole product | cpu ms of a step, all ranks together |")
    print("| --- | --- |")
    for kind, seconds in sorted(whole.cpu_s.items()):
        print(f"| {kind} | {statistics.median(seconds) * 1e3:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds of one size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", help="per step (1 8)")
    parser.add_argument("--rounds", type=int, help="steps of each variant (30; quick: 6)")
    parser.add_argument("--turns", type=int, default=2, help="over which these are divided (2)")
    args = parser.parse_args()
    rounds = args.rounds or (6 if args.quick else 30)
    sizes: Sequence[int] = args.micro_batches or ([1] if args.quick else [1, 8])
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    for micro in sizes:
        times: dict[str, Times] = {name: [] for name in VARIANTS}
        whole = Whole()
        for _ in range(args.turns):
            in_turn = max(1, rounds // args.turns)
            for name, rows in compare(args.ranks, micro, in_turn).items():
                times[name] += rows
            measure_whole(whole, args.ranks, micro, min(LOCAL_STEPS, 2 * in_turn))
        show(args.ranks, micro, times, whole)
    print(f"\nload average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
