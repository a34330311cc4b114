"""Experts of which each token takes a few: the router, the way of tokens to them and back.

Every token reaches all of its experts, whatever their load (no capacity, nothing is dropped). The
bits depend on the parameters and the micro-batch alone: equal scores go to the lower expert, tokens
reach an expert in the order of sample and position, and what a token's experts return is added in
ascending order of the experts. All of that is sorts, gathers and additions by slot. Nothing is
added at addresses that are looked up, which a GPU would do in any order.

Sizes of products depend on how many tokens an expert has. So on a GPU the host waits for these
counts once in each mixture's forward. They are statistics of the step, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from mainstay_core.snapshots.orderings import ONE
from mainstay_train.model import split
from mainstay_train.models import moe_config
from mainstay_train.models.llama import swiglu
from mainstay_train.models.moe_config import MoeConfig

TINY = 1e-20
"""Added to sums of scores before dividing by them: scores of a sigmoid may all be 0 in fp32."""


class Expert(nn.Module):
    """SwiGLU: down(silu(gate) * up), gate and up by one matrix."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = split.Linear(dim, 2 * hidden)
        self.down = split.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., dim] to the same shape."""
        output: torch.Tensor = self.down(swiglu(self.gate_up(x)))
        return output


class Routing(NamedTuple):
    """The experts of each token, and their weights."""

    gates: torch.Tensor
    """fp32 [tokens, active]."""
    experts: torch.Tensor
    """int64 [tokens, active], ascending for each token."""
    probabilities: torch.Tensor
    """int64 [experts]: the sum of each expert's share of the scores; empty if it is not counted."""


class Router(split.SplitModule):
    """Scores experts in fp32 and chooses for each token those with the best scores and biases.

    Softmax over all experts: Shazeer et al., "Outrageously Large Neural Networks", 2017, section
    2.1, without noise. Sigmoid: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, equations 13
    to 15.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        self.bias = nn.Parameter(torch.empty(config.experts)) if config.bias_rate else None

    def forward(self, x: torch.Tensor) -> Routing:
        """Route the tokens of [batch, sequence, dim], sample by sample."""
        flat = x.flatten(0, 1)
        recorder = split.current()
        if recorder is None:
            logits = functional.linear(flat.float(), self.weight.float())
        else:
            logits = _Logits.apply(flat, recorder.anchor, self.weight, recorder)  # type: ignore[no-untyped-call]
        return Routing(*_Route.apply(logits, self.bias, len(x), self.config))  # type: ignore[no-untyped-call]


class Mixture(split.SplitModule):
    """Routed experts, and shared ones, in the place of a layer's SwiGLU.

    Dai et al., "DeepSeekMoE", 2024, section 3. What the shared experts compute is one SwiGLU of
    their summed width.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = nn.ModuleList(
            Expert(config.dim, config.expert_hidden) for _ in range(config.experts)
        )
        shared = config.shared_experts * config.expert_hidden
        self.shared = Expert(config.dim, shared) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, sequence, dim] to the same shape."""
        routed = self._route(x)
        return routed if self.shared is None else routed + self.shared(x)

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        gates, experts, probabilities = self.router(x)
        way = Way.of(experts, len(self.experts))
        split.count(torch.cat([way.counts, probabilities]) if len(probabilities) else way.counts)
        combined = _Combine.apply(self._take(x, way), gates, way)  # type: ignore[no-untyped-call]
        return combined.view(x.shape)  # type: ignore[no-any-return]

    def _take(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        """What each expert makes of its rows, [rows, dim]."""
        parts = _Dispatch.apply(x.flatten(0, 1), way).split(way.counts.tolist())  # type: ignore[no-untyped-call]
        return torch.cat(
            [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        )


class Way(NamedTuple):
    """The way of tokens to their experts: a row for each token and slot, an expert's together."""

    slots: torch.Tensor
    """int64 [rows]: token * active + slot of each row; by expert, then by token."""
    rows: torch.Tensor
    """int64 [tokens, active]: the row of each token and slot."""
    counts: torch.Tensor
    """int64 [experts]: rows of each expert."""

    @classmethod
    def of(cls, experts: torch.Tensor, num_experts: int) -> Way:
        """Return the way to the experts of each token, int64 [tokens, active]."""
        ordered, slots = experts.reshape(-1).sort(stable=True)
        borders = torch.arange(num_experts + 1, device=experts.device)
        counts = torch.searchsorted(ordered, borders).diff()
        return cls(slots, slots.argsort().view(experts.shape), counts)

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row, int64 [rows]."""
        return self.slots // self.rows.shape[1]


def choose(scores: torch.Tensor, active: int) -> torch.Tensor:
    """Return the experts with the best scores, ascending; of equal scores the lower expert.

    Args:
        scores: [tokens, experts].
        active: how many are chosen for each token.

    Returns:
        int64 [tokens, active].
    """
    # Not topk: it does not say which of equal scores it takes.
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :active]
    return best.sort(dim=1).values


def shift_bias(bias: torch.Tensor, counts: Sequence[int], rate: float) -> None:
    """Add ``rate`` to the bias of experts with fewer tokens than the mean, and take it from others.

    Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024,
    algorithm 1. Whether an expert has fewer is decided in integers.

    Args:
        bias: fp32 [experts], written to.
        counts: tokens of each expert in the step.
        rate: by how much; an expert at the mean keeps its bias.
    """
    total = sum(counts)
    signs = [(len(counts) * count < total) - (len(counts) * count > total) for count in counts]
    bias.add_(torch.tensor(signs, dtype=bias.dtype).to(bias.device), alpha=rate)


def counts_of(experts: torch.Tensor, sequences: int, num_experts: int) -> torch.Tensor:
    """Return how many tokens of each sequence take each expert, int64 [sequences, experts].

    Args:
        experts: int64 [tokens, active]; sequences of equal lengths one behind the other.
        sequences: how many there are.
        num_experts: experts of the layer.
    """
    every = torch.arange(num_experts, device=experts.device)
    counts = torch.zeros(sequences, num_experts, dtype=torch.int64, device=experts.device)
    for slot in experts.unbind(1):
        counts += (slot.view(sequences, -1, 1) == every).sum(1)
    return counts


def _probabilities(scores: torch.Tensor, config: MoeConfig) -> torch.Tensor:
    """Return the sum over tokens of each expert's share of the scores, int64 in fixed point.

    Each share is rounded by itself, so the sum does not depend on the order of tokens.
    """
    if not config.counts_probabilities:
        return scores.new_empty(0, dtype=torch.int64)
    shares = scores
    if config.router == moe_config.SIGMOID:
        shares = scores / (scores.sum(1, keepdim=True) + TINY)
    return (shares * ONE).round().to(torch.int64).sum(0)


def _by_slot(values: torch.Tensor) -> torch.Tensor:
    """Add up [tokens, active] slot by slot, [tokens, 1]."""
    total = values[:, :1]
    for slot in range(1, values.shape[1]):
        total = total + values[:, slot : slot + 1]
    return total


class _Logits(torch.autograd.Function):
    """The product with the router's weight, in fp32 whatever the type of the tokens."""

    @staticmethod
    def forward(ctx, x, anchor, weight, recorder):  # type: ignore[no-untyped-def] # noqa: ARG004
        ctx.save_for_backward(x)
        ctx.held = (weight, recorder)
        return functional.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        weight, recorder = ctx.held
        recorder.defer(weight, lambda view, add: split.add_product(view, dy, x.float(), add))
        dx = torch.mm(dy, weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _Route(torch.autograd.Function):
    """Logits to gates and experts; the backward adds the gradient of the balance loss.

    That loss is a sum over tokens, as the model's is: for a sequence of T tokens T times
    ``balanceWeight`` times the sum over experts of f P, with f the tokens that take the expert,
    divided by their mean over the experts, and P the mean of its score's share (DeepSeek-V3,
    equations 17 to 20; f counts the experts that were taken).
    """

    @staticmethod
    def forward(ctx, logits, bias, sequences, config):  # type: ignore[no-untyped-def]
        soft = config.router == moe_config.SOFTMAX
        scores = torch.softmax(logits, 1) if soft else torch.sigmoid(logits)
        wanted = scores if bias is None else scores + bias
        experts = choose(wanted, config.active_experts)
        gates = scores.gather(1, experts)
        total = None
        if config.gates == moe_config.NORMALIZED:
            total = _by_slot(gates) + TINY
            gates = gates / total
        ctx.save_for_backward(scores, experts, gates, total)
        ctx.held = (sequences, config)
        probabilities = _probabilities(scores, config)
        ctx.mark_non_differentiable(experts, probabilities)
        return gates * config.gate_scale, experts, probabilities

    @staticmethod
    def backward(ctx, dgates, *_):  # type: ignore[no-untyped-def]
        scores, experts, gates, total = ctx.saved_tensors
        sequences, config = ctx.held
        chosen = dgates * config.gate_scale
        if total is not None:
            chosen = (chosen - _by_slot(chosen * gates)) / total
        every = torch.arange(config.experts, device=scores.device)
        dscores = torch.zeros_like(scores)
        for slot in range(config.active_experts):
            dscores += torch.where(
                experts[:, slot : slot + 1] == every, chosen[:, slot : slot + 1], 0
            )
        if config.balance_loss == moe_config.SEQUENCE:
            dscores += _balance_gradient(scores, experts, sequences, config)
        if config.router == moe_config.SOFTMAX:
            dlogits = scores * (dscores - (scores * dscores).sum(1, keepdim=True))
        else:
            dlogits = dscores * scores * (1 - scores)
        return dlogits, None, None, None


def _balance_gradient(
    scores: torch.Tensor, experts: torch.Tensor, sequences: int, config: MoeConfig
) -> torch.Tensor:
    """The gradient of the balance loss by the scores, [tokens, experts]."""
    length = len(scores) // sequences
    load = counts_of(experts, sequences, config.experts).to(scores.dtype)
    load *= config.balance_weight * config.experts / (config.active_experts * length)
    of_tokens = load.repeat_interleave(length, dim=0)
    if config.router == moe_config.SOFTMAX:
        return of_tokens
    total = scores.sum(1, keepdim=True) + TINY
    return (of_tokens - (of_tokens * scores).sum(1, keepdim=True) / total) / total


class _Dispatch(torch.autograd.Function):
    """Rows of tokens, [tokens, dim] to [rows, dim]; gradients of a token's rows add up in fp32."""

    @staticmethod
    def forward(ctx, x, way):  # type: ignore[no-untyped-def]
        ctx.way = way
        return x.index_select(0, way.tokens)

    @staticmethod
    def backward(ctx, drows):  # type: ignore[no-untyped-def]
        first, *others = ctx.way.rows.unbind(1)
        total = drows.index_select(0, first).float()
        for rows in others:
            total.add_(drows.index_select(0, rows).float())
        return total.to(drows.dtype), None


class _Combine(torch.autograd.Function):
    """Weighted sums of rows, [rows, dim] to [tokens, dim], in fp32 by ascending expert."""

    @staticmethod
    def forward(ctx, outputs, gates, way):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(outputs, gates)
        ctx.way = way
        first, *others = way.rows.unbind(1)
        total = outputs.index_select(0, first).float().mul_(gates[:, :1])
        for slot, rows in enumerate(others, 1):
            total.add_(outputs.index_select(0, rows).float().mul_(gates[:, slot : slot + 1]))
        return total.to(outputs.dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        outputs, gates = ctx.saved_tensors
        way, wide = ctx.way, dy.float()
        of_rows = gates.reshape(-1).index_select(0, way.slots)[:, None]
        doutputs = wide.index_select(0, way.tokens).mul_(of_rows).to(outputs.dtype)
        dgates = torch.empty_like(gates)
        for slot, rows in enumerate(way.rows.unbind(1)):
            dgates[:, slot] = outputs.index_select(0, rows).float().mul_(wide).sum(1)
        return doutputs, dgates, None
