"""Measures how long the planners take: what a failure costs the control plane.

    python benchmarks/planner.py [--quick]

A row of reordering plays histories of failures (and rejoins where it says so)
and times every plan: argument reading, all passes and the reason. The aims are
design numbers: one failure at N = 1000 and redundancy 9 to 26 within 20 ms at
the 99th percentile, N = 10,000 within 250 ms. ``p99/aim`` below 1 holds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mainstay_core.base.errors import InfeasiblePlanError
from mainstay_core.planning.assignment import plan_reordering
from mainstay_core.planning.chaining import Cell, plan_chaining
from mainstay_core.planning.placement import plan_placement

AIM_MS = {1000: 20.0, 10_000: 250.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A history of single failures; a step rejoins a lost lane with ``rejoin`` probability."""

    lanes: int
    shards_per_lane: int = 1
    redundancy: int
    rejoin: float = 0.0
    strict_hosts: bool = False
    num_plans: int


SCENARIOS = (
    *(Scenario(lanes=1000, redundancy=r, num_plans=700) for r in (9, 11, 20, 26)),
    *(Scenario(lanes=1000, redundancy=r, strict_hosts=True, num_plans=500) for r in (9, 26)),
    Scenario(lanes=1000, redundancy=11, rejoin=0.45, num_plans=700),
    Scenario(lanes=64, shards_per_lane=16, redundancy=7, rejoin=0.4, num_plans=500),
    Scenario(lanes=10_000, redundancy=14, num_plans=200),
    Scenario(lanes=10_000, redundancy=28, num_plans=200),
    Scenario(lanes=10_000, redundancy=28, strict_hosts=True, num_plans=100),
)


def play(scenario: Scenario, seed: int) -> Iterator[Callable[[], None]]:
    """Yield one plan at a time, each to be timed; the history goes on from its result."""
    rng = random.Random(seed)
    lanes = scenario.lanes
    hosts = plan_placement(lanes, scenario.shards_per_lane, scenario.redundancy).hosts
    living = set(range(lanes))
    suppliers: Sequence[int] | None = None

    def plan() -> None:
        nonlocal suppliers
        suppliers = plan_reordering(
            hosts,
            living,
            suppliers,
            scenario.shards_per_lane,
            lanes,
            strict_hosts=scenario.strict_hosts,
        ).suppliers

    while True:
        lost = sorted(set(range(lanes)) - living)
        if lost and (len(lost) > 0.6 * lanes or rng.random() < scenario.rejoin):
            living.add(rng.choice(lost))
        else:
            living.remove(rng.choice(sorted(living)))
        yield plan


def time_reordering(scenario: Scenario, num_plans: int) -> list[float]:
    """Milliseconds of each plan; a wipe-out ends a history and starts the next."""
    times_ms: list[float] = []
    seed = 0
    while len(times_ms) < num_plans:
        for plan in play(scenario, seed):
            start = time.perf_counter()
            try:
                plan()
            except InfeasiblePlanError:
                break
            times_ms.append((time.perf_counter() - start) * 1e3)
            if len(times_ms) == num_plans:
                break
        seed += 1
    return times_ms


def time_chaining(lanes: int, stages: int, num_lost: int, num_plans: int) -> list[float]:
    """Milliseconds to chain again after ``num_lost`` random cells of all are lost."""
    rng = random.Random(0)
    cells = [
        [Cell(cell_id=f"{r:05}.{s:03}", domain=f"rack{r // 8}", replica=r) for r in range(lanes)]
        for s in range(stages)
    ]
    previous = {r: tuple(stage[r].cell_id for stage in cells) for r in range(lanes)}
    names = [cell.cell_id for stage in cells for cell in stage]
    times_ms = []
    for _ in range(num_plans):
        lost = set(rng.sample(names, num_lost))
        living = [[cell for cell in stage if cell.cell_id not in lost] for stage in cells]
        start = time.perf_counter()
        plan_chaining(living, lanes, lanes, previous)
        times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms


def print_row(name: str, times_ms: Sequence[float], aim_ms: float | None) -> None:
    """One line of the table: percentiles, and the 99th over its aim."""
    p50, p99 = np.percentile(times_ms, (50, 99))
    ratio = f"{p99 / aim_ms:8.2f}" if aim_ms else "       -"
    print(f"{name:<58}{len(times_ms):6}{p50:9.2f}{p99:9.2f}{max(times_ms):9.2f}{ratio}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the plans")
    share = 0.1 if parser.parse_args().quick else 1.0
    print(f"{'one plan, ms':<58}{'plans':>6}{'p50':>9}{'p99':>9}{'max':>9}{'p99/aim':>8}")
    for scenario in SCENARIOS:
        name = f"reordering N={scenario.lanes} c={scenario.shards_per_lane} r={scenario.redundancy}"
        name += " strict hosts" if scenario.strict_hosts else ""
        name += f" rejoins {scenario.rejoin:.0%}" if scenario.rejoin else ""
        times_ms = time_reordering(scenario, max(20, int(scenario.num_plans * share)))
        print_row(name, times_ms, AIM_MS.get(scenario.lanes))
    for lanes, stages, num_lost in ((64, 16, 1), (64, 16, 16), (64, 16, 200), (1000, 16, 16)):
        times_ms = time_chaining(lanes, stages, num_lost, max(10, int(50 * share)))
        print_row(f"chaining {lanes} x {stages}, {num_lost} cells lost", times_ms, None)
    for lanes, shards_per_lane in ((16, 16), (64, 16), (1000, 1), (10_000, 1)):
        start = time.perf_counter()
        plan_placement(lanes, shards_per_lane)
        elapsed_ms = (time.perf_counter() - start) * 1e3
        print_row(f"placement N={lanes} c={shards_per_lane}", [elapsed_ms], None)


if __name__ == "__main__":
    main()
