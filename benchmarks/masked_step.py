"""Measures the step time after a replica is lost against that before, by shards per lane.

    python benchmarks/masked_step.py [--quick] [--only emulated|llama] [--lanes 17]

Each row is one real local run: api, supervisors, trainers; one pod is killed with -9
and none takes its place, so that the mask stays. A lane has the same work whatever
its number of types: 16 samples per step, as one type of 16 micro-batches (c = 1) or
as 16 types of one (c = 16). ``ratio`` is the median step after the loss over the
median step before it, both of the same run; ``ideal`` is what the planner's stack
predicts if compute were all of a step, ``loss s`` the step in which the pod died,
recovery included.

Two workloads: ``emulated`` (emulated_accelerator.py) has a device per rank, as a
cluster does, played by sleep; ``llama`` is the demo's model, computed by the cores of
this machine, where the work of all ranks adds up and a loss can change little.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from support import demo
from support.local_run import Step, local_run
from support.spread import p10_to_p90

HERE = Path(__file__).parent
SAMPLES_PER_LANE = 16
WARM_UP = 2
"""Steps that do not count, at the start and after the loss: the first pays for what is
allocated once, the second for the recovery itself."""
POLL_S = 2.0
GIVE_UP_S = 420.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    shards_per_lane: int
    lanes: int
    stages: int
    num_steps: int
    """Counted steps on each side of the loss."""
    workload: Mapping[str, Any]

    @property
    def fault_step(self) -> int:
        """Step in which the pod dies."""
        return WARM_UP + self.num_steps

    def job(self) -> dict[str, Any]:
        """The TrainingJob."""
        return {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": f"masked-{self.name}-{self.shards_per_lane}"},
            "spec": {
                "training": {
                    # Two more than are counted: the last ones may be missed by the polling.
                    "steps": 2 * (WARM_UP + self.num_steps) + 2,
                    "seed": 7,
                    "lanes": self.lanes,
                    "shardsPerLane": self.shards_per_lane,
                },
                "parallelism": {"stages": self.stages},
                "pipeline": {"microBatches": SAMPLES_PER_LANE // self.shards_per_lane},
                "workload": dict(self.workload),
                "runtime": {"device": "CPU", "backend": "Gloo"},
            },
        }

    def faults(self) -> list[dict[str, Any]]:
        """One pod, of neither the first nor the last lane, in a backward."""
        return [
            {
                "at": {"step": self.fault_step, "phase": "backward"},
                "target": {"replica": self.lanes // 2, "stage": 0},
                "action": "kill-pod",
            }
        ]


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds of the counted steps, and the stacks that the planner chose."""

    normal_s: list[float] = field(default_factory=list)
    masked_s: list[float] = field(default_factory=list)
    normal_stack: int = 0
    masked_stack: int = 0
    resumed_s: float = float("nan")
    """From the first step without the replica, as it was counted: the recovery included."""

    @property
    def ratio(self) -> float:
        """Median masked step over median normal step."""
        return statistics.median(self.masked_s) / statistics.median(self.normal_s)


def measure(case: Case) -> Measured:
    """Run a case to its end.

    Raises:
        RuntimeError: the run failed, hung, or lost or won replicas otherwise than meant.
    """
    stacks: dict[int, int] = {}
    give_up_s = time.monotonic() + GIVE_UP_S
    # A local run makes a new pod for a lost one. Here the lost one is to stay lost.
    with local_run(case.job(), replacements=0, faults=case.faults()) as run:
        while run.process.poll() is None:
            _require(time.monotonic() < give_up_s, f"{case.name}: the run hangs")
            time.sleep(POLL_S)
            with contextlib.suppress(httpx.HTTPError):
                shown = run.fetch()
                stacks[shown["replicas"]] = shown["all_reduce_stack"]
                run.read_ledger()
        log = (run.directory / "output.log").read_text()[-2000:]
        code = run.process.returncode
        _require(code == 0, f"{case.name}: exit code {code}\n{log}")
        return _evaluate(case, run.steps, stacks)


def _evaluate(case: Case, steps: Mapping[int, Step], stacks: Mapping[int, int]) -> Measured:
    measured = Measured(
        normal_stack=stacks.get(case.lanes, 0), masked_stack=stacks.get(case.lanes - 1, 0)
    )
    for number, step in sorted(steps.items()):
        had = f"step {number} had {step.replicas} replicas"
        if number < WARM_UP:
            continue
        if number < case.fault_step:
            _require(step.replicas == case.lanes, had)
            measured.normal_s.append(step.step_s)
        elif number == case.fault_step:
            measured.resumed_s = step.step_s
        elif number >= case.fault_step + WARM_UP:
            _require(step.replicas == case.lanes - 1, had)
            measured.masked_s.append(step.step_s)
    _require(len(measured.normal_s) == case.num_steps, "normal steps are missing")
    _require(len(measured.masked_s) >= case.num_steps, "masked steps are missing")
    return measured


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def make_cases(lanes: int, device_s: float, quick: bool) -> list[Case]:
    """All rows; ``device_s`` is the device time of a lane's samples in one step."""
    sequence = 64
    per_token_ms = device_s * 1e3 / (SAMPLES_PER_LANE * sequence)
    emulated = {
        "entrypoint": f"{HERE / 'emulated_accelerator.py'}:workload",
        "config": {"deviceMillisecondsPerToken": per_token_ms, "sequence": sequence},
    }
    shards = (1, 16)
    return [
        *(
            Case(
                name="emulated",
                shards_per_lane=c,
                lanes=lanes,
                stages=1,
                num_steps=5 if quick else 12,
                workload=emulated,
            )
            for c in shards
        ),
        *(
            Case(
                name="llama",
                shards_per_lane=c,
                lanes=demo.LANES,
                stages=demo.STAGES,
                num_steps=3 if quick else 8,
                workload=demo.WORKLOAD,
            )
            for c in shards
        ),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--only", choices=("emulated", "llama"), help="one workload")
    parser.add_argument("--shards", type=int, choices=(1, 16), help="one number of types")
    parser.add_argument("--lanes", type=int, default=17, help="of the emulated workload")
    parser.add_argument(
        "--device-seconds", type=float, default=2.0, help="emulated device time per lane and step"
    )
    options = parser.parse_args()
    print(
        f"{'workload':<10}{'c':>4}{'lanes':>7}{'stages':>8}{'steps':>7}{'normal s':>10}"
        f"{'p10-p90':>13}{'masked s':>10}{'p10-p90':>13}{'ratio':>8}{'ideal':>8}{'stack':>10}"
        f"{'loss s':>8}"
    )
    for case in make_cases(options.lanes, options.device_seconds, options.quick):
        if options.only not in (None, case.name):
            continue
        if options.shards not in (None, case.shards_per_lane):
            continue
        result = measure(case)
        ideal = result.masked_stack / result.normal_stack if result.normal_stack else float("nan")
        print(
            f"{case.name:<10}{case.shards_per_lane:>4}{case.lanes:>7}{case.stages:>8}"
            f"{len(result.normal_s):>3}+{len(result.masked_s):<3}"
            f"{statistics.median(result.normal_s):>10.3f}{p10_to_p90(result.normal_s):>13}"
            f"{statistics.median(result.masked_s):>10.3f}{p10_to_p90(result.masked_s):>13}"
            f"{result.ratio:>8.3f}{ideal:>8.3f}"
            f"{f'{result.normal_stack} -> {result.masked_stack}':>10}{result.resumed_s:>8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
