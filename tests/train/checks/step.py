"""One step of a chain in one process, which can be executed with checks and with a flip."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.train.compute.test_interpreter import Pipe, in_threads

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Flip, Where
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.routes import Way
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.votes import Commit
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.flags import Flags
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.places import Place
from mainstay_train.checks.planned import WHOLE
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner, Told
from mainstay_train.exact import numerics
from mainstay_train.kernels import bits
from mainstay_train.model import workload as workloads

LLAMA, MOE = "mainstay_train.models.llama:workload", "mainstay_train.models.moe:workload"
SMALL = {"dim": 16, "layers": 2, "heads": 2, "kvHeads": 1, "hidden": 24, "sequence": 8}
EXPERTS = SMALL | {
    "layers": 1,
    "denseLayers": 0,
    "experts": 4,
    "activeExperts": 2,
    "sharedExperts": 1,
    "expertHidden": 8,
}
NARROW = {"dtype": "bfloat16"}
MODELS = {
    "llama": (LLAMA, SMALL),
    "llama bf16": (LLAMA, SMALL | NARROW),
    "llama dropout": (LLAMA, SMALL | {"dropout": 0.1}),
    "moe": (MOE, EXPERTS),
    "moe bf16": (MOE, EXPERTS | NARROW),
}
OTHERS = {
    "bounded": ("tests.train.checks.bounded:workload", SMALL),
    "llama three": (LLAMA, SMALL | {"layers": 3}),
    "transposed": ("tests.train.checks.transposed:workload", SMALL),
}
"""Models of single tests."""
RATE = 0.1
TYPES = (0, 1, 2)
"""Two lie in one lane, so that a partial is a sum."""


@dataclass(frozen=True)
class Spot:
    """One kernel of a step, as a flip can name it."""

    stage: int
    place: Place
    ordinal: int
    kernel: str

    def flip(self, **fields: object) -> Flip:
        place = self.place
        return Flip(
            in_pass=place.in_pass,
            shard_type=place.shard_type,
            micro_batch=place.micro_batch,
            block=place.block,
            operator=self.ordinal,
            **fields,  # type: ignore[arg-type]
        )


class Listing(FlipOrders):
    """Notes every kernel in place of flips."""

    is_empty = False  # type: ignore[assignment]

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage = stage
        self.spots: list[Spot] = []

    def take(
        self, place: Place, ordinal: int | None, kernel: str, where: Where = Where.COMPUTE
    ) -> list[Flip]:
        if where is Where.COMPUTE:
            assert ordinal is not None
            self.spots.append(Spot(self._stage, place, ordinal, kernel))
        return []


@dataclass
class Ended:
    """The outcome of a step."""

    digests: tuple[str, ...]
    """Of gradient, masters, moments and compute copies, losses included, by stage."""
    findings: list[Finding]
    num_refused: int = 0
    """How often all of the step was computed again, since a type of it was void."""
    spots: list[Spot] = field(default_factory=list)


class Step:
    """The first step of a chain; it can be executed again and again.

    Args:
        model: one of :data:`MODELS` or :data:`OTHERS`.
        recompute: share of blocks whose forwards run again in the backward.
        stages: of the chain.
        micro_batches: of a type.
        waiting_bytes: what checks of mode Full that wait may retain.
        profile_steps: steps after which mode Full has a plan; None: the dynamic planner decides.
        clock: of the planner; returns seconds that only grow.
        device: where all stages compute.
        is_flagged: whether comparisons are left on the device, be it the CPU.
        is_warm: whether the stages count as having completed a step, so that checks may wait.
        order: in which micro-batches pass the stages.
    """

    def __init__(
        self,
        model: str,
        *,
        recompute: float,
        stages: int = 1,
        micro_batches: int = 2,
        waiting_bytes: int = 0,
        profile_steps: int | None = None,
        is_warm: bool = True,
        order: Order = Order.IN_ORDER,
        clock: Callable[[], float] = time.perf_counter,
        device: str = "cpu",
        is_flagged: bool = False,
    ) -> None:
        self._device, self._is_flagged = device, is_flagged
        self._order, self._clock = order, clock
        self._is_warm = is_warm
        self._profile_steps = profile_steps
        self.told: list[Told] = []
        self._micro_batches, self._waiting_bytes = micro_batches, waiting_bytes
        numerics.setup(device)
        self._entrypoint, self._model = (MODELS | OTHERS)[model]
        self._workload = workloads.load(self._entrypoint, self._model)
        self._recompute, self._stages = recompute, stages
        self._engines = {mode: self._build(mode) for mode in Mode}

    def _build(self, mode: Mode) -> list[Engine]:
        self._shape = shape = JobShape(
            lanes=2,
            shards_per_lane=2,
            replicas=1,
            min_replicas=1,
            stages=self._stages,
            steps=2,
            seed=3,
            micro_batches=self._micro_batches,
            order=self._order,
            cut=Cut.BALANCED if self._order is Order.IN_ORDER else Cut.EQUAL,
        )
        job = self.config = JobConfig(
            job=JobUid("job"),
            name="job",
            shape=shape,
            entrypoint=self._entrypoint,
            workload=self._model,
            device=self._device.partition(":")[0],
            recompute=self._recompute > 0,
            recompute_share=self._recompute or 1.0,
        )
        engines = []
        for stage in range(self._stages):
            loader = Loader(
                self._workload.dataset, self._device, ahead=False, twice=mode is Mode.FULL
            )
            training = BlockTraining(
                workload=self._workload, config=job, device=self._device, loader=loader
            )
            checks = Checks(
                mode,
                tell=lambda finding: self._findings.append(finding),
                waiting_bytes=self._waiting_bytes,
                plan=PlanName.DYNAMIC if self._profile_steps is None else PlanName.AUTO,
                flags=Flags(everywhere=self._is_flagged),
            )
            engines.append(training.build_engine(stage, self._stages, 0, lambda _: None, checks))
            engines[-1].state.initialize(3)
            if self._is_warm:
                checks.begin_program({WHOLE: (0, 0)})
                checks.end_program(completed=True)
            if mode is Mode.FULL and self._profile_steps is not None:
                self.attach(engines[-1])
        self._first = [[flat.tensor.clone() for flat in e.state.flats()] for e in engines]
        return engines

    def attach(self, engine: Engine, ordered: Mapping[Way, Plan] | None = None) -> RunPlanner:
        """Have an engine planned from its next steps, or follow a plan then."""
        assert self._profile_steps is not None
        stage = PlannedStage(
            shape=self._shape,
            stage=engine.stage,
            fingerprint="job",
            profile_steps=self._profile_steps,
            memory_bytes=self._waiting_bytes,
        )
        planner = RunPlanner(
            stage, engine, ordered=ordered, clock=self._clock, tell=self.told.append
        )
        engine.checks.planner = planner
        return planner

    def list(self, mode: Mode = Mode.OFF) -> list[Spot]:
        """Return every kernel of the step."""
        listings = [Listing(stage) for stage in range(self._stages)]
        for engine, listing in zip(self._engines[mode], listings, strict=True):
            engine.checks._orders = listing
        self.run(mode)
        for engine in self._engines[mode]:
            engine.checks._orders = FlipOrders()
        return [spot for listing in listings for spot in listing.spots]

    def run(self, mode: Mode, flip: Flip | None = None, at: Spot | None = None) -> Ended:
        """Execute the step from the first state, with a flip at a spot."""
        self._findings: list[Finding] = []
        engines = self._engines[mode]
        for engine, first in zip(engines, self._first, strict=True):
            for flat, value in zip(engine.state.flats(), first, strict=True):
                flat.tensor.copy_(value)
            engine.state.refresh()
            engine.drop_held()
            engine.checks._told_in = -1  # findings of a step are bounded: this is one of its own
            engine.checks.flags.doubted.clear()
        if flip is not None and at is not None:
            engines[at.stage].checks.order("flip", 0, at.place.phase, flip)
        self._compute(engines)
        num_refused = 0
        while any(engine.checks.void for engine in engines):
            num_refused += 1
            for engine in engines:
                engine.drop_held()
            self._compute(engines)
        digests = []
        for engine in engines:
            table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
            engine.reduce(None, table, [0], 0)
            digests += self._digests(engine)
            engine.apply(self._commit(engine), RATE)
            digests.append(bits.digest_of([flat.tensor for flat in engine.state.flats()]))
            digests.append(bits.digest_of([block.compute for block in engine.state.blocks]))
            assert flip is None or engine.checks._orders.is_empty, "the flip found its kernel"
        return Ended(tuple(digests), self._findings, num_refused)

    def _compute(self, engines: list[Engine]) -> None:
        """Compute all types, and execute all checks of them, as before a vote."""
        self._compute_types(engines)
        for engine in engines:
            engine.judge_held()

    def _compute_types(self, engines: list[Engine]) -> None:
        if len(engines) == 1:
            engines[0].compute(TYPES, 0, None)
            return
        pipe = Pipe(self._stages)
        work = [(engine, pipe.end_of(engine.stage)) for engine in engines]
        errors: list[BaseException] = []

        def compute(engine: Engine, chain: Any) -> None:
            try:
                engine.compute(TYPES, 0, chain)
            except BaseException as error:
                errors.append(error)
                pipe.shutdown()

        in_threads(compute, work)
        if errors:
            raise errors[0]

    @staticmethod
    def _digests(engine: Engine) -> list[str]:
        """Digests of what the vote tells, and of the reduced gradient."""
        results = [engine.type_results[shard_type] for shard_type in TYPES]
        gradient = engine._gradient
        squares = [squares for _, squares in gradient._reduced.values()]
        told = [repr((r.loss_sum, r.tokens, r.data, r.statistics)) for r in results]
        return [bits.digest_of([engine.reducer.reduced, *squares]), *told]

    @staticmethod
    def _commit(engine: Engine) -> Commit:
        return Commit(
            step=0,
            norm=1,
            scale=1e-2,
            tokens=1,
            loss=1,
            data="0" * 32,
            statistics=tuple(range(64)) if any(s.stop for s in engine.statistics) else (),
        )
