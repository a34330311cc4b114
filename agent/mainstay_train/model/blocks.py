"""Blocks: the pieces of a model between which only explicit tensors pass.

A block is a transformer layer, the embedding or the head. It offers forward,
recompute, backward_input and backward_weight; autograd works inside one call and
never crosses a block (design.md section 6), so any step of the program can be
run again, elsewhere, from the tensors that it names.

The rule that modules must keep (design.md section 1, rule 5): forward is a pure
function of its parameters, its input and its address. Draws come from
``address.uniform(shape, site)``, never from torch's generators, and buffers are
constants. Breaking it is found at a block's first forward and named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mainstay_train.comm.mesh import SINGLE, InnerMesh, local_gradient, placed_like, plain
from mainstay_train.exact import initialization, layout
from mainstay_train.exact.draws import Address
from mainstay_train.model import compilation, split
from mainstay_train.model.block_spec import (
    BlockSpec,
    CommitRule,
    CommittedState,
    InitRule,
    LossFunction,
    ModuleLoss,
)
from mainstay_train.model.units import Unit, tile

__all__ = [
    "Block",
    "BlockSpec",
    "CommitRule",
    "CommittedState",
    "InitRule",
    "LossFunction",
    "ModuleLoss",
    "Tape",
    "Unit",
    "built",
    "layout_of",
]


@dataclass(slots=True)
class Tape:
    """The tensors that a recompute leaves for one micro-batch's backward through one block."""

    recorder: split.Recorder
    x: torch.Tensor
    output: torch.Tensor | None
    """The block's output (of the last block: the loss), with its graph; None once used."""
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of parameters outside split modules, by id of the parameter."""

    @property
    def statistics(self) -> torch.Tensor | None:
        """What the block counted in the micro-batch, int64 [statistics]; None if nothing."""
        counted = self.recorder.counted
        return torch.cat(counted) if counted else None

    @property
    def loss(self) -> torch.Tensor:
        """Of the last block, before its backward: a sum over tokens, fp32 scalar."""
        assert self.output is not None, "the loss is read before backward_input"
        return self.output.detach()


class Block:
    """One block on one device: its module, its masters and its compute parameters.

    Masters are fp32 in one flat buffer. The module computes with views of
    ``compute``: the masters themselves in fp32, else a cast copy that
    :meth:`refresh` renews after an apply.

    Invariant: the module's parameters are views of ``compute``, whatever is
    written into the masters.

    With ``compiles`` the module runs as compiled code (:mod:`mainstay_train.model.compilation`).

    Weight gradients of ``split`` modules are computed in :meth:`backward_weight`;
    those of any other parameter come out of autograd together with dx in
    :meth:`backward_input` and are handed over in :meth:`backward_weight`. So every
    module works, and one made of split modules lets a pipeline send dx earlier. In bf16 split
    modules sum the products of their weight gradients in fp32. What comes out of autograd was
    rounded to bf16 for each micro-batch: a gradient has its parameter's type there, and no hook
    sees the products before that. In compiled code split modules defer nothing: their gradients
    come out of autograd in fp32, as those of leaves that stand for their parameters.
    """

    def __init__(
        self,
        spec: BlockSpec,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        inner: InnerMesh = SINGLE,
        compiles: bool = False,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.device = torch.device(device)
        self.module = built(spec, inner).to(self.device).train()
        self.layout = layout_of(spec, self.module, inner)
        self.masters = layout.aligned_zeros(self.layout.size, device=self.device)
        self.compute = (
            self.masters
            if dtype == torch.float32
            else layout.aligned_zeros(self.layout.size, dtype=dtype, device=self.device)
        )
        local_names = [local for local, _ in self.module.named_parameters()]
        self.units = tile(self.name, spec.units, local_names)
        """The parameters of each unit, by model-wide names."""
        self.committed = self._committed_names(local_names)
        """Model-wide names of the parameters that the optimizer leaves alone."""
        self._names = self._bind()
        # What autograd differentiates for a parameter: itself, or in compiled code its leaf.
        self._direct: list[tuple[torch.Tensor, nn.Parameter]] = [
            (p, p) for p in self.module.parameters() if p.requires_grad
        ]
        self._checked = False
        self.may_skip = True
        """Whether weight gradients can be left out; False where that was found to move others."""
        self._refuse_impure_modules()
        self._compiles, self._run = compiles, self.module
        if compiles:
            self._direct += self._add_leaves()
            self._run = compilation.compiled(self.module)
        at_once = {id(parameter) for _, parameter in self._direct}
        self._at_once = {name for parameter, name in self._names if id(parameter) in at_once}
        """Names of parameters whose gradient comes with the input's."""

    @property
    def is_new(self) -> bool:
        """Whether its module was never called."""
        return not self._checked

    def initialize(self, seed: int) -> None:
        """Set the masters to their first values, each by its own name alone."""
        for param in self.layout.params:
            part = param.part
            name, shape = (part.name, part.shape) if part else (param.name, param.shape)
            rule = self.spec.init(name.removeprefix(f"{self.name}."), shape)
            first = initialization.init_tensor(seed, name, shape, rule.std, rule.mean)
            mine = part.cut(first) if part else first
            self.masters[param.offset : param.offset + param.numel].copy_(mine.reshape(-1))
        self.refresh()

    def refresh(self) -> None:
        """Renew the compute parameters from the masters; nothing to do in fp32."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)

    def commit(self, statistics: Sequence[int]) -> None:
        """Change what changes when a step commits; the optimizer has changed the rest.

        Args:
            statistics: of the block, in that step.

        Raises:
            ValueError: it counts another number of them.
        """
        state = self.spec.committed
        if state is None:
            return
        if len(statistics) != len(self.spec.statistics):
            raise ValueError(
                f"block {self.name!r} counts {len(self.spec.statistics)} statistics, the commit "
                f"has {len(statistics)} of it"
            )
        views = self.layout.views(self.masters)
        masters = {local: views[f"{self.name}.{local}"] for local in state.parameters}
        state.rule(masters, statistics)

    def forward(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        """The block's output, without a graph.

        Raises:
            ValueError: The module is not a pure function (see the module docstring).
        """
        if self._compiles:
            # Code that is compiled without a graph might be fused otherwise, and have other bits.
            output = self._record(x, address, None).output
            assert output is not None
            return output.detach()
        with torch.no_grad():
            return plain(self._checked_call(x, address))

    def forward_as_recomputed(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        """The block's output, by the same calls as :meth:`recompute`; nothing of a graph is kept.

        With a graph a block may call more than without, e.g. for what only its backward reads. So
        it is this that a recompute is compared with.
        """
        with torch.autograd.graph.saved_tensors_hooks(_keep_nothing, _give_nothing):
            output = self._record(x, address, None).output
        assert output is not None
        return plain(output.detach())

    def recompute(self, x: torch.Tensor, address: Address) -> Tape:
        """Run forward again with a graph inside the block.

        Its output has the bits of :meth:`forward`; a program that has the memory may
        call it in forward's place and keep the tape.
        """
        return self._record(x, address, None)

    def recompute_loss(self, x: torch.Tensor, targets: torch.Tensor, address: Address) -> Tape:
        """:meth:`recompute` of the last block; the tape carries the loss."""
        return self._record(x, address, targets)

    def _record(self, x: torch.Tensor, address: Address, targets: torch.Tensor | None) -> Tape:
        recorder = split.Recorder(torch.zeros((), device=self.device, requires_grad=True))
        leaf = x.detach()
        if leaf.is_floating_point():
            leaf.requires_grad_(True)
        with torch.enable_grad(), split.recording(recorder):
            output = self._checked_call(leaf, address)
            if targets is not None:
                output = self._loss(output, targets)
        counted = sum(map(torch.numel, recorder.counted))
        if counted != len(self.spec.statistics):
            raise ValueError(
                f"block {self.name!r} counted {counted} integers in a micro-batch, but its "
                f"`statistics` names {len(self.spec.statistics)}"
            )
        return Tape(recorder, leaf, output)

    def backward_input(self, tape: Tape, dy: torch.Tensor | None = None) -> torch.Tensor | None:
        """The gradient of the block's input; the tape's graph is used up.

        Args:
            tape: Of :meth:`recompute` or :meth:`recompute_loss`.
            dy: Gradient of the output, its shape and type; None starts from the loss.

        Returns:
            dx, of the input's shape and type; None for the block that takes tokens.
        """
        assert tape.output is not None, "a tape serves one backward"
        floating = tape.x.is_floating_point()
        leaves = [leaf for leaf, _ in self._direct]
        inputs = [*([tape.x] if floating else []), *leaves, tape.recorder.anchor]
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            tape.output, inputs, dy, allow_unused=True
        )
        tape.output = None
        direct = found[1:-1] if floating else found[:-1]
        for (_, parameter), gradient in zip(self._direct, direct, strict=True):
            if gradient is not None:
                earlier = tape.gradients.get(id(parameter))  # of a parameter that modules share
                tape.gradients[id(parameter)] = gradient if earlier is None else earlier + gradient
        if not floating:
            return None
        dx = found[0]
        return torch.zeros_like(tape.x) if dx is None else plain(dx).contiguous()

    def backward_weight(
        self,
        tape: Tape,
        grads: Mapping[str, torch.Tensor],
        *,
        accumulate: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        """Deliver this micro-batch's parameter gradients.

        Each is rounded to fp32 by itself and then added, so the sum over a type is
        the ordered sum of its micro-batches.

        Args:
            tape: After :meth:`backward_input`; used up.
            grads: fp32 views by model-wide name (``layout.views(scratch)``).
            accumulate: Add to the views. False writes them all: the first micro-batch
                of a type, which then needs no zeroed scratch.
            frozen: Names of units (:attr:`units`) whose weight gradients are not computed: they
                count as zero. No bit of any other gradient depends on it.

        Raises:
            ValueError: There is no such unit, or it has a parameter outside split modules, whose
                gradient was computed with the input's.
        """
        skipped = self._skipped(frozen)
        with torch.no_grad():
            for parameter, name in self._names:
                view = grads[name]
                add = accumulate
                if name in skipped:
                    if not add:
                        view.zero_()
                    continue
                gradient = tape.gradients.get(id(parameter))
                if gradient is not None:
                    _deliver(view, local_gradient(gradient, parameter), add)
                    add = True
                for work in tape.recorder.pending.get(id(parameter), ()):
                    work(view, add)
                    add = True
                if not add:
                    view.zero_()  # unused in this micro-batch
        tape.gradients.clear()
        tape.recorder.pending.clear()

    def can_skip(self, unit: str) -> bool:
        """Return whether a unit's weight gradients can be left out: :meth:`backward_weight`."""
        return self.may_skip and self._at_once.isdisjoint(self.units[unit])

    def _skipped(self, frozen: Collection[str]) -> set[str]:
        """The parameters of frozen units."""
        for unit in frozen:
            if unit not in self.units:
                known = ", ".join(self.units)
                raise ValueError(f"block {self.name!r} has no unit {unit!r} (it has: {known})")
            for name in self.units[unit]:
                if name in self._at_once:
                    raise ValueError(
                        f"unit {unit!r} cannot be frozen: the gradient of {name} is computed with "
                        "that of the input; only split modules that are not compiled compute it "
                        "apart"
                    )
        return {name for unit in frozen for name in self.units[unit]}

    def _committed_names(self, parameters: Collection[str]) -> frozenset[str]:
        state = self.spec.committed
        committed = () if state is None else state.parameters
        for local in committed:
            if local not in parameters:
                raise ValueError(
                    f"block {self.name!r} has no parameter {local!r}, which its `committed` names"
                )
        return frozenset(f"{self.name}.{local}" for local in committed)

    def _loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.spec.loss_of(self.module, output, targets)
        if loss.dim() != 0 or loss.dtype != torch.float32:
            raise ValueError(
                f"the loss of block {self.name!r} must be an fp32 scalar, a sum over tokens; "
                f"got {loss.dtype} of shape {tuple(loss.shape)}"
            )
        return loss

    def _call(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        if self._compiles:
            address = compilation.untraced(address)
        output: Any = self._run(x, address) if self.spec.draws else self._run(x)
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"block {self.name!r} must return one tensor, got {type(output).__name__}"
            )
        if hasattr(output, "placements"):
            raise ValueError(
                f"block {self.name!r} must return a plain tensor, got a distributed one; end it "
                "with use_local_output=True or to_local()"
            )
        return output

    def _checked_call(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        """Call the module; at the first call, see that it is a pure function."""
        if self._checked:
            return self._call(x, address)
        self._checked = True
        draws = _generator_state(self.device)
        versions = {name: b._version for name, b in self.module.named_buffers()}
        output = self._call(x, address)
        if draws != _generator_state(self.device):
            raise ValueError(
                f"block {self.name!r} drew from torch's running generator; use "
                "address.uniform(shape, site) so that a replay draws the same numbers"
            )
        changed = [name for name, b in self.module.named_buffers() if b._version != versions[name]]
        if changed:
            raise ValueError(
                f"block {self.name!r} changed its buffers {changed} in forward; state may only "
                "change when a step commits"
            )
        return output

    def _bind(self) -> list[tuple[nn.Parameter, str]]:
        """Replace the module's parameters by views of ``compute``; return them with names."""
        views = self.layout.views(self.compute)
        masters = self.layout.views(self.masters)
        views |= {name: masters[name] for name in self.committed}
        deferred = {
            id(parameter): module
            for module in self.module.modules()
            if isinstance(module, split.SplitModule)
            for parameter in module.parameters(recurse=False)
        }
        bound: dict[int, nn.Parameter] = {}
        names = []
        for local, parameter in self.module.named_parameters():
            name = f"{self.name}.{local}"
            value = placed_like(parameter, views[name])
            if value is not views[name] and id(parameter) in deferred:
                if not deferred[id(parameter)].takes_parts:
                    raise ValueError(
                        f"parameter {name} is distributed, but its module defers its gradient and "
                        "does not say `takes_parts`; use torch.nn's modules in a block that is "
                        "parallelised"
                    )
                value = views[name]
            apart = id(parameter) in deferred or name in self.committed
            new = nn.Parameter(value, requires_grad=not apart)
            bound[id(parameter)] = new
            names.append((new, name))
        for module in self.module.modules():  # tied names get the same new parameter
            for key, old in module._parameters.items():
                if old is not None:
                    module._parameters[key] = bound[id(old)]
        return names

    def _add_leaves(self) -> list[tuple[torch.Tensor, nn.Parameter]]:
        """What stands for the parameters of split modules in compiled code."""
        found: list[tuple[torch.Tensor, nn.Parameter]] = []
        for module in self.module.modules():
            if isinstance(module, split.SplitModule) and module.compiles:
                module.add_leaves()
                found += [(leaf, module._parameters[key]) for key, leaf in module.leaves.items()]  # type: ignore[misc]
        return found

    def _refuse_impure_modules(self) -> None:
        for name, module in self.module.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ValueError(
                    f"block {self.name!r} contains {type(module).__name__} ({name!r}), which "
                    "draws from a running generator; use address.uniform(shape, site)"
                )
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"block {self.name!r} contains {type(module).__name__} ({name!r}), whose "
                    "statistics depend on the order of micro-batches; use RMSNorm or LayerNorm"
                )


def built(spec: BlockSpec, inner: InnerMesh) -> nn.Module:
    """The block's module, distributed over the inner mesh if there is one."""
    module = spec.build()
    if inner.size > 1 and spec.parallelize is not None:
        module = spec.parallelize(module, inner.device_mesh)
    return module


def layout_of(spec: BlockSpec, module: nn.Module, inner: InnerMesh) -> layout.BlockLayout:
    """The flat layout of a module of :func:`built`."""
    return layout.BlockLayout.of_module(
        spec.name, module, shared=inner.size > 1, origins=spec.origins
    )


def _keep_nothing(_: torch.Tensor) -> None:
    """Stand for a tensor that a graph would keep."""


def _give_nothing(_: None) -> torch.Tensor:
    raise AssertionError("a graph whose tensors were not kept has no backward")


def _deliver(view: torch.Tensor, gradient: torch.Tensor, add: bool) -> None:
    if add:
        view.add_(gradient)
    else:
        view.copy_(gradient)


def _generator_state(device: torch.device) -> list[bytes]:
    """The states of torch's generators; no kernel compares them, so checks see none."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]
