"""Measures the step time with durable checkpoints, written in the step and in the background.

    python benchmarks/checkpoints.py [--quick] [--rounds 6] [--every 10] [--directory DIR]

One process trains one stage of the demo's model: compute, canonical reduction, apply, digests.
Rounds of ``--every`` steps take turns without a checkpoint, with one that the step waits for
(``synchronous``), and with one that a thread writes (``asynchronous``), as trainers do; each round
begins when nothing is written any more. Ratios are of a round's time to that of the round without
in the same turn; medians over the turns. ``copy`` is what the boundary itself takes, ``write``
from there to the renamed directory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from support import demo
from support.lone_rank import JOB, QUORUM, lone_plan, lone_shape

from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.events import RenameCheckpoint, WriteCheckpoint
from mainstay_core.rank.steps.step_plan import plan_step
from mainstay_core.wire.votes import Commit
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.exact import numerics
from mainstay_train.model import workload
from mainstay_train.state.controller import Checkpointing
from mainstay_train.sums import digests

SLOT = Slot(pod=PodUid("pod"), index=0)
MODES = ("none", "synchronous", "asynchronous")


class Stage:
    """One stage that trains, and its checkpoints."""

    def __init__(self, directory: Path, corpus: Path) -> None:
        config = JobConfig(
            job=JOB,
            name="bench",
            shape=lone_shape(checkpoint_every_steps=1),
            entrypoint="",
            workload=demo.MODEL | {"data": {"path": str(corpus)}},
            device="cpu",
            checkpoint_dir=str(directory),
        )
        loaded = workload.load("", config.workload)
        loader = Loader(loaded.dataset)
        training = BlockTraining(workload=loaded, config=config, device="cpu", loader=loader)
        self.engine = training.build_engine(0, 1, 0, lambda _: None)
        self.engine.state.initialize(0)
        self.checkpoints = Checkpointing(config, lambda _, why: print(f"  {why}") if why else None)
        self.checkpoints.start({})
        self.plan, self.version, self.masters = lone_plan(SLOT), 0, ""
        self.table = plan_step(self.plan, 1).table[0]

    def step(self) -> str:
        self.engine.compute((0,), self.version, None)
        self.engine.reduce(None, self.table, [0], 0)
        self.engine.ballot(None, self.table, 0, SLOT, self.masters)
        self.checkpoints.wait_copied()
        self.masters = masters = self.engine.apply(self.commit(), 1e-4)
        self.engine.drop_held()
        self.version += 1
        return masters

    def commit(self) -> Commit:
        return Commit(step=self.version, norm=1, scale=1e-3, tokens=1, loss=1, data="0" * 32)

    def save(self, masters: str) -> float:
        """Copy and begin to write; returns what the boundary took."""
        began_s = time.perf_counter()
        write = WriteCheckpoint(self.version, self.commit(), "")
        self.checkpoints.write(write, self.engine, self.plan, 0, masters, lambda _: None)
        took_s = time.perf_counter() - began_s
        rename = RenameCheckpoint(self.version, QUORUM.nonce)
        self.checkpoints.complete(rename, self.plan, lambda _: None)
        return took_s


def run_round(stage: Stage, mode: str, steps: int) -> tuple[float, float, float]:
    """(seconds of the round, of the copy, from the copy to the renamed directory)."""
    began_s = time.perf_counter()
    copy_s = write_s = 0.0
    masters = stage.step()
    if mode != "none":
        copy_s = stage.save(masters)
        if mode == "synchronous":
            saving_s = time.perf_counter()
            stage.checkpoints.wait_idle()
            write_s = time.perf_counter() - saving_s
    for _ in range(steps - 1):
        stage.step()
    round_s = time.perf_counter() - began_s
    stage.checkpoints.wait_idle()
    return round_s, copy_s, write_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two turns of five steps")
    parser.add_argument("--rounds", type=int, default=6, help="turns")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one")
    options = parser.parse_args()
    turns, every = (2, 5) if options.quick else (options.rounds, options.every)
    torch.set_num_threads(1)
    numerics.setup("cpu")
    digests.warm_up()
    scratch = Path(tempfile.mkdtemp(prefix="mainstay-bench-", dir=options.directory))
    try:
        (scratch / "corpus").mkdir()
        (scratch / "corpus" / "text.txt").write_text(Path(__file__).read_text() * 40)
        stage = Stage(scratch / "checkpoints", scratch / "corpus")
        for mode in MODES:
            run_round(stage, mode, 2)  # buffers, code and caches are there
        rounds: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
        for _ in range(turns):
            for mode in MODES:
                rounds[mode].append(run_round(stage, mode, every))
        show(stage, rounds, every)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def show(stage: Stage, rounds: dict[str, list[tuple[float, float, float]]], every: int) -> None:
    tensors = stage.engine.state.state_tensors()
    size_mib = sum(t.tensor.numel() * t.tensor.element_size() for t in tensors) / 2**20
    num = len(rounds["none"])
    print(f"{size_mib:.0f} MiB of state, a checkpoint every {every} steps, {num} turns")
    print(f"{'checkpoints':<14} {'step ms':>8} {'ratio':>6} {'copy ms':>8} {'write ms':>9}")
    for mode in MODES:
        step_s = statistics.median(r[0] for r in rounds[mode]) / every
        ratio = statistics.median(
            r[0] / plain[0] for r, plain in zip(rounds[mode], rounds["none"], strict=True)
        )
        copy_s, write_s = (statistics.median(r[i] for r in rounds[mode]) for i in (1, 2))
        print(
            f"{mode:<14} {1e3 * step_s:>8.1f} {ratio:>6.3f} {1e3 * copy_s:>8.1f} "
            f"{1e3 * write_s:>9.1f}"
        )


if __name__ == "__main__":
    main()
