"""Runs the session for a user's own loop: hands it work, and takes its gradients.

The rank's state machine stays in charge (:mod:`mainstay_train.session.session`). Whenever it
asks for types to be computed, control goes to the user's loop; everything else is
carried out here, inside the loop's own calls. So a step that is interrupted comes back
to the loop as further work, and the loop never sees why.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mainstay_core.base.errors import InvalidSpecError, MainstayError
from mainstay_core.base.shape import Order
from mainstay_core.dmr.settings import CheckRules, Mode, PlanName
from mainstay_core.job import protections
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.program import Action, Op
from mainstay_core.rank.events import Applied, Compute, Event, TodoDone
from mainstay_core.snapshots.job_units import JobUnits
from mainstay_core.wire import rules
from mainstay_core.wire.reinitialisation import Outline
from mainstay_train.base.aborts import JobOver
from mainstay_train.base.device import accelerator_of
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.checks.checker import Checks
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.interpreter import Hook
from mainstay_train.compute.watched import WatchedType
from mainstay_train.exact import draws, fingerprint
from mainstay_train.exact.draws import Address
from mainstay_train.exact.optimizer import OptimizerFactory, Schedule, StageState
from mainstay_train.exact.reduction import PartialStore, Reducer
from mainstay_train.model.job_units import units_of_parts
from mainstay_train.model.plain_model import PlainModel
from mainstay_train.model.workload import USER_ERRORS, WorkloadError, user_code
from mainstay_train.session import failing
from mainstay_train.session.session import Session

logger = logging.getLogger(__name__)


class SessionBroken(RuntimeError):  # noqa: N818 - a state of the session
    """The session itself failed inside a call of the user's loop: not the user's mistake."""


@dataclass(slots=True, kw_only=True)
class LoopTraining:
    """A registered model as the session drives it: one stage, computed by the user's loop."""

    config: JobConfig
    model: PlainModel
    optimizer: OptimizerFactory
    schedule: Schedule
    clip_norm: float | None
    engine: Engine | None = None
    """Made with the first plan."""
    _hook: Hook | None = None

    def learning_rate(self, step: int) -> float:
        """As the registered schedule says."""
        return self.schedule(step)

    def job_units(self) -> JobUnits:
        """The model's layers."""
        with user_code("laying out the model"):
            return units_of_parts(self.model.parts, self.optimizer, self.model.device)

    def outline(self) -> Outline:
        """Nothing: an own loop has one stage, and none beside it."""
        return ()

    def try_blocks(self, rules: CheckRules) -> None:
        """There are none. With checks a loop's works are compared as they come; with a witness
        alone nothing is tried.
        """

    def build_beside(
        self, stage: int, num_stages: int, inner: int, *, masters_only: bool
    ) -> StageState:
        """Never asked for, as no plan orders a fork without an outline."""
        what = f"rank {inner}{', masters alone' if masters_only else ''}"
        raise AssertionError(f"an own loop has no stage {stage} of {num_stages}, {what}")

    def build_guarded(self, end: int) -> tuple[StageState, tuple[slice, ...]]:
        """Never asked for, as there is no other stage."""
        raise AssertionError(f"an own loop guards nothing of stage {end}")

    def build_engine(
        self,
        stage: int,
        num_stages: int,
        inner: int,
        hook: Hook,
        checks: Checks | None = None,
    ) -> Engine:
        """Allocate optimizer state, partials and the reducer."""
        assert inner == 0, "an own loop's stage has one rank"
        with user_code("building the optimizer"):
            state = StageState(self.model.parts, self.optimizer)
        shards_per_lane, device = self.config.shape.shards_per_lane, self.model.device
        self._hook = hook
        self.engine = Engine(
            stage=stage,
            num_stages=num_stages,
            micro_batches=self.config.shape.micro_batches,
            state=state,
            store=PartialStore(state.layout, shards_per_lane, device),
            reducer=Reducer(
                state.layout,
                device,
                self.config.bucket_bytes,
                compares_wire=checks is not None and checks.compares,
            ),
            checks=checks or Checks(),
        )
        return self.engine

    def reach(self, op: Op, address: Address) -> None:
        """A micro-batch is about to be taken through ``op``: progress, and injected faults."""
        assert self._hook is not None
        self._hook(Action(op, 0, address.type, address.micro_batch))


class Driver:
    """Runs the rank's state machine up to where the user's loop has something to do.

    Args:
        settings: who this trainer is.
        device: where it computes.
        backend: of its process groups.
    """

    def __init__(self, settings: TrainerSettings, device: torch.device, backend: str) -> None:
        self.settings, self.config, self.device = settings, settings.config, device
        self._backend = backend
        self.generators = GlobalGenerators()
        self._shell: Session | None = None
        self.training: LoopTraining | None = None
        self._pending: Event | Compute | None = None
        self._watched: WatchedType | None = None
        """What digests the type that other replicas compute, too, while there is one."""

    @property
    def shell(self) -> Session:
        """The state machine's shell, once the loop has begun."""
        assert self._shell is not None
        return self._shell

    @property
    def engine(self) -> Engine:
        """What accumulates and reduces; there is one as soon as there is work."""
        assert self.training is not None
        assert self.training.engine is not None
        return self.training.engine

    def begin(self, extra: dict[str, str]) -> None:
        """Say hello.

        Args:
            extra: entries of the fingerprint, beside those of the machine and the model.
        """
        training = self.training
        assert training is not None
        entries = {**extra, **training.model.fingerprint(), protections.ENTRY_KEY: protections.LOOP}
        entries["reduction"] = f"canonical/{self._backend}"
        hello = {
            "slot": self.settings.slot,
            "incarnation": self.settings.incarnation,
            "pid": os.getpid(),
            "accelerator": accelerator_of(self.device),
            "fingerprint": rules.with_rules(
                fingerprint.fingerprint(self.device, dtype=training.model.dtype, extra=entries)
            ),
        }
        with _own_code():
            self._shell = Session(self.settings, training, self._backend)
            self._shell.start(hello)
            self._pending = self._shell.advance(None)

    def next_work(self) -> Compute | None:
        """Go on until types are to be computed here; None once the job is over."""
        pending = self._until((Compute,))
        if not isinstance(pending, Compute):
            return None
        with _own_code():
            self.shell.prepare()
        self._watched = self.shell.watch(pending.types)
        return pending

    def completed(self, shard_type: int) -> None:
        """All work of a type is done, and its gradient is held."""
        if self._watched is not None:
            self._watched.completed(shard_type, None)

    def commit(self) -> Applied | None:
        """All work is done: go on until a step is applied here, or there is further work."""
        self._pending = TodoDone(self.engine.store.held())
        pending = self._until((Applied, Compute))
        return pending if isinstance(pending, Applied) else None

    @property
    def teller(self) -> Session | failing.Teller:
        """Who tells how the program ends: the session, once there is one."""
        return self._shell if self._shell is not None else failing.Teller(self.settings)

    def _until(self, kinds: tuple[type, ...]) -> Event | Compute | None:
        """Advance to an outcome of one of the kinds; None once the job is over.

        Where there is nothing to compute, that is done at once.
        """
        with _own_code():
            try:
                while self._pending is not None and not isinstance(self._pending, kinds):
                    assert not isinstance(self._pending, Compute)
                    self._pending = self.shell.advance(self._pending)
                    if isinstance(self._pending, Compute) and not self._pending.types:
                        self._pending = TodoDone(self.engine.store.held())
            except JobOver:
                self._pending = None
        return self._pending


def check_job(config: JobConfig) -> None:
    """Refuse a job that asks for what an own loop does not have.

    Raises:
        InvalidSpecError: names the field and what would be right.
    """
    shape = config.shape
    if shape.order is not Order.IN_ORDER:
        raise InvalidSpecError(
            "spec.pipeline.order",
            f"is {shape.order.value}, but an own loop computes the whole model at once, in its own "
            "order; use InOrder, or bring the model as blocks (mainstay_train.workload)",
        )
    if shape.stages != 1:
        raise InvalidSpecError(
            "spec.parallelism.stages",
            f"is {shape.stages}, but an own loop computes the whole model at once and cannot be "
            "cut into stages; use 1, or bring the model as blocks (mainstay_train.workload)",
        )
    if shape.ranks_per_stage != 1:
        raise InvalidSpecError(
            "spec.parallelism.ranksPerStage",
            f"is {shape.ranks_per_stage}, but an own loop has one rank for the whole model; use 1",
        )
    if config.dmr not in (Mode.OFF, Mode.FULL):
        raise InvalidSpecError(
            "spec.detection.dmr.mode",
            f"is {config.dmr.value}, but the passes of an own loop are not known; use Full, which "
            "computes each work twice, or Off, or bring the model as blocks "
            "(mainstay_train.workload)",
        )
    if config.dmr_plan is not PlanName.NAIVE:
        raise InvalidSpecError(
            "spec.detection.dmr.plan",
            f"is {config.dmr_plan_file or config.dmr_plan.value}, but an own loop waits for no "
            "other stage; use Naive, or bring the model as blocks (mainstay_train.workload)",
        )
    if config.recompute:
        raise InvalidSpecError(
            "spec.runtime.recompute",
            "is for models of blocks; in an own loop use torch.utils.checkpoint",
        )
    if config.snapshots is not None and config.snapshots.boundary:
        raise InvalidSpecError(
            "spec.snapshots.replay",
            "is Boundary, but an own loop has no stage that could compute its steps again by "
            "itself; use Gradients",
        )


class GlobalGenerators:
    """Torch's, Python's and (where it is in use) numpy's running generators, set by address.

    So a module that draws from them, as nn.Dropout does, draws the same numbers for the
    same micro-batch on any replica. What is drawn between two works is not addressed:
    that is told once.
    """

    def __init__(self) -> None:
        self._left: torch.Tensor | None = None
        self._told = False

    def set(self, *address: int | str) -> None:
        """From here on they draw what belongs to ``address``."""
        if self._left is not None and not self._told:
            self._told = not torch.equal(self._left, torch.get_rng_state())
            if self._told:
                logger.warning(
                    "the loop draws from torch's global generator outside of a work: such numbers "
                    "differ between replicas and must not enter a gradient"
                )
        self._left = None
        seed = draws.hash64(*address)
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))

    def leave(self) -> None:
        """The work is over: what is drawn from here on belongs to no address."""
        self._left = torch.get_rng_state()


@contextmanager
def _own_code() -> Iterator[None]:
    """Keep bugs of ours, inside the user's function, from counting as the user's mistakes.

    Raises:
        SessionBroken: in place of what would count as one.
    """
    try:
        yield
    except (WorkloadError, InvalidSpecError):
        raise
    except (*USER_ERRORS, MainstayError) as error:
        raise SessionBroken(f"{type(error).__name__}: {error}") from error
