"""One rank of a chain that computes a step again and again, with checks and without."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.dmr.witness import Account
from mainstay_core.job.config import BUCKET_BYTES, JobConfig
from mainstay_core.planning.routes import Way
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.votes import Commit
from mainstay_train.checks.checker import NOWHERE, Checks
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.planned import NO_STANDING, WHOLE, Standing
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.dmr.cell_trials import COMPUTED_WITH, STATE, WIRE
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner, Told
from mainstay_train.exact import numerics
from mainstay_train.kernels import bits
from mainstay_train.model import workload as workloads
from mainstay_train.model.blocks import Block

LLAMA, MOE = "mainstay_train.models.llama:workload", "mainstay_train.models.moe:workload"
SMALL = {"dim": 16, "layers": 1, "heads": 2, "kvHeads": 1, "hidden": 24, "sequence": 8}
EXPERTS = SMALL | {
    "denseLayers": 0,
    "experts": 4,
    "activeExperts": 2,
    "sharedExperts": 1,
    "expertHidden": 8,
}
NARROW = {"dtype": "bfloat16"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama fp32": (LLAMA, SMALL),
    "Llama bf16": (LLAMA, SMALL | NARROW),
    "Llama dropout": (LLAMA, SMALL | {"dropout": 0.1}),
    "experts fp32": (MOE, EXPERTS),
    "experts bf16": (MOE, EXPERTS | NARROW),
}
SEED, RATE, SCALE = 3, 0.01, 1e-2
FINGERPRINT = "flips"
TYPES = (0, 1, 2)
"""Two lie in one lane, so that a partial is a sum."""
PROFILED = 2
"""Steps that a plan is made from, where one is made."""
MUCH, LITTLE = 1 << 30, 3000
"""Bytes that checks which wait may keep."""
BATCH, COLLECTIVE = "batch", "sum of inner ranks"
OUTPUTS, ELEMENTS, BITS = 3, 1 << 20, 64
"""Bounds of what is drawn; modulo what a kernel has."""


class Variant(enum.Enum):
    """The ways in which a step is checked."""

    OFF = "Off"
    NAIVE = "Full, Naive"
    DYNAMIC = "Full, Dynamic"
    AUTO = "Full, Auto"
    PIGGYBACK = "Piggyback"

    @property
    def mode(self) -> Mode:
        """The mode of checks."""
        return {Variant.OFF: Mode.OFF, Variant.PIGGYBACK: Mode.PIGGYBACK}.get(self, Mode.FULL)

    @property
    def first_only(self) -> bool:
        """Whether some kernels have no second execution into which a bit could be put."""
        return self in (Variant.AUTO, Variant.PIGGYBACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, and how it is cut and computed."""

    model: str
    recompute: float = 0.0
    """Share of the blocks."""
    stages: int = 1
    inner: int = 1
    """Ranks of a stage."""
    micro_batches: int = 1
    waiting_bytes: int = MUCH
    order: Order = Order.IN_ORDER
    """In which micro-batches pass the stages."""
    cells: int = 1
    """Of a stage. Where there are several, there is one stage, of one rank."""
    bucket_bytes: int = BUCKET_BYTES

    def __str__(self) -> str:
        inner = f", {self.inner} inner ranks" if self.inner > 1 else ""
        inner += f", {self.cells} cells" if self.cells > 1 else ""
        inner += "" if self.order is Order.IN_ORDER else ", swapped"
        stages = f"{self.stages} stage" + ("s" if self.stages > 1 else "")
        return f"{self.model}, recompute {self.recompute:g}, {stages}{inner}"


@dataclass(frozen=True, slots=True)
class Spot:
    """One place of a step where a flip can be put in."""

    rank: int
    """Of the chain: by stage, then by inner rank. Where a stage has several cells, the cell."""
    place: Place
    ordinal: int | None
    kernel: str
    where: Where
    part: StatePart | None = None
    """Of the state, if it is there."""
    is_computed_with: bool = False
    """Whether gradients are computed with that part."""

    @property
    def kind(self) -> str:
        """The name of its class."""
        place = self.place
        if self.where is not Where.COMPUTE:
            state = COMPUTED_WITH if self.is_computed_with else STATE
            return {Where.BATCH: BATCH, Where.WIRE: WIRE, Where.STATE: state}[self.where]
        if self.kernel.startswith("_c10d_functional"):
            return COLLECTIVE
        if (place.phase, place.in_pass) == (Phase.BACKWARD, Pass.FORWARD):
            return "recompute"
        if place.in_pass is Pass.STEP:
            return "sums of types" if place.phase is Phase.BACKWARD else place.phase.value
        return f"{place.in_pass.value} pass"

    def flip(self, rng: random.Random, *, first_only: bool) -> Flip:
        """Draw a wrong bit of it; ``first_only``: in the execution whose value goes on."""
        place = self.place
        is_executed = self.where in (Where.COMPUTE, Where.BATCH)
        others = [] if first_only or not is_executed else [Execution.CHECKER]
        return Flip(
            in_pass=place.in_pass,
            shard_type=place.shard_type,
            micro_batch=place.micro_batch,
            block=place.block,
            operator=self._operator,
            output=rng.randrange(OUTPUTS),
            element=rng.randrange(ELEMENTS),
            bit=rng.randrange(BITS),
            execution=rng.choice([Execution.PRIMARY, Execution.PRIMARY, *others]),
            where=self.where,
            part=self.part,
        )

    @property
    def _operator(self) -> int | str | None:
        if self.where is not Where.COMPUTE:
            return None
        return self.kernel if self.ordinal is None else self.ordinal


class Listing(FlipOrders):
    """Notes every place in place of flips."""

    is_empty = False  # type: ignore[assignment] # so that there is a scope

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.spots: list[Spot] = []

    def take(
        self, place: Place, ordinal: int | None, kernel: str, where: Where = Where.COMPUTE
    ) -> list[Flip]:
        """Note a place."""
        self.spots.append(Spot(self._rank, place, ordinal, kernel, where))
        return []


Outcome = tuple[tuple[str, ...], tuple[Finding | str, ...]]
"""Digests of what the vote tells and of the state after the step; findings, and why votes of
several cells were refused."""


def job_of(setting: Setting) -> JobConfig:
    """Return the job whose chain is tried."""
    entrypoint, config = MODELS[setting.model]
    if setting.inner > 1:
        config = config | {"kvHeads": setting.inner}  # they are split among the ranks
    is_swapped = setting.order is not Order.IN_ORDER
    if is_swapped:
        config = config | {"layers": setting.stages}  # twins have equal numbers of them
    shape = JobShape(
        lanes=max(2, setting.cells),
        shards_per_lane=2,
        replicas=setting.cells,
        min_replicas=1,
        stages=setting.stages,
        ranks_per_stage=setting.inner,
        ranks_per_pod=setting.inner,
        steps=1_000_000,
        seed=SEED,
        micro_batches=setting.micro_batches,
        order=setting.order,
        cut=Cut.EQUAL if is_swapped else Cut.BALANCED,
    )
    return JobConfig(
        job=JobUid("flips"),
        name="flips",
        shape=shape,
        entrypoint=entrypoint,
        workload=config,
        device="cpu",
        recompute=setting.recompute > 0,
        recompute_share=setting.recompute or 1.0,
        bucket_bytes=setting.bucket_bytes,
    )


class RankTrials:
    """One rank of a chain under one variant of checks.

    Args:
        setting: of the chain.
        rank: which, by stage, then by inner rank; or which cell.
        variant: how it is checked.
    """

    def __init__(self, setting: Setting, rank: int, variant: Variant) -> None:
        self._rank, self._findings = rank, list[Finding]()
        stage, inner = divmod(rank, setting.inner) if setting.cells == 1 else (0, 0)
        job = job_of(setting)
        numerics.setup("cpu")
        workload = workloads.load(job.entrypoint, job.workload)
        loader = Loader(workload.dataset, ahead=False, twice=variant.mode is Mode.FULL)
        training = BlockTraining(workload=workload, config=job, device="cpu", loader=loader)
        waits = variant in (Variant.DYNAMIC, Variant.AUTO)
        waiting_bytes = setting.waiting_bytes if waits else 0
        checks = Checks(
            variant.mode,
            tell=self._findings.append,
            waiting_bytes=waiting_bytes,
            plan=PlanName.AUTO if variant is Variant.AUTO else PlanName.DYNAMIC,
        )
        self._engine: Engine = training.build_engine(
            stage, setting.stages, inner, lambda _: None, checks
        )
        self._engine.state.initialize(SEED)
        self._variant, self._shape, self._memory = variant, job.shape, waiting_bytes
        self._ordered: dict[Way, Plan] | None = None
        self._attach()
        self._first = [flat.tensor.clone() for flat in self._engine.state.flats()]

    @property
    def engine(self) -> Engine:
        """What computes."""
        return self._engine

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those since the last reset."""
        return tuple(self._findings)

    def _attach(self) -> None:
        """Have the next steps planned, where a plan is made."""
        if self._variant is Variant.AUTO:
            stage = PlannedStage(
                shape=self._shape,
                stage=self._engine.stage,
                fingerprint=FINGERPRINT,
                profile_steps=PROFILED,
                memory_bytes=self._memory,
            )
            self._engine.checks.planner = RunPlanner(
                stage, self._engine, ordered=self._ordered, clock=time.perf_counter, tell=self._plan
            )

    def renew(self, plan: Plan | None = None) -> None:
        """Be as a rank that has just come: no block was ever called, and no plan was made.

        Args:
            plan: one that was made offline, to follow; None: one is made.
        """
        named = None if plan is None else replace(plan, fingerprint=FINGERPRINT)
        self._ordered = None if named is None else {WHOLE: named}
        self._attach()
        for block in self._engine.state.blocks:
            assert isinstance(block, Block)
            block._checked = False

    def standing(self) -> Standing:
        """Return how far it has come with its plan."""
        planner = self._engine.checks.planner
        return NO_STANDING if planner is None else planner.standing

    def _plan(self, told: Told) -> None:
        """Take note of the plan that is followed from now on."""
        expected = PlanName.AUTO if self._ordered is None else PlanName.FILE
        assert told.plan == expected.value, told.reason

    def reset(self) -> None:
        """Go back to the first state; nothing is found or ordered."""
        engine = self._engine
        for flat, value in zip(engine.state.flats(), self._first, strict=True):
            flat.tensor.copy_(value)
        engine.state.refresh()
        engine.drop_held()
        engine.checks.void.clear()
        engine.checks.take_orders(FlipOrders())
        self._findings.clear()

    def order(self, flip: Flip, phase: Phase) -> None:
        """Have a flip put into the step 0."""
        self._engine.checks.order("drawn", 0, phase, flip)

    def listen(self) -> None:
        """Note the places of the next step."""
        self._engine.checks.take_orders(Listing(self._rank))

    def heard(self) -> list[Spot]:
        """Return what was noted."""
        listing = self._engine.checks._orders
        assert isinstance(listing, Listing)
        return listing.spots

    def compute(self, chain: Any, step: int) -> bool:
        """Compute all types; return whether one is void."""
        self._engine.checks.begin_step(step)
        self._engine.compute(TYPES, step, chain)
        self._engine.judge_held()  # as before a vote: no check waits any longer
        return bool(self._engine.checks.void)

    def tell(self, chain: Any, step: int, shard_type: int) -> Account | None:
        """Compute a type, as a witness does, and tell of it."""
        self._engine.checks.begin_step(step)
        watched = self._engine.watch(shard_type, None)
        self._engine.compute((shard_type,), step, chain, None, watched)
        return watched.account(shard_type)

    def drop(self) -> None:
        """Forget what was computed."""
        self._engine.drop_held()

    def finish(self, step: int) -> Outcome:
        """Reduce, vote and apply; return what came of the step."""
        engine = self._engine
        table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
        engine.reduce(None, table, [0], 0)
        ballot = engine.ballot(None, table, 0, NOWHERE, "", step)
        masters = engine.apply(_commit(step, engine), RATE)
        blocks = [block.compute for block in engine.state.blocks]
        state = bits.digest_of([*(flat.tensor for flat in engine.state.flats()), *blocks])
        engine.drop_held()
        return (repr(replace(ballot, rest="")), masters, state), self.findings


def _commit(step: int, engine: Engine) -> Commit:
    """Return a commit with the same numbers whatever the step has come to."""
    counts = any(where.stop for where in engine.statistics)
    return Commit(
        step=step,
        norm=1.0,
        scale=SCALE,
        tokens=1,
        loss=0.0,
        data="0" * 32,
        statistics=tuple(range(64)) if counts else (),
    )


def prepare_torch() -> None:
    """Compute as trainers do."""
    torch.set_num_threads(1)
    numerics.setup("cpu")


def variants_of(setting: Setting) -> Sequence[Variant]:
    """Return the variants of checks that a setting can have, without Off."""
    full = [Variant.NAIVE, Variant.DYNAMIC]
    # What draws its numbers is checked at once, and no plan is made of it.
    full += [] if "dropout" in setting.model else [Variant.AUTO]
    # With several cells it is drawn what they exchange and compare, which Piggyback does not check.
    return [*full, Variant.PIGGYBACK] if setting.recompute and setting.cells == 1 else full
