"""Makes a trainer's plan of checks from the first steps of its stage.

The first step of an engine makes what is kept, as tables of rotations, and is not counted. In each
of the next ones the first micro-batch is recorded, while all of it is checked at once; waits are
measured of every micro-batch. Then the static planner plans, or the plan of a file is verified.
In a swapped pipeline half of the micro-batches pass a stage at an end twice: of these the first one
is recorded as well, and they have a plan of their own.

Whatever goes wrong costs time alone: what no plan has wait is checked at once. But a plan from a
file that cannot be used as a job starts fails it: whoever named it can mend that then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from mainstay_core.base.errors import InvalidSpecError, MainstayError, brief
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.base.words import count
from mainstay_core.dmr.coverage import UncoveredError
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.schedule import (
    COMPILED_IMPRINT,
    FIELD,
    RefusedPlanError,
    Schedule,
    follow,
    plan_here,
)
from mainstay_core.dmr.settings import PLANNED, PlanName
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.routes import Way, name_of, ways_of
from mainstay_train.checks.planned import (
    NO_STANDING,
    WHOLE,
    Flow,
    Orders,
    Seen,
    Spot,
    Standing,
    Window,
)
from mainstay_train.compute.engine import Engine
from mainstay_train.dmr.cells import CellProfile, agreed, number_of
from mainstay_train.dmr.ordered_plans import read_plan_file
from mainstay_train.dmr.passage import declare_stage
from mainstay_train.dmr.profiler import (
    WAITS,
    fullest_of,
    make_profile,
    plan_routed_windows,
    plan_windows,
)
from mainstay_train.dmr.recordings import ProgramWaits, Recording, refused_if_it_fails
from mainstay_train.dmr.timers import Clock
from mainstay_train.kernels import imprints
from mainstay_train.model.blocks import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The checks that a trainer executes from now on."""

    plan: str
    """The plan that is carried out: Auto, File, or Naive where none is."""
    shares: str
    """How operator time is checked, by method; empty before there is a plan."""
    reason: str
    """Why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """The stage that is planned, and what the job says of its plan."""

    shape: JobShape
    stage: int
    fingerprint: str
    profile_steps: int
    memory_bytes: int
    """What checks that wait may retain in a rank."""

    @property
    def num_passages(self) -> int:
        """Return how many micro-batches a chain computes in a step."""
        shape = self.shape
        return max(1, shape.num_types * shape.micro_batches // shape.replicas)

    @property
    def budget_bytes(self) -> int:
        """Return what checks of one passage may retain.

        A stage has several micro-batches in flight, and each may retain as much.
        """
        in_flight = min(self.num_passages, self.shape.flows_under_way(self.stage))
        return self.memory_bytes // max(1, in_flight)


def plan_stage(
    config: JobConfig,
    engine: Engine,
    fingerprint: str,
    tell: Callable[[Told], None],
    *,
    starts: bool,
) -> RunPlanner | None:
    """Return what plans a stage's checks, or verifies their plan; None in a job without plans.

    Args:
        config: of the job.
        engine: of the stage.
        fingerprint: of the job.
        tell: called with what is executed, once that is known.
        starts: whether the job starts: in its middle a plan that cannot be used is given up, and
            all is checked at once.

    Raises:
        InvalidSpecError: the plan that the job names cannot be used, as it starts.
    """
    if config.dmr_plan not in PLANNED:
        return None
    ordered = None
    if config.dmr_plan is PlanName.FILE:
        try:
            ordered = _read_plans(config, engine.stage, fingerprint)
        except InvalidSpecError as error:
            if starts:
                raise
            _tell_naive(engine.stage, error, tell)
            return None
    planned = PlannedStage(
        shape=config.shape,
        stage=engine.stage,
        fingerprint=fingerprint,
        profile_steps=config.dmr_profile_steps,
        memory_bytes=config.dmr_memory_bytes,
    )
    return RunPlanner(
        planned, engine, ordered=ordered, clock=time.perf_counter, tell=tell, starts=starts
    )


def _read_plans(config: JobConfig, stage: int, fingerprint: str) -> dict[Way, Plan]:
    """Return the plans that a job names for a stage, one for each way of micro-batches through it.

    Raises:
        InvalidSpecError: one of them cannot be used.
    """
    ways = ways_of(config.shape.order, stage, config.shape.stages)
    path = config.dmr_plan_file
    return {way: read_plan_file(path, stage, fingerprint, name_of(way)) for way in ways}


def _tell_naive(stage: int, error: MainstayError, tell: Callable[[Told], None]) -> None:
    reason = f"no plan is followed: {brief(error)}"
    logger.warning("checks of stage %d stay naive: %s", stage, reason)
    tell(Told(plan=PlanName.NAIVE.value, shares="naive 100 %", reason=reason))


class RunPlanner:
    """Records the first steps of a trainer's stage, and says what its plan is then.

    Args:
        planned: which stage.
        engine: computes it.
        ordered: the plans that the job names, one for each way of micro-batches through the stage;
            None: the static planner makes them.
        clock: returns seconds that only grow.
        tell: called with what is executed from then on.
        starts: whether a plan that the job names and that cannot be used fails it.
    """

    def __init__(
        self,
        planned: PlannedStage,
        engine: Engine,
        *,
        ordered: Mapping[Way, Plan] | None,
        clock: Clock,
        tell: Callable[[Told], None],
        starts: bool = True,
    ) -> None:
        self._starts = starts
        self._planned, self._engine, self._ordered = planned, engine, ordered
        self._clock, self._tell = clock, tell
        self._device = engine.reducer.reduced.device
        self._orders: Orders | None = None
        self._is_over, self._is_warm, self._problem = False, False, ""
        self._firsts: Mapping[Way, Flow] = {}
        self._recordings: dict[Flow, Recording] = {}
        """Of the program that runs; empty: it is not recorded."""
        self._plan_number = 0
        """Says which plans are followed; 0: none is."""
        self._num_recorded = 0
        """Programs."""
        self._recorded: dict[Way, list[Recording]] = {}
        self._program_waits = ProgramWaits()
        self._waits: dict[str, list[float]] = {}
        self._was_recorded = False
        """Whether the program was recorded whose gradient is reduced next."""
        self.profiles: dict[Way, Profile] = {}
        """Of the recorded steps, once there are any."""

    @property
    def standing(self) -> Standing:
        """How far it has come. The ranks of a cell record, plan and follow their plan together."""
        progress = (self._is_warm, self._num_recorded, self._is_over, self._plan_number)
        return (*progress, bool(self._problem))

    def align(self, standings: Sequence[Standing]) -> None:
        """Begin anew, as all ranks of the cell do, if one of them has not come as far.

        One that has no planner takes part in nothing that they do for a plan: then there is none.
        """
        if NO_STANDING in standings:
            if not self._is_over:
                error = RefusedPlanError("another rank of the cell can make or follow no plan")
                _tell_naive(self._planned.stage, error, self._tell)
            self._begin_anew()
            self._is_over = True
        elif len({standing[:-1] for standing in standings}) > 1:
            self._begin_anew()
        elif any(standing[-1] for standing in standings) and not self._problem:
            self._problem = "another rank of the cell cannot be described"

    def _begin_anew(self) -> None:
        self._orders, self._plan_number, self._problem = None, 0, ""
        self._is_over, self._is_warm, self._starts = False, False, False
        self._num_recorded, self._recorded, self._waits = 0, {}, {}

    def begin_program(self, firsts: Mapping[Way, Flow]) -> Orders | None:
        """A program begins; return what the plan says, once there is one.

        Raises:
            InvalidSpecError: the plan that the job names cannot be used.
        """
        if self._is_over or not firsts:
            return self._orders
        if self._problem or self._num_recorded == self._planned.profile_steps:
            self._decide()
            return self._orders
        self._firsts, self._recordings, self._program_waits = firsts, {}, ProgramWaits()
        if self._is_warm:
            blocks = [block for block in self._engine.state.blocks if isinstance(block, Block)]
            for flow in firsts.values():
                recording = Recording(self._engine.first_block, self._device, self._clock)
                _, micro_batch = flow
                declare_stage(recording.record, blocks, self._engine.store, adds=micro_batch > 0)
                self._recordings[flow] = recording
        return None

    def end_program(self, *, completed: bool) -> None:
        """A program has ended."""
        recordings, self._recordings = self._recordings, {}
        self._was_recorded = completed and bool(recordings)
        if self._is_over or not self._firsts:
            return
        firsts, self._firsts = self._firsts, {}
        self._is_warm = self._is_warm or completed
        if not recordings or not completed:
            return
        self._problem = next((r.problem for r in recordings.values() if r.problem), "")
        if self._problem:
            return
        self._num_recorded += 1
        for way, flow in firsts.items():
            recordings[flow].finish()
            self._recorded.setdefault(way, []).append(recordings[flow])
        for name, waits in self._program_waits.lengths.items():
            self._waits.setdefault(name, []).extend(waits)

    def seen(self, flow: Flow) -> Seen | None:
        """Return who sees a micro-batch's passage; None: nobody does."""
        return self._recordings.get(flow)

    def received(self, window: Window, tensor: torch.Tensor, wait_s: float) -> None:
        """Note what came from another stage, and how long it was waited for."""
        if self._recordings:
            self._program_waits.note(window, wait_s)
        if window.flow in self._recordings:
            self._recordings[window.flow].receive(window, tensor)

    def reduced(self, waited_s: float) -> None:
        """Note for how long the cell has waited for others in a reduction."""
        if self._was_recorded:
            self._waits.setdefault("REDUCE", []).append(waited_s)
        self._was_recorded = False

    def sent(self, flow: Flow, tensor: torch.Tensor) -> None:
        """Note what goes to another stage."""
        if flow in self._recordings:
            self._recordings[flow].record.add_result(tensor)

    def passed(self, flow: Flow, results: Sequence[object]) -> None:
        """A passage is over."""
        self._program_waits.has_passed = True
        if flow in self._recordings:
            for result in (self._engine.store.scratch, *results):
                if isinstance(result, torch.Tensor):
                    self._recordings[flow].record.add_result(result)

    def now_s(self) -> float:
        """Return seconds that only grow."""
        return self._clock()

    def _decide(self) -> None:
        """Plan from what was recorded, or go on with all checks at once.

        Raises:
            InvalidSpecError: the plan that the job names cannot be used.
        """
        name = PlanName.AUTO if self._ordered is None else PlanName.FILE
        try:
            # Each rank of a cell has recorded the same ways, and all take them in one order.
            ways = sorted(self._recorded) or [WHOLE]
            self.profiles = {way: self._agree(way) for way in ways}
            self._is_over = True
            planned = [self._plan(way, profile) for way, profile in self.profiles.items()]
        except (UncoveredError, RefusedPlanError, InvalidSpecError) as error:
            self._is_over = True
            self._give_up(error)
            return
        self._starts = False  # what comes later must not fail a job in its middle
        self._orders, shares, reasons = None, [], []
        for way, (plan, schedule) in zip(ways, planned, strict=True):
            fullest = self._recorded[way][self._fullest(way)]
            orders = _orders_of(schedule, fullest.spots, self._engine.first_block)
            self._orders = orders if self._orders is None else self._orders.beside(orders)
            self._plan_number ^= number_of(plan)
            totals, of = plan.totals, f" ({', '.join(way)})" if len(ways) > 1 else ""
            shares.append(schedule.shares + of)
            reasons.append(
                f"{totals.exposed_s:.3g} s of {totals.operator_s:.3g} s a passage{of} are exposed, "
                f"{totals.peak_bytes} of {plan.budget_bytes} bytes are retained at most"
            )
        how = "planned from" if self._ordered is None else "verified against"
        reason = f"{how} {count(self._num_recorded, 'step')}: {'; '.join(reasons)}"
        told = Told(plan=name.value, shares="; ".join(shares), reason=reason)
        self._tell(told)
        logger.info("checks of stage %d: %s; %s", self._planned.stage, told.shares, reason)

    def _plan(self, way: Way, profile: Profile) -> tuple[Plan, Schedule]:
        """Return the plan of a profile, and what a trainer does of it.

        Args:
            way: of the passages.
            profile: of them.

        Raises:
            UncoveredError: the plan that the job names breaks the rule of coverage.
            RefusedPlanError: a trainer cannot carry it out.
        """
        imprint = COMPILED_IMPRINT if self._device.type != "cpu" else imprints.price()
        if self._ordered is not None:
            return follow(profile, self._ordered[way], imprint)
        with refused_if_it_fails("to plan"):
            return plan_here(profile, imprint)

    def _agree(self, way: Way) -> Profile:
        """Return the profile of passages; with several ranks to a stage that of all of them.

        Args:
            way: of the passages.

        Raises:
            RefusedPlanError: a rank cannot be described, or they are not alike.
            InvalidSpecError: the same of a rank alone.
        """
        if self._engine.inner.size == 1:
            if self._problem:
                raise RefusedPlanError(self._problem)
            return self._make_profile(way)
        profile, problem = None, self._problem
        try:
            profile = None if problem else self._make_profile(way)
        except InvalidSpecError as error:
            problem = error.message
        ordered = "" if self._ordered is None else str(number_of(self._ordered[way]))
        mine = CellProfile(problem=problem, ordered=ordered, profile=profile)
        return agreed(mine, self._engine.inner)

    def _give_up(self, error: MainstayError) -> None:
        if self._ordered is not None and self._starts:
            raise InvalidSpecError(
                FIELD, f"the plan of stage {self._planned.stage} is refused: {brief(error)}"
            ) from error
        _tell_naive(self._planned.stage, error, self._tell)

    def _fullest(self, way: Way) -> int:
        passages = [recording.passage for recording in self._recorded[way]]
        return passages.index(fullest_of(passages))

    def _make_profile(self, way: Way) -> Profile:
        planned, shape = self._planned, self._planned.shape
        passages = [recording.passage for recording in self._recorded[way]]
        budget_bytes = planned.budget_bytes
        lengths = dict.fromkeys(WAITS, (0.0, 0.0))  # of those that have not come
        lengths |= {name: (median(waits), min(waits)) for name, waits in self._waits.items()}
        if shape.order is Order.IN_ORDER:
            windows = plan_windows(
                fullest_of(passages),
                stage=planned.stage,
                num_stages=shape.stages,
                num_passages=planned.num_passages,
                replicas=shape.replicas,
                lengths=lengths,
                headroom_bytes=budget_bytes,
            )
        else:
            windows = plan_routed_windows(
                fullest_of(passages),
                num_passages=planned.num_passages,
                replicas=shape.replicas,
                lengths=lengths,
                headroom_bytes=budget_bytes,
            )
        return make_profile(
            passages,
            fingerprint=planned.fingerprint,
            stage=planned.stage,
            budget_bytes=budget_bytes,
            windows=windows,
            way=name_of(way),
        )


def _orders_of(schedule: Schedule, spots: Mapping[Spot, str], first_block: int) -> Orders:
    later = {spot: schedule.later[name] for spot, name in spots.items() if name in schedule.later}
    places: dict[str, list[Spot]] = {}
    for spot, name in spots.items():
        if name in schedule.parts:
            places.setdefault(name, []).append(spot)
    # An operator that runs again has a place in both phases. They are in the order of execution.
    parts = {
        found[-1 if part.in_recompute else 0]: part
        for name, found in places.items()
        for part in (schedule.parts[name],)
    }
    piggyback = frozenset(block - first_block for block in schedule.piggyback)
    cheap = frozenset(spot for spot, name in spots.items() if name in schedule.cheap)
    return Orders(later, parts, piggyback, cheap)
