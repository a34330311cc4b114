"""Serves a training loop of the user's own, on a plain nn.Module (design section 6).

::

    @mainstay_train.loop
    def train(session):
        model = ...
        session.register(model, learning_rate=3e-4, data=dataset)
        for step in session.steps():
            for work in step.work():
                loss = loss_sum(model(work.inputs), work.targets)
                loss.backward()
                work.done(loss, tokens=work.targets.numel())
            step.commit()

It is exact through failures as long as the gradient of a work is a function of the
parameters and of the work alone. docs/own-loop.md says what follows from that.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mainstay_core.base.words import count
from mainstay_core.rank.events import Applied
from mainstay_core.wire.votes import Commit
from mainstay_train.base.decorator import Loop
from mainstay_train.checks.places import Phase
from mainstay_train.compute.statistics import TypeResult, TypeSums
from mainstay_train.exact import optimizer as optimizers
from mainstay_train.exact.draws import Address
from mainstay_train.model.data import Dataset
from mainstay_train.model.plain_model import PlainModel
from mainstay_train.model.workload import WorkloadError, user_code
from mainstay_train.session.driver import Driver, LoopTraining, check_job
from mainstay_train.session.work import Attempts, Work

__all__ = ["LoopSession", "Step", "Work"]


class Step:
    """One optimizer step, as far as this replica has to compute it.

    After a failure the same step comes again, with what the lost replicas had not done.

    Attributes:
        number: of the step, from 0.
        types: shard types that are computed here, in order.
    """

    def __init__(
        self, driver: Driver, dataset: Dataset | None, number: int, types: tuple[int, ...]
    ) -> None:
        self.number, self.types = number, types
        self._driver, self._dataset = driver, dataset
        micro_batches = driver.config.shape.micro_batches
        self._left = [(t, m) for t in types for m in range(micro_batches)]
        self._last = micro_batches - 1
        self._sums: dict[int, TypeSums] = {}
        self._at_hand: Work | None = None
        self._attempts: Attempts | None = None
        self._committed = False

    def work(self) -> Iterator[Work]:
        """What is to be computed, one micro-batch at a time, in the order that it adds up in.

        In mode Full each comes twice, the second time with ``work.again``, and a third time where
        the two differ.

        Raises:
            WorkloadError: the work before is not done, or the step is committed; or three
                executions of a work had three results, as they would on any device.
        """
        if self._committed:
            raise WorkloadError(f"step {self.number} is committed: it has no more work")
        self._settle()
        while self._left:
            attempts = Attempts(self._driver, self._dataset, self._address())
            while (work := attempts.begin()) is not None:
                self._at_hand, self._attempts = work, attempts
                yield work
                if self._at_hand is not work:
                    break  # it was settled by a further call
                self._require_done(work)
            else:
                self._settle()

    def commit(self) -> Commit | None:
        """All work is done: reduce, vote and apply, together with the other replicas.

        Returns:
            Loss, norm and count of the step. None when it is not applied here yet because
            replicas were lost meanwhile: ``session.steps()`` then yields what is missing.

        Raises:
            WorkloadError: there is work left, or the step is committed already.
        """
        if self._committed:
            raise WorkloadError(f"step {self.number} is committed already")
        self._settle()
        if self._left:
            left = count(len(self._left), "micro-batch", "micro-batches")
            raise WorkloadError(
                f"commit of step {self.number} with {left} left: go through all of step.work()"
            )
        self._committed = True
        applied = self._driver.commit()
        here = isinstance(applied, Applied) and applied.commit.step == self.number
        return applied.commit if applied is not None and here else None

    def _address(self) -> Address:
        """Return the place of the next work."""
        return Address(self._driver.config.shape.seed, self.number, *self._left[0])

    @staticmethod
    def _require_done(work: Work) -> None:
        if not work.is_done:
            raise WorkloadError(f"{work} is not done: call work.done(loss, tokens) after backward")

    def _settle(self) -> None:
        """The work at hand must be done; a type whose last one it was is complete.

        A work that was not computed as often as it has to be comes again.
        """
        work, attempts = self._at_hand, self._attempts
        self._at_hand = self._attempts = None
        if work is None or attempts is None:
            return
        self._require_done(work)
        if not attempts.finish():
            return
        shard_type, micro_batch = self._left.pop(0)
        engine = self._driver.engine
        sums = self._sums.setdefault(shard_type, TypeSums())
        with engine.checks.over(Phase.BACKWARD, self.number, shard_type, micro_batch):
            attempts.add_to(sums)
            if micro_batch == self._last:
                del self._sums[shard_type]
                engine.type_results[shard_type] = TypeResult(
                    loss_sum=sums.loss_sum, tokens=sums.tokens, data=sums.data.hex()
                )
                engine.store.complete(shard_type)
        if micro_batch == self._last:
            self._driver.completed(shard_type)


class LoopSession:
    """The session that a user's own loop gets.

    Attributes:
        config: ``workload.config`` of the TrainingJob.
        args: ``workload.args``.
        device: where this trainer computes.
        seed: ``training.seed``.
        num_steps: ``training.steps``.
    """

    def __init__(self, driver: Driver) -> None:
        config = driver.config
        self.config: Mapping[str, Any] = dict(config.workload)
        self.args = list(config.args)
        self.device = driver.device
        self.seed, self.num_steps = config.shape.seed, config.shape.steps
        self._driver = driver
        self._dataset: Dataset | None = None
        self._fingerprint: dict[str, str] = {}
        self._at: Step | None = None
        self._begun = self._over = False

    @property
    def leads(self) -> bool:
        """Whether this replica is the quorum's first: it writes what is to be written once."""
        return self._begun and self._driver.shell.leads

    def register(
        self,
        model: nn.Module,
        *,
        learning_rate: optimizers.Schedule | float,
        optimizer: optimizers.OptimizerFactory | None = None,
        clip_norm: float | None = 1.0,
        data: Dataset | None = None,
        allow_unused: bool = False,
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        """Hand the model over: its parameters move into flat buffers and change at commits only.

        Args:
            model: any module; its values now are those of version 0, and must be equal on
                all replicas. Torch's generators are seeded for that before the loop is called.
            learning_rate: by step (from 0), or a constant.
            optimizer: as of a Workload; ``mainstay_train.optimizer.each(torch.optim.RMSprop,
                alpha=0.9)`` makes one of torch's. AdamW if left out.
            clip_norm: bound on the global norm of the mean gradient; None does not clip.
            data: samples by address, for ``work.inputs`` and ``work.targets``.
            allow_unused: a parameter may be without a gradient in a micro-batch.
            fingerprint: further texts that must be equal on all replicas, e.g. of the data
                that the loop reads itself.

        Raises:
            WorkloadError: the model cannot be trained exactly, or there is one already.
        """
        driver = self._driver
        if driver.training is not None:
            raise WorkloadError("session.register was called twice: a session trains one model")
        if not callable(learning_rate):
            learning_rate = optimizers.constant(float(learning_rate))
        driver.training = LoopTraining(
            config=driver.config,
            model=PlainModel(model, self.device, allow_unused=allow_unused),
            optimizer=optimizer or optimizers.adamw(),
            schedule=learning_rate,
            clip_norm=clip_norm,
        )
        self._dataset = data
        self._fingerprint = {f"loop.{name}": text for name, text in (fingerprint or {}).items()}
        if data is not None:
            self._fingerprint["data"] = data.fingerprint()

    def steps(self) -> Iterator[Step]:
        """The steps of the job in which this replica has something to compute.

        Waits until this trainer has a place; ends when the job is complete. A step comes
        again after a failure, and a replica that was away goes on where the others are.

        Raises:
            WorkloadError: no model is registered, or a step was left without its commit.
        """
        driver = self._driver
        if driver.training is None:
            raise WorkloadError("session.steps() before session.register(model, ...)")
        if self._begun:
            raise WorkloadError("session.steps() was called twice: a job is one loop")
        driver.begin(self._fingerprint)
        self._begun = True
        while (compute := driver.next_work()) is not None:
            self._at = Step(driver, self._dataset, driver.shell.version, compute.types)
            yield self._at
            if not self._at._committed:
                raise WorkloadError(
                    f"step {self._at.number} was not committed: call step.commit() after its work"
                )
        self._over = True

    def _close(self) -> None:
        """The user's function has returned."""
        if not self._begun:
            raise WorkloadError("the loop returned without going through session.steps()")
        if not self._over:
            at = self._at.number if self._at is not None else 0
            raise WorkloadError(
                f"the loop was left in step {at} of {self.num_steps}: go on until session.steps() "
                "ends; training.steps says how long a job is"
            )


def run(loop: Loop[LoopSession], driver: Driver) -> None:
    """Run a user's loop until the job is complete.

    Raises:
        InvalidSpecError: the job asks for what an own loop does not have.
        WorkloadError: the loop failed, as it would on any replica.
    """
    check_job(driver.config)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the trainer's log is a file
    driver.generators.set(driver.config.shape.seed, "loop")
    session = LoopSession(driver)
    with user_code(f"the loop {driver.config.entrypoint}"):
        try:
            loop(session)
        except RuntimeError as error:
            if any(text in str(error) for text in _CERTAIN_MISTAKES):
                raise WorkloadError(str(error)) from error
            raise
    session._close()


_CERTAIN_MISTAKES = (
    "Trying to backward through the graph a second time",
    "does not require grad and does not have a grad_fn",
    "a leaf Variable that requires grad is being used in an in-place operation",
    "shapes cannot be multiplied",
)
"""What torch says, as a RuntimeError, of mistakes that are the same on any hardware."""
