"""Runs the compute part of a step's program; knows no policy (design section 6).

Patch and ordinary work are programs of the same actions. Types complete in the
program's order; a type enters its partial when the last of its micro-batches has
delivered its weight gradients, so an interruption leaves whole types only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mainstay_core.base.errors import brief
from mainstay_core.base.shape import Order
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import judge_raised
from mainstay_core.job.recompute import num_recomputed
from mainstay_core.planning.program import Action, Op, closing
from mainstay_core.planning.routes import blocks_of
from mainstay_train.base import device as devices
from mainstay_train.base.frames import roomy
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.scopes import UNCHECKED, Scope
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.mesh import SINGLE, InnerMesh
from mainstay_train.compute.batches import Batches
from mainstay_train.compute.boundaries import Recomputed, SentLog
from mainstay_train.compute.cell_checks import CellChecks
from mainstay_train.compute.doubts import Doubts
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.micro_batch import MicroBatch, as_received
from mainstay_train.compute.statistics import TypeResult, TypeSums
from mainstay_train.compute.transfers import Transfers, visit_of
from mainstay_train.exact.draws import Address
from mainstay_train.exact.reduction import PartialStore
from mainstay_train.kernels.dispatch import key_of
from mainstay_train.model.blocks import Block, Tape
from mainstay_train.model.workload import USER_ERRORS, Workload

Hook = Callable[[Action], None]
"""Called before each action: progress, fault injection."""
Deliver = Callable[[int], None]
"""Called with a block's number, from the last block to the first, once its weights have their
gradients of a program's last type."""


class Interpreter:
    """The compute engine of one cell.

    Args:
        workload: where shapes come from.
        loader: where samples come from.
        blocks: this stage's blocks, in model order.
        stage: this cell's stage.
        num_stages: stages of a chain.
        seed: the job's seed.
        num_steps: of the job: nothing is loaded ahead beyond them.
        micro_batches: per type.
        store: where complete types go.
        results: what is learnt of complete types goes here.
        recompute: share of the blocks, the first ones, whose forwards run again in the backward
            instead of keeping tapes.
        hook: called before each action.
        inner: this rank's place in its cell; its neighbours have the same.
        order: in which micro-batches pass the stages.
        checks: of what is computed; None: nothing is checked.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        loader: Loader,
        blocks: Sequence[Block],
        stage: int,
        num_stages: int,
        seed: int,
        num_steps: int,
        micro_batches: int,
        store: PartialStore,
        results: dict[int, TypeResult],
        recompute: float,
        hook: Hook,
        inner: InnerMesh = SINGLE,
        order: Order = Order.IN_ORDER,
        checks: Checks | None = None,
    ) -> None:
        self._checks = checks or Checks()
        self._doubts = Doubts(self._checks, num_stages, inner.size)
        self._scope: Scope = UNCHECKED
        self._workload, self._blocks = workload, tuple(blocks)
        self._checks.begin_stage(block.compute for block in blocks)
        self._stage, self._num_stages = stage, num_stages
        self._seed = seed
        self._store, self._results = store, results
        self._num_recomputed = num_recomputed(recompute, len(self._blocks))
        self._hook, self._inner = hook, inner
        self._device = blocks[0].device
        self._batches = Batches(
            loader,
            seed=seed,
            num_steps=num_steps,
            loads=stage in (0, num_stages - 1),
            tells_data=stage == 0 and inner.counts_copies,
            checks=self._checks,
        )
        self._step = 0
        self._visits: dict[tuple[int, int, int], MicroBatch] = {}
        """Micro-batches in this stage, by flow and place on its route."""
        self._sums: dict[int, TypeSums] = {}
        self._transfers = Transfers(
            num_stages=num_stages,
            micro_batches=micro_batches,
            order=order,
            inner=inner,
            make=lambda: self.make_activation(self._device),
            checks=self._checks,
        )
        self._chain: ChainGroups | None = None
        self._deliver: Deliver | None = None
        self._log: SentLog | None = None
        self._again: Recomputed | None = None
        self._closing: frozenset[Action] = frozenset()
        """The actions in which blocks are delivered."""
        self._completing: frozenset[Action] = frozenset()  # with these a type is complete
        self._passing: frozenset[Action] = frozenset()  # with these a micro-batch's passage is over
        self._adds_at_once = True
        """Whether a backward may add weight gradients that a later action would add."""
        self._undelivered = 0
        self._cell = CellChecks(self._checks, self._blocks, inner)
        self._run_op = self._handlers()

    def follow(self) -> None:
        """Compute by what the checks say from now on: they have changed."""
        self._checks.begin_stage(block.compute for block in self._blocks)
        self._batches.follow()

    def _handlers(self) -> dict[Op, Hook]:
        """Return what carries out each kind of action."""
        return {
            Op.RECV_F: self._recv_f,
            Op.FORWARD: self._forward,
            Op.SEND_F: self._send_f,
            Op.RECV_B: self._recv_b,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.SEND_B: self._send_b,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.READ_F: self._read_f,
            Op.READ_B: self._read_b,
            Op.WRITE_F: self._write_f,
            Op.WRITE_B: self._write_b,
        }

    @roomy
    def run(
        self,
        program: Sequence[Action],
        step: int,
        chain: ChainGroups | None,
        deliver: Deliver | None = None,
        *,
        log: SentLog | None = None,
        again: Recomputed | None = None,
        part_of: Sequence[Action] = (),
    ) -> None:
        """Run a program of one step; complete types are in the store, whatever happens.

        A device may still compute them. Their marks say which of them count.

        Args:
            program: actions of this stage.
            step: the step whose samples are used.
            chain: the groups of the rank's chain; None for a chain of one rank.
            deliver: where finished blocks of the last type go; None: nobody waits for them.
            log: keeps what is sent to neighbours; None: nothing does.
            again: of a step that is computed again; None: it is not.
            part_of: the program of which this one is a part; empty: it is whole.

        Raises:
            GroupEnded: the chain broke; types in flight are dropped.
        """
        self._step, self._chain, self._deliver = step, chain, deliver
        self._log, self._again, self._undelivered = log, again, len(self._blocks)
        self._transfers.begin(chain, program)
        self._closing = frozenset(closing(program) if deliver is not None else ())
        adds = [action for action in program if action.op is Op.BACKWARD_WEIGHT]
        self._completing = frozenset({action.type: action for action in adds}.values())
        self._passing = frozenset({visit_of(action)[:2]: action for action in adds}.values())
        self._adds_at_once = may_add_at_once(part_of or program)
        self._batches.expect(program, step, is_again=again is not None)
        self._checks.settle(self._results)  # of an earlier program, after which nothing was reduced
        self._checks.judge(self._results)
        self._doubts.begin(step, is_again=again is not None)
        self._checks.void.difference_update(action.type for action in program)
        is_done = False
        try:
            self._cell.begin(program, is_again=again is not None)
            for action in program:
                self._hook(action)
                for receive in action.starts:
                    self._transfers.start(receive)
                self._run_op[action.op](action)
                self._transfers.let_go()
            self._transfers.finish()
            is_done = True
        finally:
            self._checks.end_program(completed=is_done)
            self._batches.drop()
            self._visits.clear()
            self._sums.clear()
            self._transfers.clear()
            self._deliver = self._log = self._again = None
            if again is not None or not is_done:
                # Nothing is reduced with others: what waits has no more waits to come.
                self._checks.settle(self._results)

    @property
    def _lowest(self) -> int:
        return 0 if self._again is None else self._again.lowest

    def _flow(self, action: Action) -> MicroBatch:
        key = visit_of(action)
        if key not in self._visits:
            address = Address(self._seed, self._step, action.type, action.micro_batch)
            self._visits[key] = MicroBatch(address)
        return self._visits[key]

    def _recv_f(self, action: Action) -> None:
        self._flow(action).output = self._transfers.received(action)

    def _recv_b(self, action: Action) -> None:
        self._flow(action).gradient = self._transfers.received(action)

    def _read_f(self, action: Action) -> None:
        self._flow(action).output = self._read(action)

    def _read_b(self, action: Action) -> None:
        self._flow(action).gradient = self._read(action)

    def _write_f(self, action: Action) -> None:
        self._note_sent(action, (flow := self._flow(action)).output)
        flow.output = None

    def _write_b(self, action: Action) -> None:
        flow = self._flow(action)
        self._note_sent(action, flow.gradient)
        flow.gradient = None

    def _note_sent(self, action: Action, tensor: torch.Tensor | None) -> None:
        assert tensor is not None
        if self._log is not None:
            self._log.sent(action, tensor.contiguous())

    def _read(self, action: Action) -> torch.Tensor:
        assert self._again is not None, "only a replay reads logs"
        tensor = self.make_activation(self._device)
        self._again.read(action, tensor)
        return tensor

    def make_activation(self, device: torch.device | str) -> torch.Tensor:
        """Return memory for what crosses a stage's boundary in a micro-batch."""
        shape, dtype = self._workload.activation_shape, self._workload.dtype
        return torch.empty(shape, dtype=dtype, device=device)

    def _send_f(self, action: Action) -> None:
        flow = self._flow(action)
        assert flow.output is not None
        self._send(action, flow.output)
        flow.output = None

    def _send_b(self, action: Action) -> None:
        flow = self._flow(action)
        assert flow.gradient is not None
        self._send(action, flow.gradient)
        flow.gradient = None

    def _send(self, action: Action, tensor: torch.Tensor) -> None:
        contiguous = tensor.contiguous()
        self._note_sent(action, contiguous)
        self._checks.sent((action.type, action.micro_batch), contiguous)
        self._transfers.send(action, contiguous)

    def _forward(self, action: Action) -> None:
        flow = self._flow(action)
        x = flow.output
        if self._batches.takes(action):
            flow.loaded = self._batches.take(flow.address)
            sums = self._sums.setdefault(action.type, TypeSums())
            sums.data += flow.loaded.consumed
        with self._doubts.over(action, flow), self._over(action):
            if action.visit == 0:
                assert flow.loaded is not None
                x = devices.sent(flow.loaded.batch.tokens, self._device)
            assert x is not None
            flow.output = self._enter_blocks(flow, x, self._extent_of(action))
        if flow.is_void:
            flow.output = self.make_activation(self._device).zero_()
        self._batches.has_computed()

    @contextmanager
    def _over(self, action: Action) -> Iterator[Scope]:
        phase = Phase.FORWARD if action.op is Op.FORWARD else Phase.BACKWARD
        of = action.type, action.micro_batch, action.visit, action.extent
        self._scope = self._checks.over(phase, self._step, *of)
        try:
            with self._scope as scope:
                yield scope
        finally:
            self._scope = UNCHECKED

    def _extent_of(self, action: Action) -> range:
        """The numbers of the stage's blocks through which an action leads."""
        is_last = self._stage == self._num_stages - 1
        is_first = self._stage == 0
        return blocks_of(action.extent, len(self._blocks), is_first=is_first, is_last=is_last)

    def _enter_blocks(self, flow: MicroBatch, x: torch.Tensor, numbers: range) -> torch.Tensor:
        """Take a micro-batch forward through blocks."""
        lowest = self._lowest
        for number in numbers:
            block = self._blocks[number]
            self._scope.enter(Pass.FORWARD, number, block.name)
            if block.spec.is_last:
                x = self._enter_loss(flow, block, x)
            elif number < lowest:
                with self._twice():
                    x = as_received(block.forward(x, flow.address))
            elif number < self._num_recomputed:
                x = self._received(self._recomputable(flow, number, block, x))
            else:
                with self._twice():
                    tape = block.recompute(x, flow.address)
                flow.tapes.append(tape)
                assert tape.output is not None
                x = self._received(tape.output.detach())
        return x

    def _received(self, output: torch.Tensor) -> torch.Tensor:
        """Return what the next block gets of a block's output; no recompute copies that again."""
        with self._twice():
            return as_received(output)

    def _twice(self) -> AbstractContextManager[None]:
        return self._scope.twice() if self._checks.piggybacks else nullcontext()

    def _recomputable(
        self, flow: MicroBatch, number: int, block: Block, x: torch.Tensor
    ) -> torch.Tensor:
        notes, as_recomputed = self._cell.notes(number), self._checks.as_recomputed
        if not notes or self._inner.size > 1:  # alone no inner rank can repeat a collective
            return flow.forward(block, x, self._scope, as_recomputed=as_recomputed, notes=notes)
        inputs, records = [*flow.inputs], [*flow.records]
        try:
            return flow.forward(block, x, self._scope, as_recomputed=True, notes=True)
        except (*USER_ERRORS, RuntimeError) as error:  # a wrong index raises, for instance
            raised = error
        flow.inputs, flow.records = inputs, records
        self._scope.enter(Pass.FORWARD, number, block.name)
        output = flow.forward(block, x, self._scope, as_recomputed=True, notes=True)
        of = flow.address.type, flow.address.micro_batch, number, block.name
        self._checks.tell(
            Place(self._step, Phase.FORWARD, Pass.FORWARD, *of),
            ordinal=0,
            operator="forward",
            output=0,
            num_elements=0,
            judgement=judge_raised(f"{type(raised).__name__}: {brief(raised)}"),
        )
        return output

    def _enter_loss(self, flow: MicroBatch, block: Block, x: torch.Tensor) -> torch.Tensor:
        assert flow.loaded is not None
        targets = devices.sent(flow.loaded.batch.targets, self._device)
        with self._twice():
            tape = block.recompute_loss(x, targets, flow.address)
            sums = self._sums[flow.address.type]
            sums.add_loss(tape.loss)
        flow.tapes.append(tape)
        sums.tokens += flow.loaded.num_tokens
        return x

    def _backward_input(self, action: Action) -> None:
        flow = self._flow(action)
        gradient, flow.gradient, flow.output = flow.gradient, None, None
        if not flow.is_void:
            with self._doubts.over(action, flow), self._over(action):
                flow.gradient = self._leave_blocks(action, flow, gradient)
        if flow.is_void and action.visit > 0:
            flow.gradient = self.make_activation(self._device).zero_()

    def _leave_blocks(
        self, action: Action, flow: MicroBatch, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Take a gradient back through the blocks."""
        at_once = action in self._closing or (self._adds_at_once and self._num_recomputed > 0)
        numbers = self._extent_of(action)
        for number in reversed(numbers[self._lowest :]):
            block = self._blocks[number]
            again = number < self._num_recomputed and not block.spec.is_last
            self._scope.enter(Pass.FORWARD, number, block.name)
            tape = flow.recompute(block, self._scope) if again else flow.tapes.pop()
            self._scope.enter(Pass.BACKWARD, number, block.name)
            gradient = block.backward_input(tape, gradient)
            gradient = None if gradient is None else as_received(gradient)
            # No part of the recompute: that is compared with its forward, kernel by kernel. And the
            # first micro-batch adds nothing: plans know what follows in the pass by its ordinal.
            with self._twice():
                if (counts := tape.statistics) is not None:
                    self._sums.setdefault(action.type, TypeSums()).add_counts(number, counts)
            if at_once and number > numbers.start:
                # With recompute only one block's tensors are ever there: the one below runs again.
                self._add_weights(action, block, tape)
            else:
                flow.deferred.insert(0, (block, tape))
        return gradient

    def _backward_weight(self, action: Action) -> None:
        flow = self._visits.pop(visit_of(action))
        if action in self._closing:
            flow.deferred.reverse()  # blocks are delivered from the last to the first
        completes = action in self._completing
        with self._over(action) as scope:
            with self._doubts.over(action, flow):
                for block, tape in flow.deferred:
                    self._add_weights(action, block, tape)
            if flow.is_void and action in self._closing:
                for number in reversed(range(self._undelivered)):
                    self._deliver_block(number)
            sums = self._sums.get(action.type, TypeSums())
            if action in self._passing:
                of = action.type, action.micro_batch
                self._checks.passed(of, (sums.loss_sum, *sums.counted.values()))
            if completes:
                scope.enter(Pass.STEP)
                self._complete(action)
        if completes and self._log is not None:
            self._log.completed(action.type, self._results[action.type].mark)

    def _add_weights(self, action: Action, block: Block, tape: Tape) -> None:
        views = self._store.scratch_views
        self._checks.gradient = key_of(self._store.scratch)
        number = self._blocks.index(block)
        skipped = () if self._again is None else self._again.skipped(number)
        self._scope.enter(Pass.WEIGHT, number, block.name)
        block.backward_weight(tape, views, accumulate=action.micro_batch > 0, frozen=skipped)
        if action in self._closing:
            self._deliver_block(number)

    def _deliver_block(self, number: int) -> None:
        assert self._deliver is not None, "else no action closes"
        self._scope.enter(Pass.STEP)
        self._deliver(number)
        self._undelivered = number

    def _complete(self, action: Action) -> None:
        shard_type, mark = action.type, None
        if self._chain is not None:
            mark = self._chain.mark(devices.moment(self._device))
        sums = self._sums.pop(shard_type, TypeSums())
        # Inner ranks see the same samples and come to the same loss: one of them says so.
        speaks = self._inner.counts_copies
        last = speaks and self._stage == self._num_stages - 1
        self._results[shard_type] = TypeResult(
            loss_sum=sums.loss_sum if last else None,
            tokens=sums.tokens if last else None,
            data=sums.data.hex() if self._batches.tells_data else None,
            statistics=sums.statistics() if speaks else None,
            mark=mark,
        )
        self._store.complete(shard_type, joined=action in self._closing)
        self._doubts.complete(shard_type)


def may_add_at_once(program: Sequence[Action]) -> bool:
    """Return whether a backward may add weight gradients that a later action would add.

    Another backward in between may be of the next type, for which there is no scratch yet.
    """
    backwards = [a for a in program if a.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    weights = [visit_of(a) for a in backwards if a.op is Op.BACKWARD_WEIGHT]
    return [*map(visit_of, backwards[::2])] == weights
