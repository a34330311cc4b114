"""Optimizer and the state of a stage.

Everything here is elementwise per block, so its bits do not depend on how many
stages or cells there are. Apply uses no communication and is not interrupted
(protocol.md section 2, rule B).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from mainstay_core.base.digest import Digest
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.exact import layout
from mainstay_train.exact.eager_optimizers import EagerAdamW, EagerSGD
from mainstay_train.exact.masters import MasterBlock, StageMasters
from mainstay_train.exact.slices import Slice
from mainstay_train.exact.unit_sums import whole_of
from mainstay_train.sums import digests

OptimizerFactory = Callable[[Sequence[tuple[str, torch.Tensor]]], torch.optim.Optimizer]
"""(model-wide name, fp32 master) of one block -> its optimizer.

The optimizer's state must consist of tensors and start from zeros (Adam, AdamW,
SGD with momentum and without dampening, RMSprop, Adagrad): a healed rank
receives bytes into it. ``lr`` is set before each step; a group's "lr_scale"
multiplies it.
"""

Boosts = Mapping[str, float]
"""Factors of the learning rate, by block; 1 for what is not named."""

Schedule = Callable[[int], float]
"""Learning rate as a function of the step alone, from 0."""


def adamw(
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> OptimizerFactory:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), fused kernel.

    Tensors of one dimension (norms, biases) do not decay.
    """

    def build(named: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return EagerAdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True
        )

    return build


def each(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> OptimizerFactory:
    """Any optimizer of torch that meets the contract of :data:`OptimizerFactory`.

    Args:
        kind: its class, e.g. ``torch.optim.RMSprop``.
        options: its arguments, besides the parameters and ``lr``; equal for all parameters.
    """

    def build(named: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return kind([parameter for _, parameter in named], lr=0.0, **options)

    return build


def stateless(named: Sequence[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    """An optimizer that keeps nothing, for masters that are copied and never trained."""
    return EagerSGD([parameter for _, parameter in named], lr=0.0)


def constant(rate: float) -> Schedule:
    """The same learning rate in every step."""

    def at(_: int) -> float:
        return rate

    return at


def warmup_cosine(
    *, peak: float, warmup_steps: int, total_steps: int, floor: float = 0.1
) -> Schedule:
    """Linear warm-up, then half a cosine down to ``floor * peak`` at ``total_steps``."""

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    return rate


class StateTensor(NamedTuple):
    """One tensor of a stage's state, in canonical order."""

    name: str
    """Model-wide name of the parameter, or of the block for flat tensors."""
    kind: str
    """ "master", "exp_avg", "exp_avg_sq", "step" ..."""
    tensor: torch.Tensor
    part: Slice | None = None
    """What it is of a model-wide tensor; None: all of it."""
    copy: bool = False
    """Every inner rank of the stage has it."""

    @property
    def id(self) -> str:
        """Identity in digests, on the wire and in checkpoints; parts of one tensor differ in it."""
        return f"{self.kind}:{self.name}{self.part.bounds if self.part else ''}"

    def digest(self) -> Digest:
        """Its part of the digest of the model-wide tensor."""
        if self.part is not None:
            return self.part.digest(self.kind, self.tensor)
        return digests.tensor_digest(self.id, self.tensor)

    def sums(self) -> torch.Tensor:
        """The same where the tensor is, [mixers]: see :func:`digests.added`."""
        if self.part is not None:
            return self.part.sums(self.kind, self.tensor)
        return digests.tensor_sums(self.id, self.tensor)


@dataclass(frozen=True, slots=True)
class Shared:
    """A digest in two parts: what this rank alone holds, and what its inner mesh holds in copies.

    With one rank to a stage nothing is a copy.
    """

    own: Digest
    copies: Digest
    by_unit: torch.Tensor | None = field(default=None, compare=False)
    """Both sums of each unit of a stage's masters, int64 [mixers, units]."""

    @classmethod
    def of(cls, tensors: Iterable[StateTensor]) -> Shared:
        """The digest of some tensors of a state."""
        own = copies = Digest.zero()
        for tensor in tensors:
            if tensor.copy:
                copies += tensor.digest()
            else:
                own += tensor.digest()
        return cls(own, copies)

    @property
    def whole(self) -> Digest:
        """Of all that this rank holds."""
        return self.own + self.copies

    def counted(self, mesh: InnerMesh) -> Digest:
        """What adds up over the inner ranks to the digest of the stage."""
        return self.whole if mesh.counts_copies else self.own


class StatePart(MasterBlock, Protocol):
    """A layer as its state is seen: a block, or a piece of a plain module."""

    @property
    def name(self) -> str: ...
    @property
    def compute(self) -> torch.Tensor:
        """What forward and backward use, flat: the masters themselves in fp32."""
        ...

    def initialize(self, seed: int) -> None:
        """Set the masters to their first values."""
        ...

    def refresh(self) -> None:
        """Renew what is computed with after the masters were written."""
        ...

    @property
    def committed(self) -> frozenset[str]:
        """Names of the parameters that the optimizer leaves alone: they change in commit."""
        ...

    def commit(self, statistics: Sequence[int]) -> None:
        """Change these parameters' masters, from what was counted in a step."""
        ...


REST_PARTS = 16
"""Parts of a state beside its masters, one of which cells compare in each step: its digest costs
less than a sixth of the masters' then."""
StateLayout = tuple[bool, torch.dtype, torch.device]
"""Of one kind of optimizer state: whether it has the parameter's shape, its type, its place."""


class StageState:
    """Masters and optimizer state of a stage: all that heal, checkpoint and digest see.

    Optimizer state is allocated, zeroed, at construction, so that a fresh rank can
    receive bytes into it before its first step. State of a parameter's shape lies in
    flat buffers of the block's layout, as masters do; scalars (Adam's step count) lie
    in one flat buffer per block and kind.

    Invariant: every tensor of :meth:`state_tensors` is a view of one of :meth:`flats`.
    """

    def __init__(self, blocks: Sequence[StatePart], factory: OptimizerFactory) -> None:
        self.blocks = tuple(blocks)
        self.layout = layout.StageLayout(blocks=tuple(block.layout for block in blocks))
        device = blocks[0].device if blocks else torch.device("cpu")
        largest = max((block.layout.size for block in blocks), default=0)
        self._scaled = layout.aligned_zeros(largest, device=device)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._trained: dict[str, dict[str, torch.Tensor]] = {}
        """Masters that a block's optimizer changes, by their names."""
        self._params: list[StateTensor] = []
        self._flats: list[StateTensor] = []
        for block in self.blocks:
            self._add(block, factory)
        masters = (tensor for tensor in self._params if tensor.kind == "master")
        self._masters = StageMasters(self.blocks, masters)

    def initialize(self, seed: int) -> None:
        """First values: masters by address, optimizer state zero."""
        for flat in self._flats:
            flat.tensor.zero_()
        for block in self.blocks:
            block.initialize(seed)

    def state_tensors(self) -> list[StateTensor]:
        """Per parameter, model order: its master, then its optimizer state by kind, if any."""
        return list(self._params)

    def flats(self) -> list[StateTensor]:
        """The same bits in few large buffers, per block: for transfers."""
        return list(self._flats)

    def everything(self) -> list[StateTensor]:
        """Return the same, with what is computed with where that is a copy: for comparisons."""
        copies = [
            StateTensor(block.name, "compute", block.compute)
            for block in self.blocks
            if block.compute is not block.masters
        ]
        return [*self._flats, *copies]

    def masters_digest(self) -> Shared:
        """Of the masters, by model-wide parameter name; waits for the device once."""
        own, copies = self._masters.sums()
        return Shared(whole_of(own), whole_of(copies), own + copies)

    def rest_sums(self, part: int) -> list[torch.Tensor]:
        """Digests of one of :data:`REST_PARTS` parts of all that is not masters, [mixers] each.

        That is the optimizer's own state, and what is computed with where that is a copy. They add
        up: see :func:`digests.added`.

        Args:
            part: its number.
        """
        rest = [flat for flat in self.everything() if flat.kind != "master"]
        return [digests.tensor_sums(f"rest:{f.id}", part_of(f.tensor, part)) for f in rest]

    def refresh(self) -> None:
        """Renew compute parameters after masters were written from outside (heal, load)."""
        for block in self.blocks:
            block.refresh()

    def apply(
        self,
        reduced: Sequence[torch.Tensor],
        scale: float,
        lr: float,
        statistics: Sequence[Sequence[int]] | None = None,
        only: Collection[str] | None = None,
        boosts: Boosts | None = None,
    ) -> None:
        """One optimizer step. No communication; ``reduced`` is left as it is.

        Each parameter is a tensor of its own to the optimizer, so the bits of one do not depend on
        which others are applied with it.

        Args:
            reduced: The reduced gradient, one flat fp32 tensor per block.
            scale: Factor of every gradient, from the votes (``core.votes.clip``).
            lr: Learning rate of this step.
            statistics: What each block counted in it; None where no block counts anything.
            only: Model-wide names of the parameters that change; None: all do.
            boosts: Factors of the learning rate, by block; 1 for what is not named.
        """
        counted = [()] * len(self.blocks) if statistics is None else statistics
        with torch.no_grad():
            for block, optimizer, flat, counts in zip(
                self.blocks, self._optimizers, reduced, counted, strict=True
            ):
                named = {param.name for param in block.layout.params}
                if only is not None and named.isdisjoint(only):
                    continue
                torch.mul(flat, scale, out=self._scaled[: block.layout.size])
                rate = lr * (boosts or {}).get(block.name, 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("lr_scale", 1.0)
                with _only(self._trained[block.name], only):
                    optimizer.step()
                if only is None or block.committed.issubset(only):
                    block.commit(counts)
                block.refresh()

    def _add(self, block: StatePart, factory: OptimizerFactory) -> None:
        masters = block.layout.views(block.masters)
        trained = {name: m for name, m in masters.items() if name not in block.committed}
        optimizer = factory(list(trained.items()))
        gradients = block.layout.views(self._scaled)
        for name, master in trained.items():
            master.grad = gradients[name]
        self._trained[block.name] = trained
        kinds = _state_structure(factory, trained)
        flats = {
            kind: layout.aligned_zeros(
                block.layout.size if shaped else len(trained), dtype=dtype, device=device
            )
            for kind, (shaped, dtype, device) in kinds.items()
        }
        shaped_views = {
            kind: block.layout.views(flats[kind])
            for kind, (shaped, _, _) in kinds.items()
            if shaped
        }
        params = {param.name: param for param in block.layout.params}
        places = {name: index for index, name in enumerate(trained)}
        for name, master in masters.items():
            part, copy = params[name].part, params[name].copy
            self._params.append(StateTensor(name, "master", master, part, copy))
            if name in block.committed:
                continue
            index = places[name]
            state = {
                kind: shaped_views[kind][name] if kind in shaped_views else flats[kind][index]
                for kind in kinds
            }
            optimizer.state[master] = state
            self._params += [
                StateTensor(name, kind, tensor, part, copy)
                if kind in shaped_views
                else StateTensor(name, kind, tensor, copy=block.layout.shared)
                for kind, tensor in state.items()
            ]
        self._optimizers.append(optimizer)
        self._flats.append(StateTensor(block.name, "master", block.masters))
        self._flats += [StateTensor(block.name, kind, flat) for kind, flat in flats.items()]


def element_bytes(
    factory: OptimizerFactory, shapes: Mapping[str, Sequence[int]], device: torch.device
) -> tuple[int, ...]:
    """What an optimizer keeps of each element of a parameter, in bytes, by kind.

    Args:
        factory: of the optimizer.
        shapes: of one block's parameters, by their model-wide names. Only their dimensions count,
            so that nothing large is allocated.
        device: where it runs.

    Raises:
        ValueError: The state cannot be healed: not tensors, of other shapes, not from zero.
    """
    small = {name: torch.zeros([2] * len(shape), device=device) for name, shape in shapes.items()}
    kinds = _state_structure(factory, small)
    return tuple(dtype.itemsize for shaped, dtype, _ in kinds.values() if shaped)


@contextlib.contextmanager
def _only(trained: Mapping[str, torch.Tensor], names: Collection[str] | None) -> Iterator[None]:
    """Hide the gradients of all other parameters from their optimizer."""
    hidden = {n: m.grad for n, m in trained.items() if names is not None and n not in names}
    for name in hidden:
        trained[name].grad = None
    try:
        yield
    finally:
        for name, gradient in hidden.items():
            trained[name].grad = gradient


def part_of(flat: torch.Tensor, part: int) -> torch.Tensor:
    """Return one of :data:`REST_PARTS` parts of a flat tensor."""
    start, stop = (number * flat.numel() // REST_PARTS for number in (part, part + 1))
    return flat[start:stop]


def _state_structure(
    factory: OptimizerFactory, masters: dict[str, torch.Tensor]
) -> dict[str, StateLayout]:
    """Kinds of state that the optimizer keeps, sorted.

    Found by a step of a throw-away optimizer with zero gradients, in which a state
    that starts from zeros stays zero.

    Raises:
        ValueError: The state cannot be healed: not tensors, of other shapes, not from zero.
    """
    if not masters:
        return {}
    probes = [(name, torch.zeros_like(master)) for name, master in masters.items()]
    for _, probe in probes:
        probe.grad = torch.zeros_like(probe)
    optimizer = factory(probes)
    optimizer.step()
    label = type(optimizer).__name__
    structures: list[dict[str, StateLayout]] = []
    for name, probe in probes:
        structure = {}
        for kind, value in sorted(optimizer.state[probe].items()):
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{label} keeps {kind!r} of {name} as {type(value).__name__}")
            if value.numel() != 1 and value.shape != probe.shape:
                raise ValueError(f"{label} keeps {kind!r} of {name} in another shape")
            if kind != "step" and bool(value.any()):
                raise ValueError(f"{label} does not start {kind!r} of {name} from zero")
            structure[kind] = (
                kind != "step" and value.shape == probe.shape,
                value.dtype,
                value.device,
            )
        structures.append(structure)
    if any(structure != structures[0] for structure in structures):
        raise ValueError(f"{label} keeps different state for parameters of one block")
    return structures[0]
