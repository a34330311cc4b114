"""Measures what the ladder's row 5 costs, as ratios within one run.

    python benchmarks/approximate_recovery.py [--quick] [--kills 8]
                                              [--only permission|making|kill|ends|swapped]

*permission*: one job, whose permission for row 5 is switched off and on by turns while it trains:
the median step with it over that without it, and what goes over the loopback in a step.
*making*: a stage made anew of both neighbours' masters over a stage healed (support/making.py).
*kill*: one job; an inner stage and an end lose their only cell by turns. The inner one is made
anew, for the end the job restarts from its newest checkpoint. The five parts of each, and the time
until the step that was interrupted is committed. ``--kills`` of each: every one waits for 30 steps
before it.
*ends*: the same of a swapped pipeline with a guard of each end. By turns the first stage and the
last one are made anew of their twins and guards, and the first one is lost while the permission is
off, so that the job restarts.
*swapped*: steps of a swapped pipeline of four stages over those of one in order, with an emulated
device to each rank; beside it what the programs alone say (support/played_step.py).
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import copy  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from support import making  # noqa: E402
from support.local_run import LocalRun, kill_trainer, local_run, make_job  # noqa: E402
from support.played_step import played_s  # noqa: E402
from support.spread import median_and_p90, p10_to_p90  # noqa: E402

from mainstay_core.base.shape import Order  # noqa: E402
from mainstay_core.wire.recoveries import STAGES  # noqa: E402

HERE = Path(__file__).parent
NUM_STAGES = 4
MODEL = {"dim": 32, "layers": 8, "heads": 2, "kvHeads": 1, "hidden": 64, "sequence": 16}
LLAMA = {"entrypoint": "mainstay_train.models.llama:workload", "config": MODEL}
NOT_COUNTED = 2
"""Steps after each change: some were begun before it."""
LOOPBACK = "lo:"
SEQUENCE = 64
INNER, END = 1, 0
"""The stages that are killed."""


def permission(rounds: int, steps: int) -> None:
    """Print the step times of one job without and with permission, by turns."""
    job = make_job("permission", parallelism={"stages": NUM_STAGES}, workload=LLAMA)
    job["spec"]["training"] |= {"lanes": 1, "shardsPerLane": 2}
    times: dict[bool, list[float]] = {False: [], True: []}
    sent: dict[bool, list[float]] = {False: [], True: []}
    with local_run(job) as run:
        run.members(NUM_STAGES)
        for number in range(2 * rounds):
            allowed = number % 2 == 1
            _resubmit(run, job, allowed)
            run.go_on(NOT_COUNTED)
            first, before = run.newest(), _loopback_bytes()
            run.go_on(steps)
            last, after = run.newest(), _loopback_bytes()
            counted = range(first + 1, last + 1)
            times[allowed] += [run.steps[n].step_s for n in counted]
            sent[allowed].append((after - before) / len(counted))
    print("| permission | steps | step ms, median (p90) | KiB over the loopback in a step |")
    print("| --- | --- | --- | --- |")
    for allowed, found in times.items():
        kib = statistics.median(sent[allowed]) / 1024
        name = "on" if allowed else "off"
        print(f"| {name} | {len(found)} | {median_and_p90(found)} | {kib:.1f} |")
    off, on = (statistics.median(times[allowed]) for allowed in (False, True))
    print(f"\nstep with permission over without: {on / off:.3f} (aim: at most 1.01)\n", flush=True)


def _resubmit(run: LocalRun, job: Mapping[str, Any], allowed: bool) -> None:
    """Submit the job of a run again, as its owner would, with another permission."""
    manifest = copy.deepcopy(dict(job))
    manifest["spec"]["recovery"] = {**manifest["spec"]["recovery"], "allowApproximate": allowed}
    jobs, _, uid = run.url.rpartition("/")
    body = {
        "manifest": manifest,
        "uid": uid,
        "checkpoint_dir": str(run.directory / "state" / "checkpoints"),
    }
    run.client.post(jobs, json=body).raise_for_status()
    assert run.fetch("lineage")["allowed"] == allowed


def _loopback_bytes() -> int:
    """Return the bytes that have been sent over the machine's loopback."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, *fields = line.split()
        if name == LOOPBACK:
            return int(fields[8])
    raise RuntimeError("this machine has no loopback")


def loading(mebibytes: int, rounds: int) -> None:
    """Print what it takes to load a stage that is healed, and one that is made anew."""
    times = making.measure(mebibytes << 20, rounds)
    print("| way | rounds | ms, median (p90) | over healed from one | over healed from two |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in times.items():
        ratios = [
            statistics.median([mine / other for mine, other in zip(found, times[way], strict=True)])
            for way in ("healed from one", "healed from two")
        ]
        told = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {name} | {len(found)} | {median_and_p90(found)} | {told} |")
    print(f"\n{mebibytes} MiB with moments; aim: made at most 1.0 of healed\n", flush=True)


@dataclass(frozen=True, slots=True)
class Loss:
    """A stage that loses its only cell, and whether it may be made anew."""

    stage: int
    allowed: bool = True


LOSSES = {
    Order.IN_ORDER: (Loss(END), Loss(INNER)),
    Order.SWAPPED: (Loss(END), Loss(NUM_STAGES - 1), Loss(END, allowed=False)),
}
"""The losses that a job meets by turns. In order an end has no source: the job goes back."""


def kill(kills: int, order: Order) -> None:
    """Print what follows when a stage loses its only cell: made anew, or a restart."""
    job = make_job(
        f"kill-{order.lower()}",
        parallelism={"stages": NUM_STAGES},
        pipeline={"order": order.value},
        workload=LLAMA,
        checkpoint={"everySteps": 20},
        recovery={
            "maxRestarts": 1000,
            "allowApproximate": True,
            "approximateAfterLostSteps": 0,
            # Stages are made of neighbours here; one that loads its own checkpoint is another case.
            "approximate": {"staleSteps": 0},
        },
    )
    job["spec"]["training"] |= {"lanes": 1, "shardsPerLane": 2}
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    turns = LOSSES[order]
    with local_run(job) as run:
        for number in range(len(turns) * kills + 1):
            # The first one is not counted: it warms up what makes trainers.
            loss = turns[max(0, number - 1) % len(turns)]
            if order is Order.SWAPPED:
                _resubmit(run, job, loss.allowed)
            run.members(NUM_STAGES)
            run.go_on(30)
            method, times = _killed(run, loss.stage)
            if number:
                found.setdefault((loss.stage, method), []).append(times)
    _print_kills(order, found)


def _print_kills(
    order: Order, found: Mapping[tuple[int, str], Sequence[Mapping[str, float]]]
) -> None:
    """Print a table of the times by (stage lost, method of its recovery)."""
    names = ("kill to first fact", *STAGES[1:], "first commit beyond a step", "back, beyond a step")
    print("| order | stage lost | method | kills | ", " | ".join(names), "| lost steps |")
    print("| --- | --- | --- | --- |" + " --- |" * (len(names) + 1))
    for (stage, method), all_times in found.items():
        told = " | ".join(median_and_p90([times[name] for times in all_times]) for name in names)
        lost = statistics.median([times["lost"] for times in all_times])
        print(f"| {order} | {stage} | {method} | {len(all_times)} | {told} | {lost:.0f} |")
    print("\nmilliseconds, median (p90)\n", flush=True)


def _killed(run: LocalRun, stage: int) -> tuple[str, dict[str, float]]:
    """Kill the only cell of a stage; return the method of the recovery and its times."""
    (victim,) = [m for m in run.members(NUM_STAGES) if m["stage"] == stage]
    known = {r["quorum"]["id"] for r in run.recoveries()}
    last = run.newest()
    step_s = statistics.median(run.steps[n].step_s for n in range(last - 20, last))
    at_s = kill_trainer(victim)

    def over() -> dict[str, Any] | None:
        new = [r for r in run.recoveries() if r["quorum"]["id"] not in known]
        return new[-1] if new and all(r["done"] for r in new) else None

    recovery: dict[str, Any] = run.until(over, "the recovery")
    interrupted, quorum = recovery["from_step"], recovery["quorum"]["id"]

    def committed_at_s() -> float | None:
        # The lost cell may have been the only one that had not told a step that all had committed:
        # then the one behind it is the first that the new quorum computes.
        told: dict[int, list[float]] = {}
        for entry in run.fetch("ledger", since=max(0, interrupted - 1)):
            if entry["step"] >= interrupted and entry["quorum"]["id"] >= quorum:
                told.setdefault(entry["step"], []).append(entry["committed_at_s"])
        whole = [step for step, times in told.items() if len(times) == run.stages]
        return max(told[min(whole)]) if whole else None

    back_s: float = run.until(committed_at_s, "the interrupted step")
    since_s = recovery["started_at_s"]
    times = {part: recovery[f"{part}_s"] or 0.0 for part in STAGES[1:]}
    times["kill to first fact"] = since_s + (recovery["detect_s"] or 0.0) - at_s
    times["first commit beyond a step"] = recovery["first_commit_after_s"] or 0.0
    times["back, beyond a step"] = back_s - at_s - step_s
    times["lost"] = recovery["lost_steps"]
    return recovery["method"], times


def swapped(flows: Sequence[int], device_s: float, steps: int) -> None:
    """Print the steps of a swapped pipeline over those of one in order."""
    print("| flows | order | steps | step s, median | p10-p90 | over in order | by the programs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_flows in flows:
        found = {order: _steps_of(order, num_flows, device_s, steps) for order in Order}
        base = statistics.median(found[Order.IN_ORDER])
        flow_s = device_s / num_flows
        played = {order: played_s(order, num_flows, NUM_STAGES, flow_s) for order in Order}
        for order, times in found.items():
            median = statistics.median(times)
            print(
                f"| {num_flows} | {order} | {len(times)} | {median:.3f} | {p10_to_p90(times)} "
                f"| {median / base:.3f} | {played[order] / played[Order.IN_ORDER]:.3f} |",
                flush=True,
            )
    print()


def _steps_of(order: Order, num_flows: int, device_s: float, steps: int) -> list[float]:
    """Return the seconds of steps in which each stage's device works ``device_s``."""
    per_token_ms = device_s * NUM_STAGES * 1e3 / (num_flows * SEQUENCE)
    workload = {
        "entrypoint": f"{HERE / 'emulated_accelerator.py'}:workload",
        "config": {
            "deviceMillisecondsPerToken": per_token_ms,
            "sequence": SEQUENCE,
            "layers": NUM_STAGES,
            "weightShare": 1 / 3,
        },
    }
    job = make_job(
        f"swapped-{num_flows}",
        parallelism={"stages": NUM_STAGES},
        pipeline={"order": order.value, "cut": "Equal", "microBatches": 4},
        workload=workload,
    )
    job["spec"]["training"] |= {"lanes": 1, "shardsPerLane": num_flows // 4}
    with local_run(job) as run:
        run.members(NUM_STAGES)
        run.go_on(NOT_COUNTED)
        first = run.newest()
        run.go_on(steps)
        return [run.steps[n].step_s for n in range(first + 1, run.newest() + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, kills and bytes")
    parser.add_argument("--only", choices=("permission", "making", "kill", "ends", "swapped"))
    parser.add_argument("--kills", type=int, help="of each kind: 8, with --quick 1")
    given = parser.parse_args()
    quick = given.quick
    kills = given.kills if given.kills is not None else 1 if quick else 8
    if kills < 1:
        parser.error(f"--kills is {kills}, must be at least 1")
    print(f"load average before: {os.getloadavg()[0]:.1f}\n")
    if given.only in (None, "permission"):
        permission(rounds=2 if quick else 6, steps=10 if quick else 60)
    if given.only in (None, "making"):
        loading(mebibytes=16 if quick else 512, rounds=2 if quick else 7)
    if given.only in (None, "kill"):
        kill(kills, Order.IN_ORDER)
    if given.only in (None, "ends"):
        kill(kills, Order.SWAPPED)
    if given.only in (None, "swapped"):
        swapped((16,) if quick else (16, 64), 0.5 if quick else 2.0, 3 if quick else 12)
    print(f"load average after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
