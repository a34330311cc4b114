"""Measures whether memory, threads, descriptors and files level off over many recoveries.

    python benchmarks/leaks.py [--quick] [--steps 500] [--recoveries 50]

One local run. The pods of the first lane are never touched; of the others a trainer or a whole
pod is killed with -9, in turns, each once the job is whole again, so that every kill is a mask
and a heal. After each, when the job has gone on for some steps, every process that has been there
from the start is looked at: USS (private memory), threads, descriptors, sockets.

The table compares the look after the warm-up with the last one. Growth of memory per recovery
is the slope of a straight line through the looks after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.census import Holding, count_files, hold, quiet, roles
from support.local_run import LocalRun, kill_pod, kill_trainer, local_run, make_job

LANES = 3
SAMPLES = 4
PAUSE_S = 0.1
AFTER = 5
"""Steps between the job being whole again and a look."""


def look(run: LocalRun, num_cells: int) -> dict[str, Holding]:
    """Look at every process of the run."""
    members = run.members(num_cells)
    run.go_on(AFTER)
    pids = roles(run.process.pid, members)
    rounds = []
    for number in range(SAMPLES):
        if number:
            time.sleep(PAUSE_S)
        rounds.append({role: hold(pid) for role, pid in pids.items()})
    return {role: quiet([held[role] for held in rounds]) for role in pids}


def disturb(run: LocalRun, number: int, num_cells: int) -> None:
    """Kill a trainer or a pod of a lane other than the first and wait until it is back."""
    members = run.members(num_cells)
    others = [m for m in members if m["replica"] != 0]
    victim = others[number // 2 % len(others)]
    known = {r["quorum"]["id"] for r in run.recoveries()}
    (kill_trainer, kill_pod)[number % 2](victim)

    def back() -> bool:
        new = [r for r in run.recoveries() if r["quorum"]["id"] not in known]
        return any(r["method"] == "join" for r in new) and all(r["done"] for r in new)

    run.until(back, f"the return of {victim['rank']}")


def slope(values: Sequence[float]) -> float:
    """Least-squares growth per entry."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope


def show(looks: Sequence[dict[str, Holding]], warm_up: int) -> None:
    """Print the table of the processes that were there all the time."""
    first, last = looks[warm_up], looks[-1]
    print(
        "| process | USS MiB | growth KiB per recovery | of its last half | threads | descriptors "
        "| sockets |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for role in sorted(last):
        if role not in first or first[role].pid != last[role].pid:
            continue
        before, after = first[role], last[role]
        uss = [seen[role].uss_kib for seen in looks[warm_up:]]
        print(
            f"| {role} | {before.uss_kib / 1024:.1f} -> {after.uss_kib / 1024:.1f} "
            f"| {slope(uss):.1f} | {slope(uss[len(uss) // 2 :]):.1f} "
            f"| {before.threads} -> {after.threads} | {before.fds} -> {after.fds} "
            f"| {before.sockets} -> {after.sockets} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60 steps, 8 recoveries")
    parser.add_argument("--steps", type=int, help="at least so many (500)")
    parser.add_argument("--recoveries", type=int, help="kills, each a mask and a heal (50)")
    parser.add_argument("--stages", type=int, default=2)
    args = parser.parse_args()
    kills = args.recoveries or (8 if args.quick else 50)
    steps = args.steps or (60 if args.quick else 500)
    warm_up = max(2, kills // 5)
    num_cells = LANES * args.stages
    print(f"load average before: {os.getloadavg()[0]:.1f}")
    job = make_job("leaks", parallelism={"stages": args.stages})
    shm = Path("/dev/shm")
    with local_run(job) as run:
        run.members(num_cells)
        run.go_on(20)
        shared = len(os.listdir(shm))
        looks, files = [look(run, num_cells)], [count_files(run.directory)]
        for number in range(kills):
            disturb(run, number, num_cells)
            looks.append(look(run, num_cells))
            files.append(count_files(run.directory))
            print(
                f"\r{number + 1}/{kills} recoveries, step {run.newest()}", end="", file=sys.stderr
            )
        while run.newest() < steps:
            run.go_on(10)
        print(file=sys.stderr)
        print(f"{run.newest()} steps, {kills} kills, {len(run.recoveries())} plans of recovery\n")
        show(looks, warm_up)
        (num_before, size_before), (num_after, size_after) = files[warm_up], files[-1]
        print(
            f"\nfiles of the run: {num_before} -> {num_after} "
            f"({size_before / 2**20:.1f} -> {size_after / 2**20:.1f} MiB), "
            f"entries of /dev/shm: {shared} -> {len(os.listdir(shm))}"
        )
        print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
