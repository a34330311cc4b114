"""A decoder-only Llama, configured by ``workload.config``.

RMSNorm before each sublayer, rotary positions, grouped queries, SwiGLU, embedding
and head untied (Touvron et al., "LLaMA", 2023, section 2.2; Su et al., "RoFormer",
2021, section 3.2.2; Ainslie et al., "GQA", 2023, section 2.2; Shazeer, "GLU variants
improve Transformer", 2020, equation 6).

Where a stage has several ranks, its blocks are tensor parallel
(:mod:`mainstay_train.models.llama_parallel`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.wire.reinitialisation import Rule
from mainstay_train.exact import optimizer
from mainstay_train.exact.draws import Address
from mainstay_train.exact.initialization import DEFAULT_STD, Init, default_init
from mainstay_train.model import data, losses, split
from mainstay_train.model import workload as workloads
from mainstay_train.model.blocks import BlockSpec, InitRule
from mainstay_train.models import attention, llama_parallel
from mainstay_train.models.llama_config import LlamaConfig, parse_config


def warm_up() -> None:
    """Read the default corpus once in the warm parent, for all its trainers."""
    data.load_corpus(data.STDLIB)


def workload(config: Mapping[str, Any], args: Sequence[str] = ()) -> workloads.Workload:
    """The entrypoint.

    Raises:
        InvalidSpecError: See :func:`parse_config`; or arguments are given.
    """
    if args:
        raise InvalidSpecError("workload.args", f"the built-in Llama takes none, got {list(args)}")
    parsed = parse_config(config, LlamaConfig)
    return workload_of(parsed, block_specs(parsed))


def workload_of(parsed: LlamaConfig, blocks: tuple[BlockSpec, ...]) -> workloads.Workload:
    """Return the workload of some blocks, trained as the configuration says."""
    return workloads.Workload(
        blocks=blocks,
        dataset=data.ByteDataset(
            parsed.data_path,
            sequence=parsed.sequence,
            micro_batch_size=parsed.micro_batch_size,
        ),
        activation_shape=(parsed.micro_batch_size, parsed.sequence, parsed.dim),
        dtype=workloads.DTYPES[parsed.dtype],
        optimizer=optimizer.adamw(weight_decay=parsed.weight_decay),
        learning_rate=optimizer.warmup_cosine(
            peak=parsed.lr, warmup_steps=parsed.warmup_steps, total_steps=parsed.decay_steps
        ),
        clip_norm=parsed.clip_norm or None,
        kernels=partial(_kernels, parsed),
    )


def _kernels(config: LlamaConfig, device: torch.device) -> dict[str, str]:
    form = attention.check(
        config.attention,
        device,
        workloads.DTYPES[config.dtype],
        config.heads,
        config.kv_heads,
        config.head_dim,
    )
    return {"attention": form}


def block_specs(config: LlamaConfig) -> tuple[BlockSpec, ...]:
    """Embedding, layers and head; costs in multiply-adds per token of a forward."""
    embedding = BlockSpec(
        name="embedding",
        build=lambda: split.Embedding(config.vocab, config.dim),
        parallelize=lambda _, mesh: llama_parallel.ParallelEmbedding(config, mesh),
        cost=float(config.dim),
    )
    head = BlockSpec(
        name="head",
        build=lambda: Head(config),
        parallelize=lambda _, mesh: llama_parallel.ParallelHead(config, mesh),
        module_loss=_loss,
        cost=float(config.dim * config.vocab),
    )
    layers = (
        BlockSpec(
            name=name,
            build=partial(Layer, config, name),
            draws=True,
            init=layer_init(config),
            cost=float(attention_cost(config) + 3 * config.dim * config.hidden),
            parallelize=partial(_parallel_layer, config, name),
            origins=llama_parallel.origins(config),
            reinitialise=Rule.AVERAGE,
        )
        for name in (f"layers.{index}" for index in range(config.layers))
    )
    return (embedding, *layers, head)


def attention_cost(config: LlamaConfig) -> int:
    """Return the multiply-adds of a layer's attention per token."""
    head_width = config.head_dim * (config.heads + 2 * config.kv_heads)
    return config.dim * (head_width + config.dim) + 2 * config.sequence * config.dim


def _loss(head: Any, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = head.loss(output, targets)
    return loss


def _parallel_layer(config: LlamaConfig, name: str, _: nn.Module, mesh: Any) -> nn.Module:
    return llama_parallel.ParallelLayer(config, name, mesh)


class AttentionLayer(nn.Module):
    """Attention and what a subclass feeds forward, each added to its input."""

    def __init__(self, config: LlamaConfig, site: str) -> None:
        super().__init__()
        self.config = config
        self.site = site
        head_width = config.head_dim * (config.heads + 2 * config.kv_heads)
        self.attention_norm = split.RMSNorm(config.dim)
        self.attention_qkv = split.Linear(config.dim, head_width)
        self.attention_out = split.Linear(config.dim, config.dim)

    def forward(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        """Map [batch, sequence, dim] to the same shape."""
        config = self.config
        qkv = self.attention_qkv(self.attention_norm(x))
        heads = attention.attend(
            qkv,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.rope_base,
            config.attention,
        )
        attended = self.attention_out(heads)
        x = x + attention.drop(attended, address, self.site, "attention", config.dropout)
        mlp = self.feed_forward(x)
        return x + attention.drop(mlp, address, self.site, "mlp", config.dropout)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [batch, sequence, dim] and map it token by token to the same shape."""
        raise NotImplementedError


class Layer(AttentionLayer):
    """Attention and SwiGLU, each normalised before and added to its input."""

    def __init__(self, config: LlamaConfig, site: str) -> None:
        super().__init__(config, site)
        self.mlp_norm = split.RMSNorm(config.dim)
        self.mlp_gate_up = split.Linear(config.dim, 2 * config.hidden)
        self.mlp_down = split.Linear(config.hidden, config.dim)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply SwiGLU to the normalised [batch, sequence, dim]."""
        gated = swiglu(self.mlp_gate_up(self.mlp_norm(x)))
        mlp: torch.Tensor = self.mlp_down(gated)
        return mlp


class Head(nn.Module):
    """Last norm, the projection to the vocabulary and the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = split.RMSNorm(config.dim)
        self.out = losses.ProjectedCrossEntropy(config.dim, config.vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [batch, sequence, dim]; logits are made with the loss."""
        normalised: torch.Tensor = self.norm(x)
        return normalised

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a sum over tokens, of what :meth:`forward` returned."""
        total: torch.Tensor = self.out(x, targets)
        return total


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, gate and up being the halves of the last dimension."""
    if torch.compiler.is_compiling():  # its backward writes both halves at once by itself
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return _SwiGLU.apply(x)  # type: ignore[no-any-return,no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """Writes both halves of the gradient in place: concatenating them costs more than a product
    of the layer's matrices on CPU (0.6 ms for 128 tokens of width 576, torch 2.13).
    """

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        torch.mul(dy, functional.silu(gate), out=dup)
        return dx


def layer_init(config: LlamaConfig) -> InitRule:
    """Return the first values of a layer's parameters.

    What is added to the residual stream is scaled down by its number of additions
    (Radford et al., "GPT-2", 2019, section 2.3).
    """
    added = Init(std=DEFAULT_STD * (2 * config.layers) ** -0.5)
    outputs = ("attention_out.weight", "down.weight")

    def rule(name: str, shape: tuple[int, ...]) -> Init:
        return added if name.endswith(outputs) else default_init(name, shape)

    return rule
