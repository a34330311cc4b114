"""Modules whose backward is split: first the input's gradient, later the weight's.

A pipeline sends dx onward as soon as it has it and computes dW when it has time
(zero-bubble schedules; Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
section 2). While a block records, these modules hand (input, output gradient) to
the tape in place of a weight gradient, and ``Block.backward_weight`` finishes the
work. Outside a block they are ordinary modules that autograd differentiates.

Do not use such a module's weight in another way than by calling the module: the
tape would not see that part of its gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

WIDENED_ELEMENTS = 1 << 22
"""Elements of a bf16 operand that are widened to fp32 at a time: 16 MiB. Bits depend on it, so it
is in the fingerprint."""

WeightGradient = Callable[[torch.Tensor, bool], None]
"""Writes (False) or adds (True) a parameter's gradient into a given fp32 view."""


@dataclass(slots=True)
class Recorder:
    """Collects the weight gradients that split modules put off during one backward."""

    anchor: torch.Tensor
    """Requires a gradient, so that autograd visits split modules whose input needs none."""
    pending: dict[int, list[WeightGradient]] = field(default_factory=dict)
    """By id of the parameter, in the order of the backward."""
    counted: list[torch.Tensor] = field(default_factory=list)
    """What modules counted, int64 and flat, in the order of the forward."""

    def defer(self, parameter: torch.Tensor, work: WeightGradient) -> None:
        """Keep ``work`` for :meth:`Block.backward_weight`."""
        self.pending.setdefault(id(parameter), []).append(work)


_local = threading.local()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let split modules called in this thread record to ``recorder``."""
    previous = current()
    _local.recorder = recorder
    try:
        yield
    finally:
        _local.recorder = previous


def current() -> Recorder | None:
    """The recorder of this thread, None outside a block's recompute and in compiled code."""
    if torch.compiler.is_compiling():  # it could not follow what a recorder keeps
        return None
    return getattr(_local, "recorder", None)


def count(statistics: torch.Tensor) -> None:
    """Have integers of a micro-batch added up over the step, where a block records.

    A block says in ``BlockSpec.statistics`` what its modules count.

    Args:
        statistics: of any shape; whole numbers, 0 or above.
    """
    recorder = current()
    if recorder is not None:
        recorder.counted.append(statistics.detach().reshape(-1).to(torch.int64))


class SplitModule(nn.Module):
    """Base of modules whose own parameters' gradients are deferred while recording."""

    takes_parts = False
    """Whether forward can compute with a part of each parameter. Where a stage has several ranks
    and a parameter is distributed over them, a block gives it this rank's part, a plain tensor."""
    compiles = False
    """Whether compiled code may call it, which defers nothing: gradients go to ``leaves``."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: dict[str, torch.Tensor] = {}
        """By a parameter's local name, in a block that is compiled: a zero in fp32 of its shape,
        whose gradient is that of the parameter, unrounded."""

    def add_leaves(self) -> None:
        """Make the leaves of a module that compiled code calls; they take no memory."""
        for name, parameter in self.named_parameters(recurse=False):
            zero = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.leaves[name] = zero.expand(parameter.shape).requires_grad_()


def parameters_in_parts(module: nn.Module) -> set[int]:
    """Return the ids of the parameters of modules that take parts."""
    return {
        id(parameter)
        for inside in module.modules()
        if isinstance(inside, SplitModule) and inside.takes_parts
        for parameter in inside.parameters(recurse=False)
    }


class Linear(SplitModule):
    """y = x W^T (+ b), weight of shape [out_features, in_features]."""

    compiles = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        recorder = current()
        if recorder is None and self.leaves:
            y = _LeafLinear.apply(x, self.weight, self.leaves["weight"])  # type: ignore[no-untyped-call]
            return y if self.bias is None else (y + self.bias + self.leaves["bias"]).to(y.dtype)  # type: ignore[no-any-return]
        if recorder is None:
            return functional.linear(x, self.weight, self.bias)
        return _Linear.apply(x, recorder.anchor, self.weight, self.bias, recorder)  # type: ignore[no-any-return,no-untyped-call]


class RMSNorm(SplitModule):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension, computed in fp32.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """

    compiles = True

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [..., dim]."""
        recorder = current()
        if recorder is None:
            if torch.is_grad_enabled():
                xf = x.float()
                scale = torch.rsqrt(xf.square().mean(-1, keepdim=True) + self.eps)
                weight = self.weight.float()
                if self.leaves:
                    weight = weight + self.leaves["weight"]
                return (xf * scale * weight).to(x.dtype)
            return _rms_norm(x, self.weight, self.eps)[0]
        return _RMSNorm.apply(x, recorder.anchor, self.weight, self.eps, recorder)  # type: ignore[no-any-return,no-untyped-call]


class Embedding(SplitModule):
    """Rows of a table of shape [num_embeddings, dim]."""

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 [...] to [..., dim]."""
        recorder = current()
        if recorder is None:
            return functional.embedding(tokens, self.weight)
        return _Embedding.apply(tokens, recorder.anchor, self.weight, recorder)  # type: ignore[no-any-return,no-untyped-call]


def add_product(
    view: torch.Tensor,
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    add: bool,
    widened: int = WIDENED_ELEMENTS,
) -> None:
    """Write or add outputs^T inputs: products and their sums in fp32, whatever the operands' type.

    The product of a micro-batch is summed up by itself and then added.

    Args:
        view: fp32 [out_features, in_features].
        outputs: gradients, [tokens, out_features].
        inputs: [tokens, in_features], of the same type.
        add: whether to add to the view.
        widened: elements of an operand that are widened at a time, where the device needs that.
    """
    if inputs.dtype == view.dtype:
        if add:
            view.add_(torch.mm(outputs.t(), inputs))
        else:
            torch.mm(outputs.t(), inputs, out=view)
    elif view.is_cuda:
        _write(view, torch.mm(outputs.t(), inputs, out_dtype=view.dtype), add)
    else:
        _add_widened(view, outputs, inputs, add, widened)


def _add_widened(
    view: torch.Tensor, outputs: torch.Tensor, inputs: torch.Tensor, add: bool, widened: int
) -> None:
    """:func:`add_product` for a device without products of narrow operands into fp32.

    The product of two bf16 numbers has no rounding error in fp32.
    """
    tokens, width = inputs.shape
    rows = max(1, widened // width)
    for first in range(0, len(view), rows):
        part = view[first : first + rows]
        step = max(1, widened // max(width, len(part)))
        total: torch.Tensor | None = None
        for start in range(0, tokens, step):
            wide_outputs = outputs[start : start + step, first : first + rows].float().t()
            wide_inputs = inputs[start : start + step].float()
            if total is None:
                total = torch.mm(wide_outputs, wide_inputs)
            else:
                total.addmm_(wide_outputs, wide_inputs)
            del wide_outputs, wide_inputs
        if total is not None:
            _write(part, total, add)
        elif not add:  # of no tokens: the view holds an earlier sum
            part.zero_()


def add_rows(table: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Add up the rows of each place in their order, then add each sum to the table's row.

    A sum of its own for each place, because what a micro-batch adds must not depend on what was
    there before. No size here depends on the values of ``places``, which would wait for a GPU.

    Args:
        table: fp32 [places, width]; no element of it is a negative zero.
        places: int64 [n].
        rows: [n, width].
    """
    segment, place = _segments(places, min(len(places), len(table)))
    sums = table.new_zeros(len(place), table.shape[1])
    sums.index_add_(0, segment, rows.to(table.dtype))
    table.index_add_(0, place, sums)


def _segments(places: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the different places in ascending order.

    Args:
        places: int64 [n].
        most: bound on how many there are.

    Returns:
        The number of each element's place, [n], and the place of each number, [most]. Numbers
        that are not in use stand for place 0.
    """
    ordered, order = places.sort(stable=True)
    begins = torch.zeros_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    numbers = begins.cumsum(0)
    segment, place = torch.empty_like(order), ordered.new_zeros(most)
    segment[order] = numbers
    place[numbers] = ordered
    return segment, place


def _write(view: torch.Tensor, gradient: torch.Tensor, add: bool) -> None:
    if add:
        view.add_(gradient)
    else:
        view.copy_(gradient)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y in x's type, normalised x in fp32, its scale in fp32)."""
    xf = x.float()
    scale = torch.rsqrt(xf.square().mean(-1, keepdim=True).add_(eps))
    normalised = xf * scale
    return (normalised * weight.float()).to(x.dtype), normalised, scale


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, weight, bias, recorder):  # type: ignore[no-untyped-def] # noqa: ARG004
        ctx.save_for_backward(x)
        ctx.held = (weight, bias, recorder)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        weight, bias, recorder = ctx.held
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])

        recorder.defer(weight, lambda view, add: add_product(view, flat_dy, flat_x, add))
        if bias is not None:
            recorder.defer(bias, lambda view, add: _write(view, flat_dy.float().sum(0), add))
        dx = torch.matmul(dy, weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None


class _LeafLinear(torch.autograd.Function):
    """Without a recorder: the weight's gradient is returned, as that of a leaf in fp32."""

    @staticmethod
    def forward(ctx, x, weight, leaf):  # type: ignore[no-untyped-def] # noqa: ARG004
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        outputs, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        if inputs.dtype == torch.float32:
            gradient = torch.mm(outputs.t(), inputs)
        elif inputs.is_cuda:
            gradient = torch.mm(outputs.t(), inputs, out_dtype=torch.float32)
        else:
            gradient = torch.mm(outputs.float().t(), inputs.float())
        return torch.matmul(dy, weight), None, gradient


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, weight, eps, recorder):  # type: ignore[no-untyped-def] # noqa: ARG004
        y, normalised, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(normalised, scale)
        ctx.held = (weight, recorder)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        normalised, scale = ctx.saved_tensors
        weight, recorder = ctx.held
        dyf = dy.float()

        def weight_gradient(view: torch.Tensor, add: bool) -> None:
            _write(view, (dyf * normalised).reshape(-1, view.shape[0]).sum(0), add)

        recorder.defer(weight, weight_gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        inner = dyf * weight.float()
        dot = (inner * normalised).mean(-1, keepdim=True)
        dx = inner.sub_(normalised * dot).mul_(scale)
        return dx.to(dy.dtype), None, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, anchor, weight, recorder):  # type: ignore[no-untyped-def] # noqa: ARG004
        ctx.save_for_backward(tokens)
        ctx.held = (weight, recorder)
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (tokens,) = ctx.saved_tensors
        weight, recorder = ctx.held

        def weight_gradient(view: torch.Tensor, add: bool) -> None:
            if not add:
                view.zero_()
            add_rows(view, tokens.reshape(-1), dy.reshape(-1, dy.shape[-1]))

        recorder.defer(weight, weight_gradient)
        return None, None, None, None
