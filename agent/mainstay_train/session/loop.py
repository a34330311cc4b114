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

import torch
from torch import nn

from mainstay_core.base.digest import Digest
from mainstay_core.base.words import count
from mainstay_core.planning.program import Op
from mainstay_core.rank.events import Applied
from mainstay_core.wire.votes import Commit
from mainstay_train.base import device as devices
from mainstay_train.base.decorator import Loop
from mainstay_train.compute.statistics import TypeResult, TypeSums
from mainstay_train.exact import digests
from mainstay_train.exact import optimizer as optimizers
from mainstay_train.exact.draws import Address
from mainstay_train.model.data import Batch, Dataset, consumed_digest
from mainstay_train.model.plain_model import PlainModel
from mainstay_train.model.workload import WorkloadError, user_code
from mainstay_train.session.driver import Driver, LoopTraining, check_job

__all__ = ["LoopSession", "Step", "Work"]


class Work:
    """One micro-batch of one shard type: what a loop computes at a time.

    Attributes:
        address: where in the run it is; all that its gradient may depend on, besides the
            parameters.
        device: where it is computed.
    """

    def __init__(self, driver: Driver, dataset: Dataset | None, address: Address) -> None:
        self.address = address
        self.device = driver.device
        self._driver, self._dataset = driver, dataset
        self._sums: TypeSums | None = None
        self._consumed = Digest.zero()
        self._batch: Batch | None = None

    def __str__(self) -> str:
        at = self.address
        return f"the work of step {at.step}, type {at.type}, micro-batch {at.micro_batch}"

    @property
    def inputs(self) -> torch.Tensor:
        """The registered data set's inputs (``Batch.tokens``) of this micro-batch."""
        return devices.sent(self._require_batch().tokens, self.device)

    @property
    def targets(self) -> torch.Tensor:
        """The registered data set's targets of this micro-batch."""
        return devices.sent(self._require_batch().targets, self.device)

    def generator(self, site: str = "") -> torch.Generator:
        """A fresh CPU generator for this work, for random draws of the loop's own.

        Args:
            site: what is drawn; equal sites draw equal numbers.
        """
        return self.address.generator(f"loop/{site}")

    def sample_ids(self, count: int, population: int) -> tuple[int, ...]:
        """Draw which samples this work takes, for a loop that reads its data itself.

        Uniform, with replacement. They enter the digest of the consumed data.

        Args:
            count: samples wanted.
            population: samples that there are; ids are 0..population-1.
        """
        ids = tuple(self.address.hash64(f"sample/{i}") % population for i in range(count))
        at = self.address
        name = f"data:{at.step}/{at.type}/{at.micro_batch}"
        self._consumed += digests.tensor_digest(name, torch.tensor(ids, dtype=torch.int64))
        return ids

    def done(self, loss: torch.Tensor | float, tokens: int) -> None:
        """The backward pass of this work has run: take its gradients.

        Args:
            loss: what backward was called on, a sum over tokens (or samples), never a mean:
                the division by the step's count happens once, after the reduction.
            tokens: how many tokens (or samples) the sum counts.

        Raises:
            WorkloadError: out of turn, or what the backward pass left is not one gradient.
        """
        if self._sums is None:
            raise WorkloadError(f"{self} is not at hand: call done() once, before the next work")
        value = _scalar(loss, self)
        count = _count(tokens, self)
        driver, training = self._driver, self._driver.training
        assert training is not None
        training.reach(Op.BACKWARD_WEIGHT, self.address)
        store = driver.engine.store
        training.model.deliver(
            store.scratch_views, accumulate=self.address.micro_batch > 0, where=str(self)
        )
        self._sums.add_loss(value)
        self._sums.tokens += count
        self._sums.data += self._consumed
        self._sums = None
        driver.generators.leave()

    def _begin(self, sums: TypeSums) -> None:
        """Come to hand: random draws are this work's from here on."""
        training = self._driver.training
        assert training is not None
        training.reach(Op.FORWARD, self.address)
        at = self.address
        self._driver.generators.set(at.seed, at.step, at.type, at.micro_batch, "global")
        if self._dataset is not None:
            self._batch = self._dataset.batch(at)
            self._consumed += consumed_digest(at, self._batch)
        training.model.begin(lambda: training.reach(Op.BACKWARD_INPUT, at))
        self._sums = sums

    def _require_batch(self) -> Batch:
        if self._batch is None:
            raise WorkloadError(
                "work.inputs and work.targets need a data set: session.register(..., data=...), "
                "or draw samples with work.sample_ids(count, population)"
            )
        return self._batch


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
        self._committed = False

    def work(self) -> Iterator[Work]:
        """What is to be computed, one micro-batch at a time, in the order that it adds up in.

        Raises:
            WorkloadError: the work before is not done, or the step is committed.
        """
        if self._committed:
            raise WorkloadError(f"step {self.number} is committed: it has no more work")
        self._settle()
        while self._left:
            shard_type, micro_batch = self._left[0]
            address = Address(self._driver.config.shape.seed, self.number, shard_type, micro_batch)
            work = Work(self._driver, self._dataset, address)
            work._begin(self._sums.setdefault(shard_type, TypeSums()))
            self._at_hand = work
            yield work
            if self._at_hand is work:
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

    def _settle(self) -> None:
        """The work at hand must be done; a type whose last one it was is complete."""
        work, self._at_hand = self._at_hand, None
        if work is None:
            return
        if work._sums is not None:
            raise WorkloadError(f"{work} is not done: call work.done(loss, tokens) after backward")
        shard_type, micro_batch = self._left.pop(0)
        if micro_batch == self._last:
            engine = self._driver.engine
            sums = self._sums.pop(shard_type)
            engine.type_results[shard_type] = TypeResult(
                loss_sum=sums.loss_sum, tokens=sums.tokens, data=sums.data.hex()
            )
            engine.store.complete(shard_type)


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


def _count(tokens: object, work: Work) -> int:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise WorkloadError(f"tokens of {work} must be a whole number from 0, got {tokens!r}")
    return tokens


def _scalar(loss: object, work: Work) -> torch.Tensor | float:
    """Return the loss; a tensor's value is not looked at."""
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1 or loss.is_complex():
            raise WorkloadError(
                f"the loss of {work} must be one number, a sum over tokens; got a tensor of shape "
                f"{tuple(loss.shape)} of {loss.dtype}"
            )
        return loss.detach().reshape(())
    if isinstance(loss, int | float):
        return float(loss)
    raise WorkloadError(f"the loss of {work} must be a tensor, got {type(loss).__name__}")
