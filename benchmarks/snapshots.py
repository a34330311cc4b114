"""Measures the step time with snapshots in the memory of pods, and the bytes that each step copies.

    python benchmarks/snapshots.py [--quick] [--rounds 12] [--steps 8] [--only waiting|llama]

One process trains one stage: compute, canonical reduction, log, vote, apply, digests. The stores of
two pods run in processes of their own, and all that goes to them takes the product's way. Rounds
take turns without snapshots (``none``), with a window over as many steps as there are units, 16 at
most (``sparse``), and with the whole state copied in every step (``dense``). Each round begins in a
new window. Ratios are of a round's time to that of the round without in the same turn, with the
95 % interval of their median (bootstrap).

``waiting`` is a model whose device is played by sleep, so that copies find a free CPU, as beside an
accelerator; ``llama`` is the demo's model, computed by the same cores that copy. CPU is that of the
whole round beyond the round without, by thread: what ``copy`` and ``digest`` take in the trainer,
and what both stores take to send and to receive.

``memory`` trains the demo's model over four windows of each kind, looks at each commit how full the
store of the trainer's pod is, and compares the most with the formulas: what is expected, also with
the lag that windows had, and the bound. It takes no times, so other work on the machine matters
only through that lag. What is wanted is at most 5 % from what is expected with that lag.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from support import demo
from support.segment_stage import SegmentStage, running_stores

from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import MAX_AUTO_WINDOW
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.snapshot_sizes import expected_store_bytes, store_bytes
from mainstay_core.snapshots.windows import plan_instalments
from mainstay_core.wire.segments import SegmentKind
from mainstay_train.exact import numerics
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.sums import digests

MIB = 2**20
MEMORY_BYTES = 2048 * MIB
MODES = ("none", "sparse", "dense")
WAITING = {"deviceMillisecondsPerToken": 8.0, "sequence": 64, "width": 512, "layers": 8}
RESAMPLES = 2000
NUM_WINDOWS = 4
"""Complete ones, for what stores hold."""


@dataclass(slots=True)
class Parts:
    """Seconds of CPU by part."""

    copy: float = 0.0
    digest: float = 0.0
    state_bytes: int = 0
    """Of states, as they were copied."""


@dataclass(slots=True)
class Mode:
    """The rounds of one mode."""

    length: int
    round_s: list[float] = field(default_factory=list)
    process_s: list[float] = field(default_factory=list)
    """CPU of the trainer's process."""
    copy_s: list[float] = field(default_factory=list)
    digest_s: list[float] = field(default_factory=list)
    stores_s: list[float] = field(default_factory=list)
    state_bytes: list[int] = field(default_factory=list)
    """Of states that a round copied."""
    num_complete: int = 0


@contextmanager
def measured(parts: Parts) -> Iterator[None]:
    """Measure the CPU that copies and their digests take, in whatever thread."""
    write, digest = UnitBytes.write, UnitBytes.digest

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args)
            finally:
                setattr(parts, part, getattr(parts, part) + time.thread_time() - began_s)

        return call

    def counted(own: UnitBytes, unit: int, kind: SegmentKind, memory: memoryview) -> None:
        if kind is SegmentKind.STATE:
            parts.state_bytes += memory.nbytes
        write(own, unit, kind, memory)

    UnitBytes.write = timed("copy", counted)  # type: ignore[method-assign]
    UnitBytes.digest = timed("digest", digest)  # type: ignore[method-assign]
    try:
        yield
    finally:
        UnitBytes.write, UnitBytes.digest = write, digest  # type: ignore[method-assign]


def run_round(
    stage: SegmentStage, mode: Mode, steps: int, parts: Parts, stores_cpu_s: Callable[[], float]
) -> None:
    """Train some steps in a mode, and note what they took."""
    before, stores_s = replace(parts), stores_cpu_s()
    complete = stage.num_complete
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        stage.step(mode.length)
    mode.round_s.append(time.perf_counter() - began_s)
    if mode.length:
        mode.num_complete += stage.num_complete - complete
        stage.stop_keeping()
    mode.process_s.append(time.process_time() - cpu_s)
    mode.copy_s.append(parts.copy - before.copy)
    mode.digest_s.append(parts.digest - before.digest)
    mode.state_bytes.append(parts.state_bytes - before.state_bytes)
    mode.stores_s.append(stores_cpu_s() - stores_s)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of some values, and its 95 % interval by the bootstrap."""
    rng = random.Random(1)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return statistics.median(values), low, high


def measure(entrypoint: str, config: dict[str, Any], turns: int, steps: int) -> None:
    """Train in turns, and print the table of one workload."""
    with running_stores(MEMORY_BYTES) as stores:
        stage = SegmentStage(entrypoint, config, stores)
        units = stage.units()
        length = min(MAX_AUTO_WINDOW, len(units.names))
        steps = max(steps, 2 * length)
        modes = {"none": Mode(0), "sparse": Mode(length), "dense": Mode(1)}
        parts = Parts()
        with measured(parts):
            for mode in modes.values():
                # Buffers, code and the stores' memory are there: a page is slow when it is new.
                for _ in range(max(2, 2 * mode.length)):
                    stage.step(mode.length)
                stage.stop_keeping()
            for _ in range(turns):
                for mode in modes.values():
                    run_round(stage, mode, steps, parts, stores.cpu_s)
        show(units, modes, steps)


def show(units: UnitBytes, modes: dict[str, Mode], steps: int) -> None:
    """Print the table of one workload."""
    print(
        f"{len(units.names)} units, {sum(p.full_bytes for p in units.prices) / MIB:.1f} MiB of "
        f"state; {len(modes['none'].round_s)} turns"
    )
    print(
        "| snapshots | window | windows complete | step ms | ratio (95 %) | MiB of states per step "
        "| of the formula | largest / mean instalment | MiB of gradients per step "
        "| CPU ms per step: trainer beyond none | copy | digest | both stores |"
    )
    print("| --- |" + " --- |" * 12)
    none = modes["none"]
    order = tuple(reversed(units.prices))
    logged = sum(units.size_bytes(n, SegmentKind.GRADIENT) for n in range(len(units.names))) / MIB
    for name, mode in modes.items():
        per_step = [s / steps for s in mode.round_s]
        ratios = [a / b for a, b in zip(mode.round_s, none.round_s, strict=True)]
        ratio, low, high = interval(ratios)
        row = [name, str(mode.length or "-"), str(mode.num_complete or "-")]
        row += [f"{1e3 * statistics.median(per_step):.1f}", f"{ratio:.3f} ({low:.3f}-{high:.3f})"]
        if mode.length:
            sizes = [i.size_bytes for i in plan_instalments(order, mode.length)]
            mean = statistics.mean(sizes)
            beyond = statistics.median(
                (a - b) / steps for a, b in zip(mode.process_s, none.process_s, strict=True)
            )
            cpu = [
                statistics.median(v) / steps for v in (mode.copy_s, mode.digest_s, mode.stores_s)
            ]
            copied = statistics.median(mode.state_bytes) / steps
            row += [f"{copied / MIB:.2f}", f"{copied / mean:.4f}"]
            row += [f"{max(sizes) / mean:.2f}", f"{logged:.2f}"]
            row += [f"{1e3 * value:.1f}" for value in (beyond, *cpu)]
        else:
            row += ["-"] * 8
        print("| " + " | ".join(row) + " |", flush=True)


def measure_memory(config: dict[str, Any]) -> None:
    """Print the most that a store holds of the demo's model, beside the formulas."""
    entry = demo.WORKLOAD["entrypoint"]
    sizes = built_in_sizes(entry, demo.MODEL, 1, 0, accumulates=False)
    shape = JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=1, steps=1, seed=0
    )
    print(
        "| snapshots | window | lags of windows | held at most, MiB | expected with the two "
        "largest lags in a row | held over that | expected | bound |"
    )
    print("| --- |" + " --- |" * 7)
    with running_stores(MEMORY_BYTES) as stores:
        stage = SegmentStage("", config, stores)
        most = min(MAX_AUTO_WINDOW, len(stage.units().names))
        held = [0]
        stage.look = lambda: held.append(stage.held_bytes())
        for name, length in (("sparse", most), ("dense", 1)):
            held, stage.lags = [0], []
            while len(stage.lags) < NUM_WINDOWS:
                stage.step(length)
            stage.stop_keeping()
            how: Any = {"window": length, "peers": 1}
            # Two windows that follow each other wait for their copies; so lags are halves.
            lags = max(a + b for a, b in itertools.pairwise(stage.lags))
            expected = expected_store_bytes([sizes], shape, **how)
            step_bytes = expected_store_bytes([sizes], shape, **how, lag=1) - expected
            with_lags = expected + step_bytes * lags // 2
            bound = store_bytes([sizes], shape, **how)
            row = [name, str(length), ", ".join(map(str, stage.lags))]
            row += [f"{max(held) / MIB:.1f}", f"{with_lags / MIB:.1f}"]
            row += [f"{max(held) / with_lags:.3f}"]
            row += [f"{expected / MIB:.1f}", f"{bound / MIB:.1f}"]
            print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--rounds", type=int, default=12, help="turns")
    parser.add_argument("--steps", type=int, default=8, help="steps of a round, at least a window")
    parser.add_argument("--only", choices=("waiting", "llama", "memory"))
    options = parser.parse_args()
    turns = 2 if options.quick else options.rounds
    torch.set_num_threads(1)
    numerics.setup("cpu")
    digests.warm_up()
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    if options.only in (None, "waiting"):
        entry = f"{Path(__file__).parent / 'emulated_accelerator.py'}:workload"
        print("\na device that waits:", end=" ")
        measure(entry, dict(WAITING), turns, options.steps)
    with tempfile.TemporaryDirectory(prefix="bench-") as corpus:
        (Path(corpus) / "text.txt").write_text(Path(__file__).read_text() * 40)
        config = demo.MODEL | {"data": {"path": corpus}}
        if options.only in (None, "llama"):
            print("\nthe demo's model:", end=" ")
            measure("", config, turns, options.steps)
        if options.only in (None, "memory"):
            print("\nmemory of the demo's model:")
            measure_memory(config)


if __name__ == "__main__":
    main()
