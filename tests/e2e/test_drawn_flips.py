"""Wrong bits drawn from a seed are put into real runs: each is found, and no digest changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job, run_undisturbed
from tests.e2e.test_flips import DYNAMIC, FULL

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import Cut
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.spec import parse_training_job
from mainstay_train.dmr.flip_trials import BATCH, Spot, StepTrials
from mainstay_train.exact import numerics
from mainstay_train.model import workload as workloads

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

SEED = 14
NUM_FLIPS = 10
"""In each run, one a step."""
WIRE = "wire"
RECOMPUTE = {"runtime": {"recompute": True}}


class Draws:
    """Draws flips for a job from the kernels of its first step.

    Args:
        job: the job.
        layout: of the job.
        seed: of the draws.
    """

    def __init__(self, job: dict[str, Any], layout: Layout, seed: str) -> None:
        numerics.setup("cpu")
        config = parse_training_job(job).to_job_config(JobUid("draws"))
        shape = replace(config.shape, stages=1, replicas=1, min_replicas=1)
        workload = workloads.load(config.entrypoint, config.workload)
        one_rank = replace(config, shape=shape)
        self._layout, self._rng = layout, random.Random(seed)
        self._stages = [list(blocks) for blocks in workload.stages(layout.stages, Cut.BALANCED)]
        self._checked = StepTrials(workload, one_rank, "cpu", Mode.FULL)
        self._spots: dict[str, list[Spot]] = {}
        plain = StepTrials(workload, one_rank, "cpu", Mode.OFF)
        plain.run()  # tables that blocks make once and keep are no kernels of a later step
        for spot in plain.list():
            self._spots.setdefault(spot.kind, []).append(spot)

    def faults(self, num_faults: int) -> Iterator[dict[str, Any]]:
        """Yield as many faults, in one step after the other; classes of operators take turns."""
        kinds = [*sorted(self._spots), WIRE]
        start = self._rng.randrange(len(kinds))
        for number in range(num_faults):
            kind = kinds[(start + number) % len(kinds)]
            yield self._wire(number + 1) if kind == WIRE else self._drawn(number + 1, kind)

    def _drawn(self, step: int, kind: str) -> dict[str, Any]:
        while True:
            spot = self._rng.choice(self._spots[kind])
            flip = spot.flip(self._rng)
            # What has no elements has no bits.
            if self._checked.run(flip, spot.place.phase).findings:
                break
        place = spot.place
        stage, block = self._find(place.block)
        told = {"element": flip.element, "bit": flip.bit, "execution": flip.execution.value}
        if spot.kernel == BATCH:
            stage = 0 if flip.output % 2 == 0 else self._layout.stages - 1
            told |= {"where": "batch", "output": flip.output}
        else:
            # What is done once a step has other numbers where there are several cells.
            is_once = place.in_pass is Pass.STEP
            told |= {"pass": place.in_pass.value, "output": flip.output}
            told["operator"] = spot.kernel if is_once else spot.ordinal
        of_type = {"type": place.shard_type, "microBatch": place.micro_batch, "block": block}
        told |= {name: value for name, value in of_type.items() if value is not None}
        replica = self._rng.randrange(self._layout.lanes)
        if place.shard_type is not None:
            replica = place.shard_type // self._layout.shards_per_lane
        return _fault(step, place.phase.value, replica, stage, told)

    def _find(self, block: int | None) -> tuple[int, int | None]:
        """Return the stage of a block, and its place there; of none, any stage."""
        if block is None:
            return self._rng.randrange(self._layout.stages), None
        (stage,) = (n for n, blocks in enumerate(self._stages) if block in blocks)
        return stage, self._stages[stage].index(block)

    def _wire(self, step: int) -> dict[str, Any]:
        told = {"where": WIRE, "element": self._rng.randrange(1 << 20), "bit": 30}
        replica = self._rng.randrange(self._layout.lanes)
        return _fault(step, "reduce", replica, self._rng.randrange(self._layout.stages), told)


def _fault(step: int, phase: str, replica: int, stage: int, flip: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": {"step": step, "phase": phase},
        "target": {"replica": replica, "stage": stage},
        "action": "flip",
        "flip": flip,
    }


@pytest.mark.parametrize(
    ("stages", "spec"),
    [(1, FULL), (2, DYNAMIC)],
    ids=["one stage, at once", "two stages, late"],
)
def test_each_drawn_bit_that_is_put_in_is_found_and_no_digest_changes(
    tmp_path: Path, stages: int, spec: dict[str, Any]
) -> None:
    layout = Layout(stages=stages, lanes=2, shards_per_lane=2, spares=0)
    for name in ("corpus", "undisturbed", "disturbed"):
        (tmp_path / name).mkdir()
    corpus = matrix.write_corpus(tmp_path / "corpus")
    num_steps = NUM_FLIPS + 2
    job = make_job(layout, num_steps, corpus, **spec, **RECOMPUTE)
    faults = [*Draws(job, layout, f"{SEED} {stages}").faults(NUM_FLIPS)]
    expected = run_undisturbed(tmp_path / "undisturbed", layout.least, num_steps, corpus)

    with local_job(tmp_path / "disturbed", job, faults) as running:
        report, logs = running.report(), running.tails(num_lines=1000)

    assert report["digests"] == expected["digests"], logs
    assert "was not put in" not in logs
    assert {fault["state"] for fault in report["faults"]} == {"fired"}
    assert _found(report) == [_place_of(fault) for fault in faults], logs
    assert report["recoveries"] == []


def _found(report: dict[str, Any]) -> Sequence[tuple[int, int, int]]:
    told = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    return sorted({(f["step"], f["rank"]["replica"], f["rank"]["stage"]) for f in told})


def _place_of(fault: dict[str, Any]) -> tuple[int, int, int]:
    return fault["at"]["step"], fault["target"]["replica"], fault["target"]["stage"]
