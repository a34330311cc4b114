"""Measures what checks by re-execution add to a step.

    python benchmarks/dmr.py [--quick]

One stage in one process, without neighbours: what a step computes, reduces alone and applies. The
variants take turns within each round, and ratios are medians over the rounds.

- *none*: the interpreter has no scopes of checks, as before there were any
- *Off*: as a job without checks runs
- *Piggyback*: recomputes are compared with their forwards (with recompute on alone)
- *Full*: each kernel is executed twice, at once (the plan Naive)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.step_plan import Supply
from mainstay_core.wire.votes import Commit
from mainstay_train.checks.checker import UNCHECKED, Checks
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.exact import digests, numerics
from mainstay_train.model import workload as workloads

SEED, WARM_UP_ROUNDS = 1, 2
LARGE = {"dim": 256, "layers": 4, "heads": 4, "kvHeads": 2, "hidden": 768, "sequence": 1024}
SMALL = {"dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 160, "sequence": 256}
NONE, OFF, PIGGYBACK, FULL = "none", "Off", "Piggyback", "Full"


class Stage:
    """The only stage of a job, and its next step.

    Args:
        config: of the model.
        recompute: whether forwards run again in the backward.
        variant: one of none, Off, Piggyback and Full.
    """

    def __init__(self, config: dict[str, object], recompute: bool, variant: str) -> None:
        shape = JobShape(
            lanes=1,
            shards_per_lane=2,
            replicas=1,
            min_replicas=1,
            stages=1,
            steps=1_000_000,
            seed=SEED,
            micro_batches=1,
        )
        job = JobConfig(
            job="bench",  # type: ignore[arg-type]
            name="bench",
            shape=shape,
            entrypoint="",
            workload={},
            recompute=recompute,
        )
        model = workloads.load("", config)
        mode = Mode.OFF if variant == NONE else Mode(variant)
        self.checks = Checks(mode, tell=self._found)
        self._engine = Engine.build(
            model,
            job,
            Loader(model.dataset, ahead=False, twice=variant == FULL),
            stage=0,
            num_stages=1,
            device="cpu",
            hook=lambda _: None,
            checks=self.checks,
        )
        if variant == NONE:
            assert self._engine.interpreter is not None
            self._engine.interpreter._over = lambda _: nullcontext(UNCHECKED)  # type: ignore[method-assign,assignment]
        self._engine.state.initialize(SEED)
        self._number = 0
        self.num_findings = 0

    def _found(self, _: object) -> None:
        self.num_findings += 1

    def step(self) -> None:
        """Take a step."""
        engine, number = self._engine, self._number
        engine.drop_held()
        engine.compute((0, 1), number, None)
        table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
        engine.reduce(None, table, [0], 0)
        commit = Commit(step=number, norm=1, scale=1e-3, tokens=1, loss=1, data="0" * 32)
        engine.apply(commit, 1e-3)
        self._number += 1


def seconds(do: Callable[[], None]) -> float:
    """Return how long ``do`` takes."""
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


def measure(name: str, config: dict[str, object], recompute: bool, rounds: int) -> None:
    """Print one line."""
    names = [NONE, OFF, *([PIGGYBACK] if recompute else []), FULL]
    stages = {variant: Stage(config, recompute, variant) for variant in names}
    times: list[dict[str, float]] = []
    for turn in range(rounds + WARM_UP_ROUNDS):
        first = turn % len(names)
        order = names[first:] + names[:first]
        took = {variant: seconds(stages[variant].step) for variant in order}
        if turn >= WARM_UP_ROUNDS:
            times.append(took)
    ms = {variant: statistics.median(row[variant] for row in times) * 1e3 for variant in names}

    def ratio(over: str, under: str) -> str:
        if over not in names:
            return "-"
        return f"{statistics.median(row[over] / row[under] for row in times):.3f}"

    piggyback = f"{ms[PIGGYBACK]:.0f}" if recompute else "-"
    num_findings = sum(stage.num_findings for stage in stages.values())
    print(
        f"| {name} | {'on' if recompute else 'off'} | {ms[NONE]:.0f} | {ms[OFF]:.0f} "
        f"| {ratio(OFF, NONE)} | {piggyback} | {ratio(PIGGYBACK, OFF)} | {ms[FULL]:.0f} "
        f"| {ratio(FULL, OFF)} | {num_findings} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    args = parser.parse_args()
    numerics.setup("cpu")
    torch.set_num_threads(1)
    digests.warm_up()
    config, rounds = (SMALL, 3) if args.quick else (LARGE, args.rounds)
    print(
        "| model | recompute | none ms | Off ms | Off/none | Piggyback ms | Piggyback/Off "
        "| Full ms | Full/Off | findings |"
    )
    print("|" + " --- |" * 10)
    load = os.getloadavg()[0]
    print(f"load of the machine: {load:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    for name, dtype in (("Llama fp32", "float32"), ("Llama bf16", "bfloat16")):
        for recompute in (False, True):
            measure(name, {**config, "dtype": dtype}, recompute, rounds)


if __name__ == "__main__":
    main()
