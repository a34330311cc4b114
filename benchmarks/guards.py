"""Measures what guards of a swapped pipeline's ends cost: the step's time, and bytes that are sent.

    python benchmarks/guards.py [--quick] [--steps 40] [--turns 3] [--guards 2]

Real local runs of the demo's model, swapped, take turns: without guards, and with as many for each
end as are said. The ratio is of the median step of a run to that of the run without guards in the
same turn; the first steps of a run are not counted. The bytes are counted, not timed: one process
builds both ends and sends their guards what a step sends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from support import demo
from support.local_run import local_run, make_job

from mainstay_core.base.ids import JobUid
from mainstay_core.job.config import JobConfig
from mainstay_core.job.spec import parse_training_job
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.exact import numerics
from mainstay_train.model import workload
from mainstay_train.state.guards import GuardCopies

WARM_UP = 5
"""Steps of a run that are not counted: compilers, caches and connections are not there yet."""
REPLICAS = 2


def job_of(guards: int) -> dict[str, Any]:
    """The demo's model in a swapped pipeline of its stages."""
    return make_job(
        f"guards-{guards}",
        training={"steps": 1_000_000, "seed": 7, "lanes": REPLICAS, "shardsPerLane": 2},
        parallelism={"stages": demo.STAGES},
        pipeline={"order": "Swapped", "microBatches": 2},
        workload=demo.WORKLOAD,
        recovery={"approximate": {"guards": guards}},
    )


class CountedGroup:
    """A group that counts what it is given to send."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def send(self, message: Any) -> None:
        self.sent_bytes += message.tensor.numel() * message.tensor.element_size()

    def finish(self, pending: None) -> None:
        del pending


def count_bytes(guards: int) -> dict[str, int]:
    """Return what a step sends to the guards of each end, by the names of what they keep."""
    torch.set_num_threads(1)
    numerics.setup("cpu")
    config: JobConfig = parse_training_job(job_of(guards)).to_job_config(JobUid("bench"))
    loaded = workload.load(config.entrypoint, config.workload)
    loader = Loader(loaded.dataset, "cpu", ahead=False)
    training = BlockTraining(workload=loaded, config=config, device="cpu", loader=loader)
    found = {}
    for end in (0, config.shape.stages - 1):
        engine = training.build_engine(end, config.shape.stages, 0, lambda _: None)
        group: Any = CountedGroup()
        copies = GuardCopies(training, training.outline(), partial(_given, engine), lambda: ())
        copies.give(group, range(1, 1 + min(guards, REPLICAS)))
        kept, _ = training.build_guarded(end)
        found[", ".join(block.name for block in kept.blocks)] = group.sent_bytes
    return found


def median_step_s(guards: int, steps: int) -> float:
    """Run a job for some steps; return its median step."""
    with local_run(job_of(guards)) as run:
        run.members(REPLICAS * demo.STAGES)
        run.go_on(WARM_UP)
        first, began_s = run.newest(), time.monotonic()
        run.go_on(steps)
        told = [s.step_s for number, s in run.steps.items() if number > first]
        print(f"  {guards} guards: {len(told)} steps in {time.monotonic() - began_s:.0f} s")
        return statistics.median(told)


def _given(engine: Engine) -> Engine:
    """Return the engine, as what asks for a rank's newest one wants it."""
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one turn of ten steps")
    parser.add_argument("--steps", type=int, default=40, help="counted steps of a run")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--guards", type=int, default=2, help="of each end")
    parser.add_argument("--bytes", action="store_true", help="count bytes, and run nothing")
    options = parser.parse_args()
    turns, steps = (1, 10) if options.quick else (options.turns, options.steps)
    for names, sent in count_bytes(options.guards).items():
        print(f"{names}: {sent / 2**20:.2f} MiB a step to {min(options.guards, REPLICAS)} guards")
    if options.bytes:
        return
    ratios = []
    for turn in range(turns):
        without, guarded = median_step_s(0, steps), median_step_s(options.guards, steps)
        ratios.append(guarded / without)
        print(f"turn {turn}: {without:.3f} s without, {guarded:.3f} s with, {ratios[-1]:.3f}")
    print(f"ratio {statistics.median(ratios):.3f} (at most 1.03 is the aim)")


if __name__ == "__main__":
    main()
