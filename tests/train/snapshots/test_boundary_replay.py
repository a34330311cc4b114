"""A stage of a chain computes its steps again, from copies of its units and what was sent to it."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
import torch
from tests.train.compute.test_interpreter import Pipe, in_threads

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig, LogKind
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank.settle import Supply
from mainstay_core.wire.segments import SegmentKind
from mainstay_core.wire.votes import Commit
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.model import workload as workloads
from mainstay_train.snapshots.unit_bytes import UnitBytes

DENSE = {"dim": 16, "layers": 4, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
EXPERTS = {**DENSE, "layers": 3, "experts": 4, "activeExperts": 2, "expertHidden": 16}
MODELS = {"llama": ("", DENSE), "moe": ("mainstay_train.models.moe:workload", EXPERTS)}
NUM_STAGES = 3
MICRO_BATCHES = 2
LENGTH = 3
"""Versions of a window."""
STEPS = LENGTH + 1


@dataclass
class Log:
    """What one stage sent, by step and flow."""

    step: int = 0
    kept: dict[tuple[int, str, int, int], torch.Tensor] = field(default_factory=dict)

    def sent(self, action: Action, tensor: torch.Tensor) -> None:
        direction = action.op.value[-1]
        self.kept[self.step, direction, action.type, action.micro_batch] = tensor

    def completed(self, shard_type: int, mark: object) -> None:
        pass


@dataclass
class Again:
    """A step that is computed again from the neighbours' logs."""

    units: UnitBytes
    step: int
    frozen: Collection[str]
    logs: dict[str, Log]
    lowest: int = 0

    def skipped(self, block: int) -> Collection[str]:
        return self.units.skippable(block, self.frozen)

    def read(self, action: Action, into: torch.Tensor) -> None:
        direction = "F" if action.op is Op.READ_F else "B"
        log = self.logs[direction]
        into.copy_(log.kept[self.step, direction, action.type, action.micro_batch])


def make_engine(model: str, dtype: str, stage: int) -> Engine:
    entrypoint, config = MODELS[model]
    loaded = workloads.load(entrypoint, {**config, "dtype": dtype})
    shape = JobShape(
        lanes=2,
        shards_per_lane=2,
        replicas=1,
        min_replicas=1,
        stages=NUM_STAGES,
        steps=STEPS,
        seed=3,
        micro_batches=MICRO_BATCHES,
    )
    job = JobConfig(
        job=JobUid("job"), name="job", shape=shape, entrypoint="", workload={}, device="cpu"
    )
    training = BlockTraining(
        workload=loaded, config=job, device="cpu", loader=Loader(loaded.dataset)
    )
    return training.build_engine(stage, NUM_STAGES, 0, lambda _: None)


def commit_of(engine: Engine, step: int) -> Commit:
    statistics = tuple(range(64)) if any(s.stop for s in engine.statistics) else ()
    return Commit(
        step=step, norm=1, scale=1e-2, tokens=1, loss=1, data="0" * 32, statistics=statistics
    )


def reduce(engine: Engine) -> None:
    engine.reduce(
        None, [Supply(partial=partial, index=0) for partial in engine.store.held()], [0], 0
    )


def segments_of(units: UnitBytes, kind: SegmentKind) -> list[bytearray]:
    segments = []
    for number in range(len(units.names)):
        memory = bytearray(units.size_bytes(number, kind))
        units.write(number, kind, memoryview(memory))
        segments.append(memory)
    return segments


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).clone()


@pytest.mark.parametrize(
    ("model", "dtype"), [("llama", "float32"), ("moe", "bfloat16"), ("moe", "float32")]
)
def test_a_stage_computes_its_steps_again_while_units_are_frozen(model: str, dtype: str) -> None:
    engines = [make_engine(model, dtype, stage) for stage in range(NUM_STAGES)]
    logs = [Log() for _ in engines]
    for engine in engines:
        engine.state.initialize(7)
    kept = [UnitBytes(engine.state, engine.reducer.reduced, LogKind.BOUNDARY) for engine in engines]
    copies: list[list[dict[SegmentKind, list[bytearray]]]] = [[] for _ in engines]
    gradients: list[list[torch.Tensor]] = [[] for _ in engines]
    for step in range(STEPS):
        pipe = Pipe(NUM_STAGES)
        for stage, units in enumerate(kept):
            kinds = (SegmentKind.STATE, SegmentKind.COMPUTE)
            copies[stage].append({kind: segments_of(units, kind) for kind in kinds})
            logs[stage].step = step
        work = [(engine, step, pipe.end_of(engine.stage), logs[engine.stage]) for engine in engines]
        in_threads(lambda e, s, chain, log: e.compute(range(4), s, chain, log=log), work)
        for stage, engine in enumerate(engines):
            reduce(engine)
            gradients[stage].append(bits(engine.reducer.reduced))
            engine.drop_held()
            engine.apply(commit_of(engine, step), 0.1)

    for stage, before in enumerate(engines):
        again = make_engine(model, dtype, stage)
        again.state.initialize(8)  # what is not loaded is wrong
        units = UnitBytes(again.state, again.reducer.reduced, LogKind.BOUNDARY)
        order = list(range(len(units.names)))[::-1]
        relogged = Log()
        for step in range(STEPS):
            active = [n for place, n in enumerate(order) if place % LENGTH <= step]
            for number in order:
                turn = order.index(number) % LENGTH
                if turn == step:
                    copy = copies[stage][step][SegmentKind.STATE][number]
                    units.read(number, SegmentKind.STATE, memoryview(copy))
            again.state.refresh()
            for number in order:
                if number not in active:
                    copy = copies[stage][step][SegmentKind.COMPUTE][number]
                    units.read(number, SegmentKind.COMPUTE, memoryview(copy))
            frozen = {units.names[number] for number in order if number not in active}
            neighbours = {
                "F": logs[stage - 1] if stage else Log(),
                "B": logs[stage + 1] if stage + 1 < NUM_STAGES else Log(),
            }
            relogged.step = step
            again.compute_again(step, Again(units, step, frozen, neighbours), relogged)
            if not frozen:
                assert torch.equal(bits(again.reducer.reduced), gradients[stage][step])
            names = [name for number in active for name in units.parameters[number]]
            again.apply_again(commit_of(again, step), 0.1, names)
        for ours, theirs in zip(again.state.flats(), before.state.flats(), strict=True):
            assert torch.equal(bits(ours.tensor), bits(theirs.tensor)), ours.name
        assert relogged.kept.keys() == logs[stage].kept.keys()
        for key, tensor in relogged.kept.items():
            assert torch.equal(bits(tensor.reshape(-1)), bits(logs[stage].kept[key].reshape(-1)))
    assert threading.active_count() < 50
