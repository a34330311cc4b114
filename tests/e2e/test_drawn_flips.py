"""Wrong bits drawn from a seed are put into real runs: each is found, and no digest changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import matrix
from tests.e2e.harness import Layout, local_job, make_job, run_undisturbed
from tests.e2e.test_flips import AUTO, DYNAMIC, FULL, PIGGYBACK

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import Cut
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.spec import parse_training_job
from mainstay_train.dmr.flip_trials import BATCH, RECOMPUTE, Spot, StepTrials
from mainstay_train.exact import numerics
from mainstay_train.model import workload as workloads

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

SEED = 14
NUM_FLIPS = 10
"""In each run, one a step."""
WIRE = "wire"
RECOMPUTES = {"runtime": {"recompute": True}}
TWO_STAGES = Layout(stages=2, lanes=2, shards_per_lane=2, spares=0)
INNER = Layout(lanes=2, ranks_per_stage=2, ranks_per_pod=2, shards_per_lane=2, spares=0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job into which flips are drawn."""

    spec: dict[str, Any]
    layout: Layout = TWO_STAGES
    kinds: tuple[str, ...] = ()
    """The classes that its checks cover; none: all."""
    first_only: bool = False
    """Whether some kernels have no second execution into which a bit could be put."""
    first_step: int = 1
    """The step of the first flip."""


SETTINGS = {
    "one stage, at once": Setting(spec=FULL, layout=replace(TWO_STAGES, stages=1)),
    "two stages, late": Setting(spec=DYNAMIC),
    "bf16": Setting(spec=DYNAMIC, layout=replace(TWO_STAGES, dtype="bfloat16")),
    "experts": Setting(spec=FULL, layout=replace(TWO_STAGES, experts=True)),
    "inner": Setting(spec=FULL, layout=INNER),
    # Behind the profile step and the one before it.
    "Auto": Setting(spec=AUTO, first_only=True, first_step=3),
    "Piggyback": Setting(spec=PIGGYBACK, kinds=("forward pass", RECOMPUTE), first_only=True),
}
SEEDS = {"one stage, at once": "14 1", "two stages, late": "14 2"}
"""Others are drawn from their name."""


class Draws:
    """Draws flips for a job from the kernels of its first step.

    Args:
        job: the job.
        setting: of the job.
        seed: of the draws.
    """

    def __init__(self, job: dict[str, Any], setting: Setting, seed: str) -> None:
        numerics.setup("cpu")
        config = parse_training_job(job).to_job_config(JobUid("draws"))
        one = {"ranks_per_stage": 1, "ranks_per_pod": 1}
        shape = replace(config.shape, stages=1, replicas=1, min_replicas=1, **one)
        workload = workloads.load(config.entrypoint, config.workload)
        one_rank = replace(config, shape=shape)
        self._setting, self._layout = setting, (layout := setting.layout)
        self._rng = random.Random(seed)
        self._stages = [list(blocks) for blocks in workload.stages(layout.stages, Cut.BALANCED)]
        self._checked = StepTrials(workload, one_rank, "cpu", Mode.FULL)
        self._spots: dict[str, list[Spot]] = {}
        plain = StepTrials(workload, one_rank, "cpu", Mode.OFF)
        plain.run()  # tables that blocks make once and keep are no kernels of a later step
        for spot in plain.list():
            self._spots.setdefault(spot.kind, []).append(spot)

    def faults(self, num_faults: int) -> Iterator[dict[str, Any]]:
        """Yield as many faults, in one step after the other; classes of operators take turns."""
        kinds = self._setting.kinds or (*sorted(self._spots), WIRE)
        start = self._rng.randrange(len(kinds))
        for number in range(num_faults):
            kind, step = kinds[(start + number) % len(kinds)], self._setting.first_step + number
            yield self._wire(step) if kind == WIRE else self._drawn(step, kind)

    def _drawn(self, step: int, kind: str) -> dict[str, Any]:
        while True:
            spot = self._rng.choice(self._spots[kind])
            flip = self._flip(spot)
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
            # What is done once a step has other numbers where there are several cells, and a pass
            # where collectives stand between its kernels.
            is_named = place.in_pass is Pass.STEP or self._layout.ranks_per_stage > 1
            told |= {"pass": place.in_pass.value, "output": flip.output}
            told["operator"] = spot.kernel if is_named else spot.ordinal
        of_type = {"type": place.shard_type, "microBatch": place.micro_batch, "block": block}
        told |= {name: value for name, value in of_type.items() if value is not None}
        replica = self._rng.randrange(self._layout.lanes)
        if place.shard_type is not None:
            replica = place.shard_type // self._layout.shards_per_lane
        return self._fault(step, place.phase.value, replica, stage, told)

    def _flip(self, spot: Spot) -> Flip:
        flip = spot.flip(self._rng)
        return replace(flip, execution=Execution.PRIMARY) if self._setting.first_only else flip

    def _find(self, block: int | None) -> tuple[int, int | None]:
        """Return the stage of a block, and its place there; of none, any stage."""
        if block is None:
            return self._rng.randrange(self._layout.stages), None
        (stage,) = (n for n, blocks in enumerate(self._stages) if block in blocks)
        return stage, self._stages[stage].index(block)

    def _wire(self, step: int) -> dict[str, Any]:
        told = {"where": WIRE, "element": self._rng.randrange(1 << 20), "bit": 30}
        replica = self._rng.randrange(self._layout.lanes)
        return self._fault(step, "reduce", replica, self._rng.randrange(self._layout.stages), told)

    def _fault(
        self, step: int, phase: str, replica: int, stage: int, flip: dict[str, Any]
    ) -> dict[str, Any]:
        target = {"replica": replica, "stage": stage}
        if self._layout.ranks_per_stage > 1:
            target["inner"] = self._rng.randrange(self._layout.ranks_per_stage)
        return {
            "at": {"step": step, "phase": phase},
            "target": target,
            "action": "flip",
            "flip": flip,
        }


@pytest.mark.parametrize("name", SETTINGS)
def test_each_drawn_bit_that_is_put_in_is_found_and_no_digest_changes(
    tmp_path: Path, name: str
) -> None:
    setting = SETTINGS[name]
    layout, seed = setting.layout, SEEDS.get(name, f"{SEED} {name}")
    for directory in ("corpus", "undisturbed", "disturbed"):
        (tmp_path / directory).mkdir()
    corpus = matrix.write_corpus(tmp_path / "corpus")
    num_steps = setting.first_step + NUM_FLIPS + 1
    job = make_job(layout, num_steps, corpus, **(setting.spec | RECOMPUTES))
    faults = [*Draws(job, setting, seed).faults(NUM_FLIPS)]
    expected = run_undisturbed(tmp_path / "undisturbed", layout.least, num_steps, corpus)

    with local_job(tmp_path / "disturbed", job, faults) as running:
        report, logs = running.report(), running.tails(num_lines=1000)

    assert report["digests"] == expected["digests"], logs
    assert "was not put in" not in logs
    assert {fault["state"] for fault in report["faults"]} == {"fired"}
    assert _found(report) == [_place_of(fault) for fault in faults], logs
    assert report["recoveries"] == []


def _found(report: dict[str, Any]) -> Sequence[tuple[int, ...]]:
    told = [kept["told"]["finding"] for kept in report["findings"]["findings"]]
    ranks = [(finding["step"], finding["rank"]) for finding in told]
    return sorted({(step, r["replica"], r["stage"], r["inner"]) for step, r in ranks})


def _place_of(fault: dict[str, Any]) -> tuple[int, ...]:
    target = fault["target"]
    return fault["at"]["step"], target["replica"], target["stage"], target.get("inner", 0)
