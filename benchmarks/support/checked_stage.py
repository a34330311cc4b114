"""Takes the steps of one stage of a job, with checks by re-execution, in one process.

Its neighbour is played: each gradient comes a fixed time after the stage begins to wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.plan import Partial
from mainstay_core.wire.votes import Commit
from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment
from mainstay_train.checks.checker import UNCHECKED, Checks
from mainstay_train.checks.planned import WHOLE, Window
from mainstay_train.checks.waiting import WaitingChecks
from mainstay_train.comm.chains import Mark
from mainstay_train.comm.operations import Message, Pending
from mainstay_train.compute import arrivals
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.dmr.run_planner import PlannedStage, RunPlanner, Told
from mainstay_train.model import workload as workloads

SEED = 1
NONE, OFF, PIGGYBACK, NAIVE = "none", "Off", "Piggyback", "Naive"
DYNAMIC, AUTO, FILE = "Dynamic", "Auto", "File"
MODES = {NONE: Mode.OFF, OFF: Mode.OFF, PIGGYBACK: Mode.PIGGYBACK}
"""Of variants; Full for all others."""
PLANS = {AUTO: PlanName.AUTO, FILE: PlanName.FILE}
"""Of variants; Dynamic for all others, which without memory is Naive."""
PROFILE_STEPS = 3
WAITING_BYTES = 1 << 30


class WallClock:
    """Seconds as they pass; a wait sleeps."""

    def __init__(self) -> None:
        self.now_s = time.perf_counter
        self.waited_s = 0.0
        """In all played waits so far, checks included."""

    def wait(self, delay_s: float) -> None:
        """Wait for a message."""
        time.sleep(delay_s)
        self.waited_s += delay_s


class ProcessorClock:
    """Processor time of this thread, and what checks leave of waits: nothing sleeps.

    What else the machine does counts for little. The threads in which a trainer waits for messages
    are not there, so what they cost does not count.
    """

    def __init__(self) -> None:
        self._idle_s = 0.0
        self.waited_s = 0.0
        self._delay_s = 0.0

    def now_s(self) -> float:
        """Return seconds that only grow."""
        return time.thread_time() + self._idle_s

    def wait(self, delay_s: float) -> None:
        """Wait for a message; what was executed meanwhile comes off."""
        self._delay_s = delay_s

    def finish(
        self, group: Any, pending: Pending, waiting: WaitingChecks, window: Window | None = None
    ) -> None:
        """Stand for :func:`mainstay_train.compute.arrivals.finish`."""
        began_s = time.thread_time()
        group.finish(pending)
        delay_s, self._delay_s = self._delay_s, 0.0
        waiting.use(lambda: time.thread_time() - began_s < delay_s, window)
        self._idle_s += max(0.0, delay_s - (time.thread_time() - began_s))
        self.waited_s += delay_s


Clock = WallClock | ProcessorClock


def clock_of(name: str) -> Clock:
    """Return the clock that measures steps."""
    if name == "wall":
        return WallClock()
    clock = ProcessorClock()
    arrivals.finish = clock.finish  # type: ignore[assignment]
    return clock


class PlayedLink:
    """The chain of the first of two stages, whose neighbour is played."""

    tells_sent = True

    def __init__(self, clock: Clock) -> None:
        self.pipeline = self
        self._clock = clock
        self.delay_s = 0.0
        """From the begin of a wait to the message."""

    def send(self, message: Message) -> Pending:
        message.tensor.cpu()  # of a device, as gloo sends from the host's memory
        return Pending(self, message.tensor, None)

    def receive(self, message: Message) -> Pending:
        return Pending(self, message.tensor, message.tensor)

    def send_and_receive(self, sent: Message, received: Message) -> tuple[Pending, Pending]:
        return self.send(sent), self.receive(received)

    def is_completed(self) -> bool:
        return True

    def finish(self, pending: Pending) -> None:
        if pending.into is not None:
            self._clock.wait(self.delay_s)
            pending.into.fill_(1e-3)

    def mark(self, moment: Moment) -> Mark:
        return Mark(moment, True)

    def check(self) -> None:
        """It stands: nobody ends it."""

    def broke(self, error: RuntimeError) -> str:
        del error
        return ""


class Stage:
    """A stage of a job, and its next step.

    Args:
        config: of the model.
        variant: how it is checked.
        clock: measures.
        recompute: whether forwards run again in the backward.
        link: to the second stage; None: there is none.
        num_types: of a step.
        lanes: of the job; the stage computes the types of the first one.
        waiting_bytes: what checks that wait may retain, where some may.
        ordered: the plan of the variant File.
        entrypoint: of the model; empty: the Llama.
        device: where it computes.
    """

    def __init__(
        self,
        config: dict[str, object],
        variant: str,
        clock: Clock,
        *,
        recompute: bool = True,
        link: PlayedLink | None = None,
        num_types: int = 2,
        lanes: int = 1,
        waiting_bytes: int = WAITING_BYTES,
        ordered: Plan | None = None,
        entrypoint: str = "",
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        self._link, self._types = link, tuple(range(num_types))
        self._clock = clock
        num_stages = 1 if link is None else 2
        shape = JobShape(
            lanes=lanes,
            shards_per_lane=num_types,
            replicas=1,
            min_replicas=1,
            stages=num_stages,
            steps=1_000_000,
            seed=SEED,
            micro_batches=1,
        )
        job = JobConfig(
            job=JobUid("bench"),
            name="bench",
            shape=shape,
            entrypoint=entrypoint,
            workload=config,
            recompute=recompute,
        )
        model = workloads.load(entrypoint, config)
        mode = MODES.get(variant, Mode.FULL)
        waits = waiting_bytes if variant in (DYNAMIC, *PLANS) else 0
        plan = PlanName.NAIVE if variant == NAIVE else PLANS.get(variant, PlanName.DYNAMIC)
        self.checks = Checks(mode, tell=self._found, waiting_bytes=waits, plan=plan)
        self.engine = Engine.build(
            model,
            job,
            Loader(model.dataset, device, ahead=False, twice=mode is Mode.FULL),
            stage=0,
            num_stages=num_stages,
            device=device,
            hook=lambda _: None,
            checks=self.checks,
        )
        if variant == NONE:
            assert self.engine.interpreter is not None
            self.engine.interpreter._over = lambda _: nullcontext(UNCHECKED)  # type: ignore[method-assign,assignment,return-value]
        self.engine.state.initialize(SEED)
        self._number = 0
        self.num_findings = 0
        self.shares = ""
        """How checks are planned, once they are."""
        self.planner: RunPlanner | None = None
        if variant in PLANS:
            self.checks.planner = self.planner = self._make_planner(shape, waits, ordered)

    def _make_planner(
        self, shape: JobShape, waiting_bytes: int, ordered: Plan | None
    ) -> RunPlanner:
        """Return what plans the stage's checks, or verifies a plan for them."""
        planned = PlannedStage(
            shape=shape,
            stage=0,
            fingerprint="bench",
            profile_steps=PROFILE_STEPS,
            memory_bytes=waiting_bytes,
        )
        plans = None if ordered is None else {WHOLE: ordered}
        return RunPlanner(
            planned, self.engine, ordered=plans, clock=self._clock.now_s, tell=self._plan
        )

    def _plan(self, told: Told) -> None:
        self.shares = told.shares

    def _found(self, _: object) -> None:
        self.num_findings += 1

    def step(self, *, watched: int | None = None, is_witness: bool = False) -> None:
        """Take a step.

        Args:
            watched: a type of which is told what leaves the stage; None: none is.
            is_witness: whether it is computed behind the others, and dropped.
        """
        engine, number = self.engine, self._number
        engine.drop_held()
        log = None if watched is None else engine.watch(watched, None)
        types = self._types
        if is_witness:
            assert watched is not None
            types = (*types, watched)
        engine.compute(types, number, self._link, log=log)  # type: ignore[arg-type]
        if is_witness:
            assert log is not None
            assert log.account(types[-1]) is not None, "it tells of the type"
            engine.types.drop([p for p in engine.store.held() if p.lane != 0])
        table = [Supply(partial=partial, index=0) for partial in self._own()]
        engine.reduce(None, table, [0], 0)
        self.checks.judge(engine.type_results)  # as before a vote
        counted = max((where.stop for where in engine.statistics), default=0)
        commit = Commit(
            step=number,
            norm=1,
            scale=1e-3,
            tokens=1,
            loss=1,
            data="0" * 32,
            statistics=(1,) * counted,
        )
        engine.apply(commit, 1e-3)
        devices.moment(self._device).wait()
        self._number += 1

    def _own(self) -> list[Partial]:
        return [partial for partial in self.engine.store.held() if partial.lane == 0]

    def seconds(self, step: Callable[[], None] | None = None) -> float:
        """Return how long a step takes."""
        began_s = self._clock.now_s()
        (step or self.step)()
        return self._clock.now_s() - began_s
