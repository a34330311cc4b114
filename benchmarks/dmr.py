"""Measures what checks by re-execution add to a step.

    python benchmarks/dmr.py [--quick]

One stage in one process, without neighbours: what a step computes, reduces alone and applies. The
variants take turns within each round, and ratios are medians over the rounds.

- *none*: the interpreter has no scopes of checks, as before there were any
- *Off*: as a job without checks runs
- *Piggyback*: recomputes are compared with their forwards (with recompute on alone)
- *Full*: each kernel is executed twice, at once (the plan Naive)
- *Dynamic*: the same, but checks wait for waits
- *Auto*: as the static planner plans it from the stage's first steps. With one stage nothing is
  waited for: recomputes are compared with forwards, and the rest is as with the plan Naive.

With ``--waits`` the stage is the first of two, and its neighbour is played: each gradient comes a
fixed time after the stage begins to wait for it, so that waiting is the given share of a step
without checks.
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
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.votes import Commit
from mainstay_train.base.device import Moment
from mainstay_train.checks.checker import UNCHECKED, Checks
from mainstay_train.comm.chains import Mark
from mainstay_train.comm.group import Message, Pending
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner, Told
from mainstay_train.exact import digests, numerics
from mainstay_train.model import workload as workloads

SEED, WARM_UP_ROUNDS = 1, 2
LARGE = {"dim": 256, "layers": 4, "heads": 4, "kvHeads": 2, "hidden": 768, "sequence": 1024}
SMALL = {"dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 160, "sequence": 256}
NONE, OFF, PIGGYBACK, FULL = "none", "Off", "Piggyback", "Full"
DYNAMIC, AUTO = "Dynamic", "Auto"
PROFILE_STEPS = 3


class PlayedLink:
    """The chain of the first of two stages, whose neighbour is played."""

    def __init__(self) -> None:
        self.pipeline = self
        self.delay_s = 0.0
        """From the begin of a wait to the message."""

    def send(self, message: Message) -> Pending:
        return Pending(self, message.tensor, None)

    def receive(self, message: Message) -> Pending:
        return Pending(self, message.tensor, message.tensor)

    def send_and_receive(self, sent: Message, received: Message) -> tuple[Pending, Pending]:
        return self.send(sent), self.receive(received)

    def is_completed(self) -> bool:
        return True

    def finish(self, pending: Pending) -> None:
        if pending.into is not None:
            time.sleep(self.delay_s)
            pending.into.fill_(1e-3)

    def mark(self, moment: Moment) -> Mark:
        return Mark(moment, True)

    def broke(self, error: RuntimeError) -> str:
        del error
        return ""


class Stage:
    """A stage of a job, and its next step.

    Args:
        config: of the model.
        recompute: whether forwards run again in the backward.
        variant: one of none, Off, Piggyback, Full, Dynamic and Auto.
        link: to the second stage; None: there is none.
        num_types: of a step.
    """

    def __init__(
        self,
        config: dict[str, object],
        recompute: bool,
        variant: str,
        link: PlayedLink | None = None,
        num_types: int = 2,
    ) -> None:
        self._link, self._types = link, tuple(range(num_types))
        num_stages = 1 if link is None else 2
        shape = JobShape(
            lanes=1,
            shards_per_lane=num_types,
            replicas=1,
            min_replicas=1,
            stages=num_stages,
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
        mode = {NONE: Mode.OFF, DYNAMIC: Mode.FULL, AUTO: Mode.FULL}.get(variant) or Mode(variant)
        waiting_bytes = 1 << 30 if variant in (DYNAMIC, AUTO) else 0
        plan = PlanName.AUTO if variant == AUTO else PlanName.DYNAMIC
        self.checks = Checks(mode, tell=self._found, waiting_bytes=waiting_bytes, plan=plan)
        self._engine = Engine.build(
            model,
            job,
            Loader(model.dataset, ahead=False, twice=mode is Mode.FULL),
            stage=0,
            num_stages=num_stages,
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
        self.shares = ""
        """How checks are planned, once they are."""
        if variant == AUTO:
            planned = PlannedStage(
                shape=shape,
                stage=0,
                fingerprint="bench",
                profile_steps=PROFILE_STEPS,
                memory_bytes=waiting_bytes,
            )
            self.checks.planner = RunPlanner(
                planned, self._engine, ordered=None, clock=time.perf_counter, tell=self._plan
            )

    def _plan(self, told: Told) -> None:
        self.shares = told.shares

    def _found(self, _: object) -> None:
        self.num_findings += 1

    def step(self) -> None:
        """Take a step."""
        engine, number = self._engine, self._number
        engine.drop_held()
        engine.compute(self._types, number, self._link)  # type: ignore[arg-type]
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
    names = [NONE, OFF, *([PIGGYBACK] if recompute else []), FULL, AUTO]
    stages = {variant: Stage(config, recompute, variant) for variant in names}
    for _ in range(PROFILE_STEPS + 1):
        stages[AUTO].step()
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
        f"| {ratio(FULL, OFF)} | {ms[AUTO]:.0f} | {ratio(AUTO, OFF)} | {ratio(FULL, AUTO)} "
        f"| {num_findings} |",
        flush=True,
    )


def measure_waits(config: dict[str, object], share: float, rounds: int) -> None:
    """Print one line: a stage that waits for its neighbour."""
    names, num_types, link = [OFF, PIGGYBACK, FULL, DYNAMIC, AUTO], 4, PlayedLink()
    stages = {name: Stage(config, True, name, link, num_types) for name in names}
    for stage in stages.values():
        stage.step()
    computes_s = statistics.median(seconds(stages[OFF].step) for _ in range(3))
    link.delay_s = computes_s * share / (1 - share) / num_types
    for _ in range(PROFILE_STEPS + 1):
        stages[AUTO].step()
    times: list[dict[str, float]] = []
    for turn in range(rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        times.append({name: seconds(stages[name].step) for name in order})
    ms = {name: statistics.median(row[name] for row in times) * 1e3 for name in names}
    ratios = [
        statistics.median(row[over] / row[under] for row in times)
        for over, under in (
            (PIGGYBACK, OFF),
            (FULL, OFF),
            (DYNAMIC, OFF),
            (AUTO, OFF),
            (FULL, DYNAMIC),
            (FULL, AUTO),
        )
    ]
    most = [stages[name].checks.waiting.most_bytes / 2**20 for name in (DYNAMIC, AUTO)]
    shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"| {share:.0%} | {' | '.join(f'{ms[name]:.0f}' for name in names)} "
        f"| {shown} | {most[0]:.0f} | {most[1]:.0f} | {stages[AUTO].shares} "
        f"| {sum(stage.num_findings for stage in stages.values())} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--waits", type=float, nargs="*", help="shares of a step, e.g. 0.3 0.55 0.75"
    )
    parser.add_argument("--quick", action="store_true", help="a small model, three rounds")
    args = parser.parse_args()
    numerics.setup("cpu")
    torch.set_num_threads(1)
    digests.warm_up()
    config, rounds = (SMALL, 3) if args.quick else (LARGE, args.rounds)
    load = os.getloadavg()[0]
    print(f"load of the machine: {load:.1f} on {os.cpu_count()} cores", file=sys.stderr)
    if args.waits:
        print(
            "| waiting | Off ms | Piggyback ms | Naive ms | Dynamic ms | Auto ms | Piggyback/Off "
            "| Naive/Off | Dynamic/Off | Auto/Off | Naive/Dynamic | Naive/Auto "
            "| most MiB, Dynamic | most MiB, Auto | plan of Auto | findings |"
        )
        print("|" + " --- |" * 16)
        for share in args.waits:
            measure_waits({**config, "dtype": "float32"}, share, rounds)
        return
    print(
        "| model | recompute | none ms | Off ms | Off/none | Piggyback ms | Piggyback/Off "
        "| Full ms | Full/Off | Auto ms | Auto/Off | Full/Auto | findings |"
    )
    print("|" + " --- |" * 13)
    for name, dtype in (("Llama fp32", "float32"), ("Llama bf16", "bfloat16")):
        for recompute in (False, True):
            measure(name, {**config, "dtype": dtype}, recompute, rounds)


if __name__ == "__main__":
    main()
