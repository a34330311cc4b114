"""Makes a trainer's plan of checks from the first steps of its stage.

The first step of an engine makes what is kept, as tables of rotations, and is not counted. In each
of the next ones the first micro-batch is recorded, while all of it is checked at once; waits are
measured of every micro-batch. Then the static planner plans, or the plan of a file is verified.

Whatever goes wrong costs time alone: what no plan has wait is checked at once. But a plan from a
file that cannot be used as a job starts fails it: whoever named it can mend that then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from mainstay_core.base.errors import InvalidSpecError, MainstayError, brief
from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count
from mainstay_core.dmr.coverage import UncoveredError
from mainstay_core.dmr.operators import Origin, Pass
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.profiles import Profile
from mainstay_core.dmr.schedule import (
    FIELD,
    NEXT_RECV_B,
    RefusedPlanError,
    Schedule,
    follow,
    plan_here,
)
from mainstay_core.dmr.settings import PLANNED, PlanName
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import Op
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.planned import NO_STANDING, Flow, Orders, Seen, Spot, Standing, Window
from mainstay_train.compute.engine import Engine
from mainstay_train.dmr.cells import CellProfile, agreed, number_of
from mainstay_train.dmr.ordered_plans import read_plan_file
from mainstay_train.dmr.passage import declare_stage
from mainstay_train.dmr.profiler import WAITS, fullest_of, make_profile, plan_windows
from mainstay_train.dmr.recorder import Passage, PassageRecord
from mainstay_train.dmr.timers import Clock, timer_of
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

        A stage has several micro-batches in flight (1F1B), and each may retain as much.
        """
        in_flight = min(self.num_passages, self.shape.stages - self.stage)
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
            ordered = read_plan_file(config.dmr_plan_file, engine.stage, fingerprint)
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


def _tell_naive(stage: int, error: MainstayError, tell: Callable[[Told], None]) -> None:
    reason = f"no plan is followed: {brief(error)}"
    logger.warning("checks of stage %d stay naive: %s", stage, reason)
    tell(Told(plan=PlanName.NAIVE.value, shares="naive 100 %", reason=reason))


@contextmanager
def _refused_if_it_fails(what: str) -> Iterator[None]:
    """Have what is raised by mistake meanwhile, where no code of a user runs, cost time alone."""
    try:
        yield
    except (UncoveredError, RefusedPlanError, InvalidSpecError):
        raise
    except Exception as error:
        logger.exception("it has failed %s", what)
        raise RefusedPlanError(f"it has failed {what}: {brief(error)}") from error


class RunPlanner:
    """Records the first steps of a trainer's stage, and says what its plan is then.

    Args:
        planned: which stage.
        engine: computes it.
        ordered: the plan that the job names; None: the static planner makes one.
        clock: returns seconds that only grow.
        tell: called with what is executed from then on.
        starts: whether a plan that the job names and that cannot be used fails it.
    """

    def __init__(
        self,
        planned: PlannedStage,
        engine: Engine,
        *,
        ordered: Plan | None,
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
        self._first: Flow | None = None
        self._recording: _Recording | None = None
        """Of the program that runs; None: it is not recorded."""
        self._plan_number = 0
        """Says which plan is followed; 0: none is."""
        self._recorded: list[_Recording] = []
        self._waits: dict[str, list[float]] = {}
        self._was_recorded = False
        """Whether the program was recorded whose gradient is reduced next."""
        self.profile: Profile | None = None
        """Of the recorded steps, once there is one."""

    @property
    def standing(self) -> Standing:
        """How far it has come. The ranks of a cell record, plan and follow their plan together."""
        progress = (self._is_warm, len(self._recorded), self._is_over, self._plan_number)
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
        self._recorded, self._waits = [], {}

    def begin_program(self, first: Flow | None) -> Orders | None:
        """A program begins; return what the plan says, once there is one.

        Raises:
            InvalidSpecError: the plan that the job names cannot be used.
        """
        if self._is_over or first is None:
            return self._orders
        if self._problem or len(self._recorded) == self._planned.profile_steps:
            self._decide()
            return self._orders
        self._first, self._recording = first, None
        if self._is_warm:
            self._recording = _Recording(self._engine.first_block, self._device, self._clock)
            blocks = [block for block in self._engine.state.blocks if isinstance(block, Block)]
            declare_stage(self._recording.record, blocks, self._engine.store)
        return None

    def end_program(self, *, completed: bool) -> None:
        """A program has ended."""
        recording, self._recording = self._recording, None
        self._was_recorded = completed and recording is not None
        if self._is_over or self._first is None:
            return
        self._first = None
        self._is_warm = self._is_warm or completed
        if recording is None or not completed:
            return
        self._problem = recording.problem
        if not self._problem:
            recording.finish()
            self._recorded.append(recording)
            for name, waits in recording.waits.items():
                self._waits.setdefault(name, []).extend(waits)

    def seen(self, flow: Flow) -> Seen | None:
        """Return who sees a micro-batch's passage; None: nobody does."""
        return self._recording if flow == self._first else None

    def received(self, window: Window, tensor: torch.Tensor, wait_s: float) -> None:
        """Note what came from another stage, and how long it was waited for."""
        recording = self._recording
        if recording is None:
            return
        recording.note_wait(window, wait_s)
        if window.flow == self._first:
            kind = "activation" if window.op is Op.RECV_F else "gradient"
            recording.record.declare(tensor, f"received {kind}", Origin.RECEIVED)

    def reduced(self, waited_s: float) -> None:
        """Note for how long the cell has waited for others in a reduction."""
        if self._was_recorded:
            self._waits.setdefault("REDUCE", []).append(waited_s)
        self._was_recorded = False

    def sent(self, flow: Flow, tensor: torch.Tensor) -> None:
        """Note what goes to another stage."""
        if self._recording is not None and flow == self._first:
            self._recording.record.add_result(tensor)

    def passed(self, flow: Flow, results: Sequence[object]) -> None:
        """A passage is over."""
        if self._recording is None:
            return
        self._recording.has_passed = True
        if flow == self._first:
            for result in (self._engine.store.scratch, *results):
                if isinstance(result, torch.Tensor):
                    self._recording.record.add_result(result)

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
            profile = self.profile = self._agree()
            self._is_over = True
            if self._ordered is None:
                with _refused_if_it_fails("to plan"):
                    plan, schedule = plan_here(profile)
            else:
                plan, schedule = follow(profile, self._ordered)
        except (UncoveredError, RefusedPlanError, InvalidSpecError) as error:
            self._is_over = True
            self._give_up(error)
            return
        self._starts = False  # what comes later must not fail a job in its middle
        fullest = self._recorded[self._fullest()]
        self._orders = _orders_of(schedule, fullest.spots, self._engine.first_block)
        self._plan_number = number_of(plan)
        totals = plan.totals
        how = "planned from" if self._ordered is None else "verified against"
        reason = (
            f"{how} {count(len(self._recorded), 'step')}: "
            f"{totals.exposed_s:.3g} s of {totals.operator_s:.3g} s a passage are exposed, "
            f"{totals.peak_bytes} of {plan.budget_bytes} bytes are retained at most"
        )
        self._tell(Told(plan=name.value, shares=schedule.shares, reason=reason))
        logger.info("checks of stage %d: %s; %s", self._planned.stage, schedule.shares, reason)

    def _agree(self) -> Profile:
        """Return the profile of the stage; with several ranks to a stage that of all of them.

        Raises:
            RefusedPlanError: a rank cannot be described, or they are not alike.
            InvalidSpecError: the same of a rank alone.
        """
        if self._engine.inner.size == 1:
            if self._problem:
                raise RefusedPlanError(self._problem)
            return self._make_profile()
        profile, problem = None, self._problem
        try:
            profile = None if problem else self._make_profile()
        except InvalidSpecError as error:
            problem = error.message
        ordered = "" if self._ordered is None else str(number_of(self._ordered))
        mine = CellProfile(problem=problem, ordered=ordered, profile=profile)
        return agreed(mine, self._engine.inner)

    def _give_up(self, error: MainstayError) -> None:
        if self._ordered is not None and self._starts:
            raise InvalidSpecError(
                FIELD, f"the plan of stage {self._planned.stage} is refused: {brief(error)}"
            ) from error
        _tell_naive(self._planned.stage, error, self._tell)

    def _fullest(self) -> int:
        passages = [recording.passage for recording in self._recorded]
        return passages.index(fullest_of(passages))

    def _make_profile(self) -> Profile:
        planned, passages = self._planned, [recording.passage for recording in self._recorded]
        budget_bytes = planned.budget_bytes
        lengths = dict.fromkeys(WAITS, (0.0, 0.0))  # of those that have not come
        lengths |= {name: (median(waits), min(waits)) for name, waits in self._waits.items()}
        windows = plan_windows(
            fullest_of(passages),
            stage=planned.stage,
            num_stages=planned.shape.stages,
            num_passages=planned.num_passages,
            replicas=planned.shape.replicas,
            lengths=lengths,
            headroom_bytes=budget_bytes,
        )
        return make_profile(
            passages,
            fingerprint=planned.fingerprint,
            stage=planned.stage,
            budget_bytes=budget_bytes,
            windows=windows,
        )


class _Recording:
    """The recording of one program: a passage, and the waits of all.

    Args:
        first_block: of the stage, by its number in the model.
        device: where it computes.
        clock: returns seconds that only grow.
    """

    def __init__(self, first_block: int, device: torch.device, clock: Clock) -> None:
        self.record = PassageRecord(timer_of(device, clock))
        self.passage = Passage()
        self.spots: dict[Spot, str] = {}
        """Names of operators."""
        self.waits: dict[str, list[float]] = {}
        self.problem = ""
        """Why the passage cannot be described; empty: it can."""
        self.has_passed = False
        """Whether some micro-batch's passage is over."""
        self._first_block = first_block

    def finish(self) -> None:
        """Take the passage for complete."""
        self.passage = self.record.finish()

    def note_wait(self, window: Window, wait_s: float) -> None:
        """Note the length of a wait: before a passage is over none of them is behind one."""
        names = ["RECV_B"] if window.op is Op.RECV_B else []
        if self.has_passed:
            names.append(NEXT_RECV_B if window.op is Op.RECV_B else "RECV_F")
        for name in names:
            self.waits.setdefault(name, []).append(wait_s)

    def __enter__(self) -> object:
        self.record.host_reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.record.host_reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def enter(self, place: Place) -> None:
        """Say which pass comes next."""
        if place.block is None or place.in_pass is Pass.STEP:
            self.record.leave()
            return
        again = place.phase is Phase.BACKWARD and place.in_pass is Pass.FORWARD
        number = self._first_block + place.block
        self.record.enter(number, place.name or "", place.in_pass, again=again)

    def begin(self) -> None:
        """A call begins."""
        self.record.begin()

    def end(self) -> None:
        """It was given to the device."""
        self.record.end()

    def exchange(self, given: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """See what inner ranks have computed together, and what this one has given for it."""
        self.record.exchange(given, result)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, spot: Spot | None) -> None:
        """See a call that has been made."""
        if self.problem:
            return
        try:
            with _refused_if_it_fails("to record a kernel"):
                name = self.record.see(func, args, kwargs, result)
        except (InvalidSpecError, RefusedPlanError) as error:
            self.problem = brief(error)  # the step goes on: it is checked at once
            return
        if name is not None and spot is not None:
            self.spots[spot] = name


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
