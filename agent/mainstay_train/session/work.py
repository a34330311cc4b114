"""Holds what a user's loop computes at a time, and compares it where each is computed twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.dmr.flips import Execution, Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict, judge
from mainstay_core.planning.program import Op
from mainstay_train.base import device as devices
from mainstay_train.checks.places import Phase, Place
from mainstay_train.compute import purity
from mainstay_train.compute.batches import BATCH
from mainstay_train.compute.loader import Loaded, Loader, Wanted
from mainstay_train.compute.statistics import TypeSums
from mainstay_train.exact.draws import Address
from mainstay_train.kernels import bits
from mainstay_train.model.data import Batch, Dataset
from mainstay_train.model.workload import WorkloadError
from mainstay_train.session.driver import Driver
from mainstay_train.sums import digests

WORK = "work"
"""Stands in findings and flips for a kernel: a loop's gradient and loss of one micro-batch."""
EXECUTIONS = (Execution.PRIMARY, Execution.CHECKER, None)
"""The executions of a work, in the order of its attempts; None: the third one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The outcome of a work."""

    gradients: Mapping[str, torch.Tensor | None]
    """By parameter, of its type; None where the loss does not depend on it."""
    loss: torch.Tensor | float
    tokens: int
    consumed: Digest

    def digest(self) -> str:
        """Return a digest of all of it."""
        there = [gradient for gradient in self.gradients.values() if gradient is not None]
        unused = [name for name, gradient in self.gradients.items() if gradient is None]
        loss = torch.as_tensor(self.loss)
        told = bits.digest_of([*there, loss])
        return f"{told} {self.tokens} {self.consumed.hex()} {unused}"

    def differing(self, other: Done) -> tuple[int, int]:
        """Return the first gradient that is another one, by its place, and elements that differ.

        Parameters on which the loss does not depend are not counted.
        """
        pairs = zip(self.gradients.values(), other.gradients.values(), strict=True)
        there = [(one, two) for one, two in pairs if one is not None and two is not None]
        for place, (one, two) in enumerate(there):
            if not bits.are_equal(one, two):
                return place, bits.count_differing(one, two)
        return 0, 0


class Work:
    """One micro-batch of one shard type: what a loop computes at a time.

    Attributes:
        address: where in the run it is; all that its gradient may depend on, besides the
            parameters.
        device: where it is computed.
        again: whether it was computed before, and is now to be compared: in mode Full each work
            comes twice. What a loop does once for each work, as counting, it leaves out then.
    """

    def __init__(
        self, driver: Driver, dataset: Dataset | None, address: Address, *, again: bool = False
    ) -> None:
        self.address = address
        self.device = driver.device
        self.again = again
        self._outcome: Done | None = None
        self._driver, self._dataset = driver, dataset
        self._consumed = Digest.zero()
        self._batch: Batch | None = None

    def __str__(self) -> str:
        at = self.address
        return f"the work of step {at.step}, type {at.type}, micro-batch {at.micro_batch}"

    @property
    def is_done(self) -> bool:
        """Whether ``done`` was called."""
        return self._outcome is not None

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
        if self._outcome is not None:
            raise WorkloadError(f"{self} is not at hand: call done() once, before the next work")
        value = _scalar(loss, self)
        count = _count(tokens, self)
        driver, training = self._driver, self._driver.training
        assert training is not None
        training.reach(Op.BACKWARD_WEIGHT, self.address)
        gradients = training.model.collect(where=str(self))
        self._outcome = Done(gradients=gradients, loss=value, tokens=count, consumed=self._consumed)
        driver.generators.leave()

    def _free(self) -> None:
        """Let the gradients go: they are added, and a loop may keep the work for longer."""
        if self._outcome is not None:
            self._outcome = replace(self._outcome, gradients={})

    def _begin(self) -> None:
        """Come to hand: random draws are this work's from here on."""
        training = self._driver.training
        assert training is not None
        training.reach(Op.FORWARD, self.address)
        at = self.address
        self._driver.generators.set(at.seed, at.step, at.type, at.micro_batch, "global")
        training.model.begin(lambda: training.reach(Op.BACKWARD_INPUT, at))

    def _take(self, loaded: Loaded | None) -> None:
        if loaded is not None:
            self._batch = loaded.batch
            self._consumed += loaded.consumed

    def _require_batch(self) -> Batch:
        if self._batch is None:
            raise WorkloadError(
                "work.inputs and work.targets need a data set: session.register(..., data=...), "
                "or draw samples with work.sample_ids(count, population)"
            )
        return self._batch


class Attempts:
    """The executions of one work: one, or where works are compared two or three.

    Args:
        driver: whose engine checks.
        dataset: of the loop; None: it reads its data itself.
        address: of the work.
    """

    def __init__(self, driver: Driver, dataset: Dataset | None, address: Address) -> None:
        self._driver, self._dataset, self._address = driver, dataset, address
        self._works: list[Work] = []
        self._flips: list[Flip] = []
        self._loaded: Loaded | None = None
        """The batch of all executions; None: the loop reads its data itself."""
        self._right: Done | None = None

    def finish(self) -> bool:
        """Return whether the work was computed often enough; no further execution begins.

        Raises:
            WorkloadError: as of :meth:`begin`.
            UnreliableDeviceError: as of :meth:`begin`.
        """
        if self._right is None:
            done = self._done()
            return bool(done) and self._judge(done)
        return True

    def begin(self) -> Work | None:
        """Return the next execution, at hand; None: no more is needed, and it is known what counts.

        Raises:
            WorkloadError: three had three results, on a device that computes all else the same.
            UnreliableDeviceError: the same, on another device.
        """
        done = self._done()
        if done and self._judge(done):
            return None
        work = Work(self._driver, self._dataset, self._address, again=bool(done))
        work._begin()
        if not done:
            self._prepare()
        work._take(self._loaded)
        self._works.append(work)
        return work

    def add_to(self, sums: TypeSums) -> None:
        """Add the outcome that counts to the sums of its type."""
        right = self._right
        assert right is not None
        accumulate = self._address.micro_batch > 0
        with torch.no_grad():
            for name, view in self._driver.engine.store.scratch_views.items():
                gradient = right.gradients[name]
                if gradient is None:
                    if not accumulate:
                        view.zero_()
                elif accumulate:
                    view.add_(gradient)
                else:
                    view.copy_(gradient)
        sums.add_loss(right.loss)
        sums.tokens += right.tokens
        sums.data += right.consumed
        self._right = replace(right, gradients={})
        for work in self._works:
            work._free()

    def _prepare(self) -> None:
        """Take the flips of the work, and its batch."""
        at, checks = self._address, self._driver.engine.checks
        place = Place(at.step, Phase.BACKWARD, Pass.WEIGHT, at.type, at.micro_batch)
        self._flips = checks.take(Where.COMPUTE, place, WORK)
        if self._dataset is None:
            return
        place = Place(at.step, Phase.FORWARD, Pass.STEP, at.type, at.micro_batch)
        flips = tuple(checks.take(Where.BATCH, place, BATCH))
        # Compared before a loop sees it: a wrong index would end the loop.
        loader = Loader(self._dataset, self._driver.device, ahead=False, twice=checks.compares)
        loaded = self._loaded = loader.take(Wanted(at, True, flips))
        if loaded.judgement is not None:
            checks.tell(
                place,
                ordinal=0,
                operator=BATCH,
                output=0,
                num_elements=loaded.num_differing,
                judgement=loaded.judgement,
            )

    def _done(self) -> list[Done]:
        """Return what was computed, with the flips of the newest execution put in."""
        done = [work._outcome for work in self._works if work._outcome is not None]
        if done:
            self._put_flips(done[-1], EXECUTIONS[len(done) - 1])
        return done

    def _put_flips(self, outcome: Done, execution: Execution | None) -> None:
        there = [gradient for gradient in outcome.gradients.values() if gradient is not None]
        for flip in self._flips:
            if flip.sticky or (
                execution is not None and flip.execution in (execution, Execution.BOTH)
            ):
                bits.flip_bit(there[flip.output % len(there)], flip.element, flip.bit)

    def _judge(self, done: list[Done]) -> bool:
        """Return whether it is known which outcome counts."""
        checks = self._driver.engine.checks
        if not checks.compares:
            self._right = done[0]
            return True
        if len(done) < 2:
            return False
        told = [outcome.digest() for outcome in done]
        if told[0] == told[1]:
            self._right = done[0]
            return True
        if len(done) < len(EXECUTIONS):
            return False
        judgement = judge(*told, used=False)
        is_unsure = judgement.verdict is Verdict.UNRELIABLE
        if is_unsure and purity.computes_the_same(self._driver.device):
            raise WorkloadError(
                f"{self._works[0]} gave three different gradients or losses; they must be a "
                "function of the parameters and of the work alone, as mode Full computes each twice"
            )
        output, num_elements = done[0].differing(done[1])
        at = self._address
        checks.tell(
            Place(at.step, Phase.BACKWARD, Pass.WEIGHT, at.type, at.micro_batch),
            ordinal=0,
            operator=WORK,
            output=output,
            num_elements=num_elements,
            judgement=judgement,
        )
        self._right = done[0] if judgement.verdict is Verdict.CHECKER_HIT else done[1]
        return True


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
