"""A chain of three stages in one process: its copies and logs, of a few steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from tests.train.compute.test_interpreter import Pipe, in_threads

from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import Action
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.segments import SegmentKind
from mainstay_core.wire.unit_digests import UnitDigests, seal_digests
from mainstay_core.wire.votes import Commit, CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.exact.unit_sums import packed
from mainstay_train.model import workload as workloads
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.unit_checks import digests_of_step

DENSE = {"dim": 16, "layers": 4, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
EXPERTS = {**DENSE, "layers": 3, "experts": 4, "activeExperts": 2, "expertHidden": 16}
MODELS = {"llama": ("", DENSE), "moe": ("mainstay_train.models.moe:workload", EXPERTS)}
NUM_STAGES = 3
MICRO_BATCHES = 2
LENGTH = 3
"""Versions of a window."""
STEPS = LENGTH + 1
RATE = 0.1


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


def make_engine(model: str, dtype: str, stage: int, unskippable: Collection[str] = ()) -> Engine:
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
        workload=loaded,
        config=job,
        device="cpu",
        loader=Loader(loaded.dataset),
        unskippable=unskippable,
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


def vote(engine: Engine, step: int, masters: str) -> str:
    """The digest of the reduced gradient, as the vote on its step tells it."""
    slot = Slot(pod=PodUid("pod"), index=0)
    table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
    return engine.ballot(None, table, 0, slot, masters, step).gradient


def without_gradients(engine: Engine, step: int, stage: int) -> UnitDigests:
    """The digests of a version's units, whose next step nobody has computed."""
    by_unit = engine.state.masters_digest().by_unit
    assert by_unit is not None
    nothing = packed(torch.zeros_like(by_unit))
    return seal_digests(
        UnitDigests(
            lineage=0, position=stage, step=step, gradients=nothing, masters=packed(by_unit)
        )
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


@dataclass
class Trained:
    """A chain that has trained some steps, and what is kept of it."""

    engines: list[Engine]
    logs: list[Log]
    copies: list[list[dict[SegmentKind, list[bytearray]]]]
    """By stage, version, kind and unit; the last version is that after all steps."""
    gradients: list[list[torch.Tensor]]
    """Bits of the reduced gradient, by stage and step."""
    digests: list[list[tuple[str, str]]]
    """Of the reduced gradient and of the masters before it, by stage and step."""
    unit_gradients: list[list[list[bytearray]]]
    """Segments of the reduced gradient, by stage, step and unit."""
    told: list[list[UnitDigests]]
    """Digests of units, by stage and step; the last are of no gradient."""

    def record(self, stage: int, step: int) -> CommitRecord:
        """The commit of a step, of which one stage's digests are known."""
        gradient, masters = self.digests[stage][step]
        return CommitRecord(
            lineage=0,
            commit=commit_of(self.engines[stage], step),
            certified_in="q1-abc",
            chain="",
            gradients=tuple(gradient if s == stage else "" for s in range(NUM_STAGES)),
            states=tuple(masters if s == stage else "" for s in range(NUM_STAGES)),
        )


def train(model: str, dtype: str) -> Trained:
    """Train a chain, and keep everything."""
    engines = [make_engine(model, dtype, stage) for stage in range(NUM_STAGES)]
    for engine in engines:
        engine.state.initialize(7)
    nothing = [[] for _ in engines]
    trained = Trained(engines, [Log() for _ in engines], *([*map(list, nothing)] for _ in "12345"))
    kept = [UnitBytes(e.state, e.reducer.reduced) for e in engines]
    for step in range(STEPS + 1):
        for stage, units in enumerate(kept):
            kinds = (SegmentKind.STATE, SegmentKind.COMPUTE)
            trained.copies[stage].append({kind: segments_of(units, kind) for kind in kinds})
            trained.logs[stage].step = step
        masters = [engine.state.masters_digest().whole.hex() for engine in engines]
        if step == STEPS:
            for stage, engine in enumerate(engines):
                trained.digests[stage].append(("0" * 32, masters[stage]))
                trained.told[stage].append(without_gradients(engine, step, stage))
            break
        pipe = Pipe(NUM_STAGES)
        work = [(e, step, pipe.end_of(e.stage), trained.logs[e.stage]) for e in engines]
        in_threads(lambda e, s, chain, log: e.compute(range(4), s, chain, log=log), work)
        for stage, engine in enumerate(engines):
            reduce(engine)
            trained.gradients[stage].append(bits(engine.reducer.reduced))
            trained.digests[stage].append((vote(engine, step, masters[stage]), masters[stage]))
            trained.unit_gradients[stage].append(segments_of(kept[stage], SegmentKind.GRADIENT))
            found = digests_of_step(engine, trained.record(stage, step), stage)
            assert found is not None
            trained.told[stage].append(found)
            engine.drop_held()
            engine.apply(commit_of(engine, step), RATE)
    return trained
