"""Measures what a workload's blocks take, by one micro-batch through each of them on the CPU.

``python -m mainstay_train.compute.measure`` reads a question as JSON and prints a measurement
(:mod:`mainstay_core.job.sizes.block_sizes`). One block is in memory at a time.

What lies in memory is seen operation by operation, as torch's dispatcher shows it. Buffers inside
a kernel are not seen. Ranks of a stage do not talk to each other here: their collectives go to a
process group that sends nothing, as sizes do not depend on values.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_core.job.sizes.block_sizes import BlockSizes, Measurement, MeasureQuestion, ModelSizes
from mainstay_train.base.decorator import Loop
from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm.group import Group
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.exact import numerics
from mainstay_train.exact.draws import Address
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model import workload as workloads
from mainstay_train.model.blocks import Block, Tape
from mainstay_train.model.data import Batch
from mainstay_train.model.workload import Workload, WorkloadError, user_code

_SENT = {
    "all_reduce": lambda size, ranks: 2 * size * (ranks - 1) // ranks,
    "all_gather_into_tensor": lambda size, ranks: size * (ranks - 1),
    "reduce_scatter_tensor": lambda size, ranks: size * (ranks - 1) // ranks,
    "all_to_all_single": lambda size, ranks: size * (ranks - 1) // ranks,
}
"""Bytes that a rank sends in a collective over a ring, by the bytes of its input."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types here
    """Counts the bytes of tensors that were made while it is on and that still exist.

    A view counts as nothing, and neither does what was there before.
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks
        self._sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        """The most since :meth:`mark`."""
        self.sent = 0
        """Bytes sent by collectives since :meth:`mark`."""

    def mark(self) -> int:
        """Begin a new peak; return what there is now."""
        self.peak, self.sent = self.now, 0
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it makes."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a distributed tensor: what it does to its parts comes next
        given = {_storage(t) for t in filter(_is_real, _tensors((args, kwargs)))}
        self._count_sent(func, args)
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_real, _tensors(result)):
            key = _storage(tensor)
            if key not in given and key not in self._sizes:
                self._add(key, tensor.untyped_storage())
        return result

    def _add(self, key: int, storage: Any) -> None:
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _count_sent(self, func: Any, args: Any) -> None:
        space, _, name = str(func).partition(".")
        if space == "_c10d_functional" and name.partition(".")[0] in _SENT:
            size = sum(t.numel() * t.element_size() for t in _tensors(args))
            self.sent += _SENT[name.partition(".")[0]](size, self._ranks)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: DTensor tries operations out on others."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _SilentGroup:
    """A group of a stage's ranks of which only one is there, and which sends nothing."""

    def __init__(self, inner: InnerMesh) -> None:
        from torch._C._distributed_c10d import FakeProcessGroup

        self.name, self.backend, self.waits_can_hang = "measure", "gloo", False
        self.rank, self.size = inner.index, inner.size
        self.waits_can_hang = False  # nobody is waited for
        # It takes part in every collective and sends nothing.
        self.process_group = FakeProcessGroup._create_internal(inner.index, inner.size)


def play_collectives(inner: InnerMesh) -> None:
    """Have collectives on the inner mesh take part without anybody else; nothing is sent."""
    if inner.size > 1:
        comm_mesh.enter(cast("Group", _SilentGroup(inner)))


def measure(
    model: Workload, inner: InnerMesh, seed: int = 0, *, accumulates: bool = True
) -> ModelSizes:
    """Return what the blocks of a workload take on one rank of a stage.

    Args:
        model: the workload.
        inner: which of a stage's ranks it is, and of how many.
        seed: of first values and of the micro-batch.
        accumulates: whether a shard type has several micro-batches.

    Raises:
        WorkloadError: the user's code failed.
    """
    play_collectives(inner)
    address = Address(seed, 0, 0, 0)
    with user_code("reading a micro-batch"):
        batch = model.dataset.batch(address)
    x, blocks = batch.tokens, []
    for number, spec in enumerate(model.blocks):
        with user_code(f"measuring block {spec.name!r}"):
            (block,) = model.build([number], "cpu", inner)
            state = StageState([block], model.optimizer)
            state.initialize(seed)
            probe = _Probe(block, state, address, batch, x, inner)
            sizes, x = probe.measure(accumulates=accumulates)
        blocks.append(sizes)
    return ModelSizes(
        inner=inner.index,
        width_bytes=model.dtype.itemsize,
        tokens_bytes=_size(batch.tokens),
        targets_bytes=_size(batch.targets),
        blocks=tuple(blocks),
    )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Probe:
    """Takes one micro-batch through a block, as the interpreter does."""

    def __init__(
        self,
        block: Block,
        state: StageState,
        address: Address,
        batch: Batch,
        x: torch.Tensor,
        inner: InnerMesh,
    ) -> None:
        self._block, self._state, self._address = block, state, address
        self._batch, self._x = batch, x
        self._live = LiveBytes(inner.size)

    def measure(self, *, accumulates: bool) -> tuple[BlockSizes, torch.Tensor]:
        """Return what the block takes, and its output."""
        block, live = self._block, self._live
        last = block.spec.is_last
        scratch = self._state.layout.views(self._state.layout.allocate())
        with live:
            output = block.forward(self._x, self._address)  # the first one makes constants
            constant = live.now - _size(output)
            del output
            before = live.mark()
            output = block.forward(self._x, self._address)
            plain_forward = live.peak - before
            passed = output.detach().clone()
            del output
        with live:
            before, tape = live.mark(), self._record()
            sent_forward, forward = live.sent, live.peak - before
            assert tape.output is not None
            size = 0 if last else _size(tape.output)
            kept = live.now - before - size
            dy = None if last else torch.zeros_like(tape.output)
            live.mark()
            dx = block.backward_input(tape, dy)
            backward, sent_backward = live.peak - before - size, live.sent
            del dy
            held = _size(dx) if dx is not None else 0
            pending = live.now - before - held
            live.mark()
            block.backward_weight(tape, scratch, accumulate=accumulates)
            weights = live.peak - before - held
            sent_backward += live.sent
        moments = (flat for flat in self._state.flats() if flat.kind != "master")
        sizes = BlockSizes(
            name=block.name,
            cost=float(block.layout.num_parameters if block.spec.cost is None else block.spec.cost),
            parameters=tuple(param.numel for param in block.layout.params),
            moments_bytes=sum(_size(flat.tensor) for flat in moments),
            output_bytes=size,
            kept_bytes=max(0, kept),  # below 0 where the output is a view of the input
            pending_bytes=max(0, pending),
            plain_forward_bytes=0 if last else plain_forward,
            forward_bytes=forward,
            backward_bytes=max(0, backward),
            weights_bytes=max(0, weights),
            constant_bytes=max(0, constant),
            sent_forward_bytes=sent_forward,
            sent_backward_bytes=sent_backward,
            num_units=len(block.units),
        )
        return sizes, passed

    def _record(self) -> Tape:
        if not self._block.spec.is_last:
            return self._block.recompute(self._x, self._address)
        return self._block.recompute_loss(self._x, self._batch.targets, self._address)


def answer(question: MeasureQuestion) -> Measurement:
    """Return what was measured, or what is wrong with the workload."""
    try:
        function = workloads.find(question.entrypoint)
        if isinstance(function, Loop):
            raise InvalidSpecError(
                "spec.workload.entrypoint",
                f"{question.entrypoint} is a training loop of its own: what it takes is known only "
                "while it runs; a model that is brought as blocks can be measured",
            )
        with user_code("calling the entrypoint"):
            model = workloads.call(question.entrypoint, function, question.config, question.args)
        ranks = question.ranks_per_stage
        meshes = [InnerMesh(size=ranks, index=index) for index in range(ranks)]
        model.inner_fingerprint(meshes[0])  # refuses a mesh that no block uses
        models = tuple(
            measure(model, mesh, question.seed, accumulates=question.accumulates) for mesh in meshes
        )
    except (InvalidSpecError, WorkloadError) as error:
        return Measurement(problem=brief(error))
    return Measurement(models=models)


def main() -> None:
    """Answer the question on standard input."""
    question = codec.loads(MeasureQuestion, sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):  # a user's code may print
        numerics.setup("cpu")
        measured = answer(question)
    print(codec.dumps(measured))  # noqa: T201 - its output is its result


if __name__ == "__main__":
    main()
