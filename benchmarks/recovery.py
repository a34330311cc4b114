"""Measures the time from kill -9 to the next committed step, beside torchrun's elastic restart.

    python benchmarks/recovery.py [--quick] [--kills 20] [--only ours|wide|mask|torchrun|rebuild]

Processes of a local run are killed from outside, at a known time and anywhere in a step. Per kill:

* ``beyond``: from the kill to the first commit without the dead, less a median step;
* ``stall``: how much longer than a median interval the interval between two commits is in
  which the kill lies: what the job itself waits;
* the five times of design 13.9, detect from the real time of the kill;
* ``join``: the same stall of the step in which the restarted or replaced rank is healed;
* ``all``: what all steps from the kill to ten steps after the join took beyond a median step
  each: a fork of the trainer on the same cores included.

``--only wide`` kills pods of a job of 64 ranks, 16 lanes of 4 stages with a pod for each rank. In
the same run 64 processes of plain torch make four groups of 16 anew.

``--only mask`` kills trainers whose stage has other copies, in jobs without snapshots and with them
by turns: such a loss reads no segment, so it must not take longer for them.

In the same run: torchrun with our model as a plain module in a DDP loop and a checkpoint per
step (a killed worker; one agent for three workers, and an agent for each), and a bare rebuild of
a gloo group, which is the floor. Medians, 90th percentiles in parentheses, in milliseconds.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

from support import rebuild, torchrun, wide_rebuild  # noqa: E402
from support.intervals import shown  # noqa: E402
from support.local_run import (  # noqa: E402
    POLL_S,
    TINY_LLAMA,
    LocalRun,
    kill_pod,
    kill_trainer,
    local_run,
    make_job,
)
from support.spread import median_and_p90  # noqa: E402

from mainstay_core.wire.recoveries import STAGES  # noqa: E402

SEED = 1
SETTLE_STEPS = 25
"""Steps between a join and the next kill; their median is the normal step."""
AFTER_JOIN = 10
REBUILD_ELEMENTS = 50_000
"""About the model's parameters."""
LANES, STAGES_OF_WIDE = 16, 4
"""Of the job of 64 ranks."""


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds, one entry per kill."""

    def add(self, others: Times) -> None:
        """Count the kills of another run as well."""
        for mine, more in zip(self._lists(), others._lists(), strict=True):
            mine.extend(more)
        self.lost_steps += others.lost_steps

    def _lists(self) -> list[list[float]]:
        own = (self.step, self.beyond, self.stall, self.join, self.all)
        return [*own, *self.parts.values()]

    step: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    join: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in STAGES})
    lost_steps: int = 0


def measure(
    name: str,
    lanes: int,
    stages: int,
    kill: Callable[[Mapping[str, Any]], float],
    kills: int,
    poll_s: float = POLL_S,
    **spec: Any,
) -> Times:
    """Kill ``kills`` times, one after the other, each in a whole job.

    Raises:
        RuntimeError: the run failed or hangs.
    """
    job = make_job(
        name,
        training={"steps": 1_000_000, "seed": 7, "lanes": lanes, "shardsPerLane": 1},
        parallelism={"stages": stages},
        **spec,
    )
    times, draw = Times(), random.Random(SEED)
    with local_run(job, poll_s=poll_s) as run:
        for _ in range(kills):
            run.members(lanes * stages)
            run.go_on(SETTLE_STEPS + draw.randrange(5))
            victim = draw.choice(run.members(lanes * stages))
            known = {r["quorum"]["id"] for r in run.recoveries()}
            at_s = kill(victim)
            run.until(partial(_rejoined, run, known), "the join after a kill")
            run.members(lanes * stages)
            run.go_on(AFTER_JOIN + 1)
            _evaluate(run, at_s, known, times)
    return times


def _rejoined(run: LocalRun, known: set[int]) -> bool:
    new = [r for r in run.recoveries() if r["quorum"]["id"] not in known]
    return any(r["method"] == "join" for r in new) and all(r["done"] for r in new)


def _evaluate(run: LocalRun, at_s: float, known: set[int], times: Times) -> None:
    new = [r for r in run.recoveries() if r["quorum"]["id"] not in known]
    loss, join = new[0], next(r for r in new if r["method"] == "join")
    steps = run.steps
    before = [s for s in steps.values() if s.committed_at_s < at_s]
    last = max(s.step for s in before)
    step_s = statistics.median(_interval(run, n) for n in range(last - SETTLE_STEPS + 5, last))
    first = min(s.step for s in steps.values() if s.quorum >= loss["quorum"]["id"])
    joined = min(s.step for s in steps.values() if s.quorum >= join["quorum"]["id"])
    times.step.append(step_s)
    times.beyond.append(steps[first].committed_at_s - at_s - step_s)
    times.stall.append(_interval(run, first) - step_s)
    times.join.append(_interval(run, joined) - step_s)
    over = range(last + 1, joined + AFTER_JOIN + 1)
    times.all.append(sum(_interval(run, n) - step_s for n in over))
    times.lost_steps += loss["lost_steps"]
    first_fact_s = loss["started_at_s"] + loss["detect_s"]
    times.parts["detect"].append(first_fact_s - at_s)
    for part in STAGES[1:]:
        times.parts[part].append(loss[f"{part}_s"])


def _interval(run: LocalRun, step: int) -> float:
    return run.steps[step].committed_at_s - run.steps[step - 1].committed_at_s


def show(label: str, times: Times) -> None:
    """Print one line of the table."""
    parts = " | ".join(median_and_p90(times.parts[part]) for part in STAGES)
    step, beyond = median_and_p90(times.step), median_and_p90(times.beyond)
    stall, join = median_and_p90(times.stall), median_and_p90(times.join)
    print(
        f"| {label} | {len(times.beyond)} | {step} | **{beyond}** | {stall} | {parts} | {join} "
        f"| {median_and_p90(times.all)} | {times.lost_steps} |",
        flush=True,
    )


def ours(kills: int, quick: bool) -> dict[str, list[float]]:
    """Print our rows; return what the ratios need."""
    print("| killed | kills | step | beyond | stall |", " | ".join(STAGES), "| join | all | lost |")
    print("| --- |" + " --- |" * (6 + len(STAGES)), flush=True)
    beyond = {}
    rows: list[tuple[str, int, int, Callable[[Mapping[str, Any]], float]]] = [
        ("trainer, 3 x 1", 3, 1, kill_trainer),
        ("pod, 3 x 1", 3, 1, kill_pod),
    ]
    if not quick:
        rows += [
            ("trainer, 2 x 2", 2, 2, kill_trainer),
            ("pod, 2 x 2", 2, 2, kill_pod),
            ("trainer, 4 x 2", 4, 2, kill_trainer),
            ("pod, 4 x 2", 4, 2, kill_pod),
        ]
    for label, lanes, stages, kill in rows:
        times = measure(label.partition(",")[0], lanes, stages, kill, kills)
        show(label, times)
        beyond[label] = times.beyond
    return beyond


def wide(kills: int) -> None:
    """Print the row of a job of 64 ranks, with the worst of its kills."""
    print("| killed | kills | step | beyond | stall |", " | ".join(STAGES), "| join | all | lost |")
    print("| --- |" + " --- |" * (6 + len(STAGES)), flush=True)
    times = measure("wide", LANES, STAGES_OF_WIDE, kill_pod, kills, poll_s=2.0)
    show(f"pod, {LANES} x {STAGES_OF_WIDE}", times)
    bare = wide_rebuild.measure(kills, LANES, STAGES_OF_WIDE, REBUILD_ELEMENTS)
    steps = [b / s for b, s in zip(times.beyond, times.step, strict=True)]
    print(
        f"\nnext commit beyond a step, in median steps: median {statistics.median(steps):.1f}, "
        f"at worst {max(steps):.1f}"
    )
    middle, floor = statistics.median(times.beyond), statistics.median(bare)
    allowed = 1.5 * floor + statistics.median(times.step)
    print(
        f"bare rebuild of {STAGES_OF_WIDE} groups of {LANES}: {median_and_p90(bare)} ms; "
        f"beyond is {middle / allowed:.2f} of 1.5 rebuilds and a step"
    )


def mask(rounds: int, kills: int) -> None:
    """Print the rows of losses that are masked, without snapshots and with them."""
    labels, ratios = ("without snapshots", "with snapshots"), list[float]()
    found = {label: Times() for label in labels}
    for number in range(rounds):
        of_round = {}
        for label in labels if number % 2 == 0 else labels[::-1]:
            enabled = label == "with snapshots"
            snapshots: dict[str, Any] = {"snapshots": {"enabled": True}} if enabled else {}
            times = measure("mask", 3, 1, kill_trainer, kills, **snapshots)
            of_round[label] = statistics.median(times.beyond)
            found[label].add(times)
            beyond = median_and_p90(times.beyond)
            print(f"round {number}, {label}: beyond {beyond} ms", flush=True)
        ratios.append(of_round["with snapshots"] / of_round["without snapshots"])
    print("| killed | kills | step | beyond | stall |", " | ".join(STAGES), "| join | all | lost |")
    print("| --- |" + " --- |" * (6 + len(STAGES)), flush=True)
    for label, times in found.items():
        show(f"trainer, 3 x 1, {label}", times)
    without, with_them = (statistics.median(found[label].beyond) for label in labels)
    print(
        f"\nbeyond a step with snapshots over without: {with_them / without:.2f} of all kills' "
        f"medians; of each round's {', '.join(f'{r:.2f}' for r in ratios)}, "
        f"mean {shown(ratios)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few kills, two rows, one torchrun")
    parser.add_argument("--kills", type=int, help="per row (20; quick: 4)")
    parser.add_argument("--restarts", type=int, help="of torchrun, per row (4; quick: 1)")
    parser.add_argument("--only", choices=("ours", "wide", "mask", "torchrun", "rebuild"))
    parser.add_argument("--rounds", type=int, default=4, help="of --only mask")
    args = parser.parse_args()
    kills = args.kills or (4 if args.quick else 20)
    restarts = args.restarts or (1 if args.quick else 4)
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    compared: dict[str, list[float]] = {}
    if args.only == "wide":
        wide(args.kills or 8)
        return
    if args.only == "mask":
        mask(args.rounds, args.kills or 5)
        print(f"load average after: {os.getloadavg()[0]:.1f}")
        return
    if args.only in (None, "rebuild"):
        compared["bare rebuild of a gloo group"] = rebuild.measure(kills, REBUILD_ELEMENTS)
    found = ours(kills, args.quick) if args.only in (None, "ours") else {}
    compared |= {f"Mainstay, {label}": seconds for label, seconds in found.items()}
    if args.only in (None, "torchrun"):
        for agents in (1,) if args.quick else (1, 3):
            results = torchrun.measure(restarts, agents, TINY_LLAMA)
            label = f"torchrun, {agents} agent{'s' if agents > 1 else ''}"
            compared[label] = [r.after_s - r.step_s for r in results]
    print("\n| what | times | seconds beyond a step | of ours |\n| --- | --- | --- | --- |")
    base = statistics.median(next(iter(found.values()))) if found else float("nan")
    for label, seconds in compared.items():
        middle = statistics.median(seconds)
        print(
            f"| {label} | {len(seconds)} | {middle:.3f} "
            f"({min(seconds):.3f} to {max(seconds):.3f}) | {middle / base:.1f} |",
            flush=True,
        )
    print(f"\nload average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
