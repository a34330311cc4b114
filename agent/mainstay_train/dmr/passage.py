"""Takes a micro-batch through a stage, as a trainer does, with a recorder or without.

The interpreter of trainers runs the actions of one micro-batch, in the order in which the program
of a stage has them. What it would receive is made here. Activations come from the blocks that the
micro-batch passes before, with their first values. The gradient that comes back is drawn: kernels
and sizes do not depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from mainstay_core.base.shape import Cut, Order
from mainstay_core.dmr.operators import Origin, Pass
from mainstay_core.planning.program import BY_LOG, Action, Op, compile_compute
from mainstay_core.planning.routes import Way, blocks_of, route_of
from mainstay_core.wire.plan import Partial
from mainstay_train.checks.planned import WHOLE, Flow, Window
from mainstay_train.comm.chains import Mark
from mainstay_train.comm.mesh import SINGLE, InnerMesh
from mainstay_train.compute.cell_checks import firsts_of
from mainstay_train.compute.interpreter import Interpreter
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.statistics import TypeResult
from mainstay_train.dmr.recorder import Passage, PassageRecord, Recorder
from mainstay_train.dmr.timers import Timer
from mainstay_train.exact.draws import Address, generator_of
from mainstay_train.exact.optimizer import StageState
from mainstay_train.exact.reduction import PartialStore
from mainstay_train.model.blocks import Block, Tape
from mainstay_train.model.workload import Workload, user_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The tensors that a passage leaves."""

    gradients: torch.Tensor
    """Of all parameters of the stage, flat."""
    sent: tuple[torch.Tensor, ...]
    """The output for the next stage and the input's gradient for the one before, where there are
    such stages."""
    result: TypeResult


class StagePasses:
    """A stage with its first values, through which micro-batches can be taken.

    Of those of a way each time the one that trainers record.

    Args:
        workload: what is trained.
        stage: which stage.
        num_stages: of a chain.
        cut: the rule by which the model is cut.
        seed: of first values and samples.
        recompute: share of the blocks whose forwards run again in the backward.
        device: where it computes.
        inner: which of the stage's ranks it is. Its collectives are those of the group that the
            mesh has.
        order: in which micro-batches pass the stages.
        types: that a chain computes.
        micro_batches: of each type.
        way: of the micro-batch through the stage; some of the chain take it.

    Raises:
        WorkloadError: the user's code failed.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        stage: int,
        num_stages: int,
        cut: Cut,
        seed: int,
        recompute: float,
        device: torch.device,
        inner: InnerMesh = SINGLE,
        order: Order = Order.IN_ORDER,
        types: Sequence[int] = (0,),
        micro_batches: int = 1,
        way: Way = WHOLE,
    ) -> None:
        self._inner, self._order, self._micro_batches = inner, order, micro_batches
        self._workload, self._stage, self._num_stages = workload, stage, num_stages
        self._seed, self._recompute, self._device = seed, recompute, device
        self._program = compile_compute(types, micro_batches, stage, num_stages, order)
        self._flow = firsts_of(self._program)[way]
        number = self._flow[0] * micro_batches + self._flow[1]
        self._route = route_of(order, number, num_stages)
        with user_code("building the model"):
            self._stages = workload.stages(num_stages, cut)
            self._numbers = self._stages[stage]
            self._blocks = workload.build(self._numbers, device, inner)
            self._state = StageState(self._blocks, workload.optimizer)
            self._state.initialize(seed)

    def run(self, step: int, timer: Timer | None = None) -> tuple[Outcome, Passage | None]:
        """Take the micro-batch of a step through the stage.

        Args:
            step: whose samples are used.
            timer: takes the time of each operator; None: nothing is recorded.

        Raises:
            InvalidSpecError: a block cannot be recorded; its name and operator are told.
            WorkloadError: the user's code failed.
        """
        with user_code(f"computing step {step}"):
            boundary = _Boundary(self._make_incoming(step))
            store = _Scratch(self._state.layout, 1, self._device)
            results: dict[int, TypeResult] = {}
            recorder = None if timer is None else Recorder(timer)
            boundary.recorder = recorder
            interpreter = self._interpreter(store, results, recorder)
            mine = [action for action in self._program if _flow_of(action) == self._flow]
            alone = [replace(a, op=BY_LOG.get(a.op, a.op), posts=None, starts=()) for a in mine]
            shard_type, micro_batch = self._flow
            if recorder is not None:
                declare_stage(recorder, self._blocks, store, adds=micro_batch > 0)
            with recorder or contextlib.nullcontext():
                interpreter.run(
                    alone, step, None, log=boundary, again=boundary, part_of=self._program
                )
        sent, result = tuple(boundary.sent_on), results[shard_type]
        outcome = Outcome(gradients=store.scratch, sent=sent, result=result)
        return outcome, None if recorder is None else _finish(recorder, store, outcome)

    def _interpreter(
        self, store: PartialStore, results: dict[int, TypeResult], recorder: Recorder | None
    ) -> Interpreter:
        blocks = [
            block if recorder is None else cast("Block", _ObservedBlock(block, number, recorder))
            for number, block in zip(self._numbers, self._blocks, strict=True)
        ]
        return Interpreter(
            workload=self._workload,
            loader=Loader(self._workload.dataset, str(self._device), ahead=False),
            blocks=blocks,
            stage=self._stage,
            num_stages=self._num_stages,
            seed=self._seed,
            num_steps=1,
            micro_batches=self._micro_batches,
            order=self._order,
            store=store,
            results=results,
            recompute=self._recompute,
            hook=_do_nothing,
        )

    def _make_incoming(self, step: int) -> dict[tuple[Op, int], torch.Tensor]:
        """Return what the neighbours would send, by what would receive it, and in which visit."""
        found = {}
        for visit, (stage, _) in enumerate(self._route):
            if stage == self._stage and visit > 0:
                found[Op.RECV_F, visit] = self._make_activation(step, visit)
            if stage == self._stage and visit < len(self._route) - 1:
                found[Op.RECV_B, visit] = self._make_gradient(step)
        return found

    def _make_activation(self, step: int, visit: int) -> torch.Tensor:
        """Return what comes to a visit of the route; one block is in memory at a time."""
        address = Address(self._seed, step, *self._flow)
        x = self._workload.dataset.batch(address).tokens.to(self._device)
        for number in self._numbers_before(visit):
            (block,) = self._workload.build([number], self._device, self._inner)
            block.initialize(self._seed)
            x = block.forward(x, address).contiguous()
        return x

    def _numbers_before(self, visit: int) -> list[int]:
        """Return the blocks, by their numbers in the model, that a micro-batch passes before."""
        found: list[int] = []
        for stage, extent in self._route[:visit]:
            numbers, is_last = self._stages[stage], stage == self._num_stages - 1
            places = blocks_of(extent, len(numbers), is_first=stage == 0, is_last=is_last)
            found += [numbers[place] for place in places]
        return found

    def _make_gradient(self, step: int) -> torch.Tensor:
        """Return what stands for a gradient that another stage would send."""
        drawn = torch.randn(
            self._workload.activation_shape, generator=generator_of(self._seed, step, "gradient")
        )
        return drawn.to(self._workload.dtype).to(self._device)


def _flow_of(action: Action) -> Flow:
    return action.type, action.micro_batch


def declare_stage(
    record: PassageRecord, blocks: Sequence[Block], store: PartialStore, *, adds: bool = False
) -> None:
    """Name what is there before a passage: parameters, and memory for gradients.

    What that memory is, is known only when it is written to: each type has another one.

    Args:
        record: of the passage.
        blocks: of the stage.
        store: has the memory for gradients.
        adds: whether sums of the type's earlier micro-batches lie there, to which it adds.
    """
    for block in blocks:
        masters = block.layout.views(block.masters)
        for name, view in block.layout.views(block.compute).items():
            value = masters[name] if name in block.committed else view
            record.declare(value, name, Origin.ADDRESSED)
    record.before_weights = partial(_declare_gradients, record, store, adds=adds)


def _declare_gradients(record: PassageRecord, store: PartialStore, *, adds: bool) -> None:
    record.allocate(store.scratch)
    if adds:
        for name, view in store.scratch_views.items():
            record.declare(view, f"sum of {name}", Origin.RECEIVED)


class _Boundary:
    """Stands for the neighbours of a stage: it gives what they send, and keeps what they get."""

    lowest = 0

    def __init__(self, incoming: Mapping[tuple[Op, int], torch.Tensor]) -> None:
        self._incoming = incoming
        self.recorder: Recorder | None = None
        self.sent_on: list[torch.Tensor] = []

    def skipped(self, block: int) -> Collection[str]:
        """Return no units: all weight gradients are computed."""
        del block
        return ()

    def read(self, action: Action, into: torch.Tensor) -> None:
        """Give what a neighbour sends."""
        op = Op.RECV_F if action.op is Op.READ_F else Op.RECV_B
        if self.recorder is not None:
            self.recorder.leave()
            self.recorder.receive(Window(op, _flow_of(action), action.extent), into)
        into.copy_(self._incoming[op, action.visit])

    def sent(self, action: Action, tensor: torch.Tensor) -> None:
        """Keep what a neighbour gets."""
        del action
        self.sent_on.append(tensor)

    def completed(self, shard_type: int, mark: Mark | None) -> None:
        """Nothing follows from it."""
        del shard_type, mark


class _Scratch(PartialStore):
    """Leaves a complete type where it is: nothing is summed."""

    def complete(self, shard_type: int, *, joined: bool = False) -> Partial:
        """Return the partial of the type alone."""
        del joined
        return Partial(lane=0, first=shard_type, last=shard_type)


class _ObservedBlock:
    """A block that tells a recorder which pass begins. It computes nothing itself."""

    def __init__(self, block: Block, number: int, recorder: Recorder) -> None:
        self._block, self._number, self._recorder = block, number, recorder
        self.spec, self.device, self.name = block.spec, block.device, block.name

    def forward(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        self._enter(Pass.FORWARD)
        self._recorder.declare_unknown(x, "tokens")
        # As trainers with a plan call it, so that its recompute is its second execution.
        return self._block.forward_as_recomputed(x, address)

    def recompute(self, x: torch.Tensor, address: Address) -> Tape:
        again = self._recorder.has_forward(self._number)
        self._recorder.enter(self._number, self.name, Pass.FORWARD, again=again)
        self._recorder.declare_unknown(x, "tokens")
        tape = self._block.recompute(x, address)
        if again:
            self._enter(Pass.BACKWARD)
        return tape

    def recompute_loss(self, x: torch.Tensor, targets: torch.Tensor, address: Address) -> Tape:
        self._enter(Pass.FORWARD)
        self._recorder.declare_unknown(targets, "targets")
        return self._block.recompute_loss(x, targets, address)

    def backward_input(self, tape: Tape, dy: torch.Tensor | None = None) -> torch.Tensor | None:
        self._enter(Pass.BACKWARD)
        return self._block.backward_input(tape, dy)

    def backward_weight(
        self,
        tape: Tape,
        grads: dict[str, torch.Tensor],
        *,
        accumulate: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        self._enter(Pass.WEIGHT)
        self._block.backward_weight(tape, grads, accumulate=accumulate, frozen=frozen)

    def _enter(self, in_pass: Pass) -> None:
        self._recorder.enter(self._number, self.name, in_pass)


def _finish(recorder: Recorder, store: PartialStore, outcome: Outcome) -> Passage:
    """Name the results of a passage."""
    recorder.add_result(store.scratch)
    for tensor in (*outcome.sent, outcome.result.loss_sum, outcome.result.statistics):
        if isinstance(tensor, torch.Tensor):
            recorder.add_result(tensor)
    return recorder.finish()


def _do_nothing(action: Action) -> None:
    del action
