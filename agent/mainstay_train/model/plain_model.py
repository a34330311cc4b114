"""A user's plain nn.Module, adopted into the flat layout that everything exact is made on.

The module knows nothing of Mainstay. Its parameters stay the objects that they are,
with their storage moved into flat buffers: one per layer, so that the chunk grid is
that of the model (:mod:`mainstay_train.exact.layout`). Its first values are those that it
was registered with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from mainstay_core.base.digest import Digest
from mainstay_train.exact import layout
from mainstay_train.model.workload import DTYPES, WorkloadError
from mainstay_train.sums import digests

_ROOT = "<model>"
"""Block of the parameters that the model itself holds, outside its children."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose children count as layers of their own."""


class PlainPart:
    """The parameters of one layer: masters, what the module computes with, first values.

    Invariant: the parameters' storage is ``compute``, whatever is written into the masters.

    Args:
        flat: the layer's layout.
        parameters: by model-wide name; their storage moves.
    """

    def __init__(self, flat: layout.BlockLayout, parameters: Mapping[str, nn.Parameter]) -> None:
        first = next(iter(parameters.values()))
        self.name, self.layout, self.device = flat.name, flat, first.device
        self.masters = layout.aligned_zeros(flat.size, device=self.device)
        self.compute = (
            self.masters
            if first.dtype == torch.float32
            else layout.aligned_zeros(flat.size, dtype=first.dtype, device=self.device)
        )
        views = flat.views(self.masters)
        compute = flat.views(self.compute)
        with torch.no_grad():
            for name, parameter in parameters.items():
                views[name].copy_(parameter)
                compute[name].copy_(parameter)
                parameter.data = compute[name]
        # A trainer may have to go back to version 0 long after these values are overwritten.
        self._first = self.masters.to("cpu", copy=True)

    @property
    def units(self) -> dict[str, tuple[str, ...]]:
        """One: a plain module does not say which parts it has."""
        return {self.name: tuple(param.name for param in self.layout.params)}

    @property
    def committed(self) -> frozenset[str]:
        """None: the optimizer changes all parameters of a plain module."""
        return frozenset()

    def commit(self, statistics: Sequence[int]) -> None:
        """Change nothing: a plain module counts nothing, and has nothing that changes so."""

    def initialize(self, seed: int) -> None:
        """Set the masters to the values that the module was registered with."""
        del seed  # it has decided already, when the module was made
        self.masters.copy_(self._first)
        self.refresh()

    def refresh(self) -> None:
        """Renew the compute parameters from the masters; nothing to do in fp32."""
        if self.compute is not self.masters:
            self.compute.copy_(self.masters)


class PlainModel:
    """The module of a user's own loop, on one device.

    Args:
        module: what is trained; moved to ``device``.
        device: where it computes.
        allow_unused: whether a parameter may be without a gradient in a micro-batch.

    Raises:
        WorkloadError: The module cannot be trained exactly; says what would be right.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, *, allow_unused: bool = False
    ) -> None:
        _check_module(module)
        self._parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.dtype = _check_parameters(self._parameters)
        self._allow_unused = allow_unused
        self.module = module.to(device)  # the parameters stay the same objects
        self.device = device
        self.parts = tuple(self._adopt())
        self._arrived: dict[str, int] = {}
        self._on_backward: Callable[[], None] | None = None
        for name, parameter in self._parameters.items():
            hook = self._arrival_of(name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._fixed = dict(_fixed_tensors(module))
        self._versions = self._read_versions()

    def fingerprint(self) -> dict[str, str]:
        """Entries for the numerics fingerprint: shapes, first values, and what never changes."""
        shapes = hashlib.blake2b(digest_size=8)
        first = Digest.zero()
        for part in self.parts:
            for param in part.layout.params:
                shapes.update(f"{param.name}{param.shape}".encode())
            views = part.layout.views(part.masters)
            first += digests.digest_tensors(views.items())
        return {
            "model": shapes.hexdigest(),
            "model.first_values": first.hex(),
            "model.fixed": digests.digest_tensors(self._fixed.items()).hex(),
        }

    def begin(self, on_backward: Callable[[], None]) -> None:
        """A micro-batch begins: no parameter has a gradient.

        Args:
            on_backward: called when the first gradient of the micro-batch arrives.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        self._arrived.clear()
        self._on_backward = on_backward

    def collect(self, where: str) -> dict[str, torch.Tensor | None]:
        """Return the gradients of the micro-batch by parameter; it is over.

        Each has the memory and type that autograd gave it: what it is added to is fp32, so the sum
        over a type is the ordered sum of its micro-batches. None: the loss does not depend on the
        parameter.

        Args:
            where: the micro-batch, for messages.

        Raises:
            WorkloadError: The loop or the module broke a rule.
        """
        self._on_backward = None
        self._check(where)
        found: dict[str, torch.Tensor | None] = {}
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            found[name] = None if gradient is None else gradient.detach()
        return found

    def _check(self, where: str) -> None:
        twice = [name for name, count in self._arrived.items() if count > 1]
        if twice:
            raise WorkloadError(
                f"backward ran twice in {where} (seen at {twice[0]!r}): add the losses up and call "
                "backward once for each work"
            )
        if not self._arrived:
            raise WorkloadError(
                f"no gradient in {where}: call loss.backward() on a loss of the registered model "
                "before work.done(loss, tokens)"
            )
        unused = [name for name, p in self._parameters.items() if p.grad is None]
        if unused and not self._allow_unused:
            raise WorkloadError(
                f"{_listed(unused)} got no gradient in {where}: the loss does not depend on it; "
                "remove or freeze it (requires_grad_(False)), or allow it with "
                "session.register(..., allow_unused=True)"
            )
        sparse = [n for n, p in self._parameters.items() if p.grad is not None and p.grad.is_sparse]
        if sparse:
            raise WorkloadError(f"{_listed(sparse)} has a sparse gradient; use sparse=False")
        changed = [name for name, v in self._read_versions().items() if v != self._versions[name]]
        if changed:
            raise WorkloadError(
                f"{_listed(changed)} was changed by the loop or the module by {where}; parameters "
                "and buffers may only change when a step commits (no optimizer.step() of your own, "
                "no running statistics: use LayerNorm, or BatchNorm in eval mode)"
            )

    def _arrival_of(self, name: str) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            if self._on_backward is None:
                return  # a backward of the user's own, between two works
            if not self._arrived:
                self._on_backward()
            self._arrived[name] = self._arrived.get(name, 0) + 1

        return arrived

    def _adopt(self) -> Iterator[PlainPart]:
        layers: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            layers.setdefault(_layer_of(self.module, name), {})[name] = parameter
        for layer, parameters in layers.items():
            yield PlainPart(_layout_of(layer, parameters), parameters)

    def _read_versions(self) -> dict[str, int]:
        """How often each tensor was written in place; our own writes go through other views."""
        return {n: t._version for n, t in [*self._parameters.items(), *self._fixed.items()]}


def _layer_of(module: nn.Module, name: str) -> str:
    """The layer that a parameter belongs to: the first module on its path that is no container."""
    path = []
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        path.append(part)
        if not isinstance(module, _CONTAINERS):
            break
    return ".".join(path) or _ROOT


def _layout_of(layer: str, parameters: Mapping[str, nn.Parameter]) -> layout.BlockLayout:
    params = []
    offset = 0
    for name, parameter in parameters.items():
        shape, numel = tuple(parameter.shape), parameter.numel()
        params.append(layout.Param(name=name, shape=shape, offset=offset, numel=numel))
        offset += layout.padded(numel)
    return layout.BlockLayout(name=layer, params=tuple(params), size=offset)


def _fixed_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What takes part but is not trained: buffers and frozen parameters."""
    yield from module.named_buffers()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise WorkloadError(
            f"session.register takes a torch.nn.Module, got {type(module).__name__}"
        )
    for name, child in module.named_modules():
        norm = isinstance(child, nn.modules.batchnorm._BatchNorm)
        if norm and child.training and child.track_running_stats:
            raise WorkloadError(
                f"the model contains {type(child).__name__} ({name!r}), whose statistics depend on "
                "the order of micro-batches; use LayerNorm, or put it in eval mode"
            )


def _check_parameters(parameters: Mapping[str, nn.Parameter]) -> torch.dtype:
    """Return the type that the parameters have in common."""
    if not parameters:
        raise WorkloadError("the model has no parameter that is trained (requires_grad)")
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise WorkloadError(
            f"all trained parameters must be of one type out of {', '.join(DTYPES)}, found {found}"
        )
    abstract = [name for name, parameter in parameters.items() if parameter.is_meta]
    if abstract:
        raise WorkloadError(f"{_listed(abstract)} is on the meta device: register values")
    return dtypes.pop()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
