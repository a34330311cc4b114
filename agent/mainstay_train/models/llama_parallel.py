"""The built-in Llama over an inner mesh: tensor parallelism by DTensor.

Column, then row parallel matrices with one sum over the mesh per sublayer (Shoeybi
et al., "Megatron-LM", 2019, section 3); heads and the width of SwiGLU are split,
the table of the embedding and the rows of the head too. Between blocks every rank
has the whole activation, so pipeline neighbours exchange plain tensors.

Parameters that the dense model fuses are apart here, since each rank's rows of a
fused matrix lie in several places; :data:`~mainstay_train.exact.layout.Origin` says
where, so first values and digests are those of the fused one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact.draws import Address
from mainstay_train.exact.layout import Origin
from mainstay_train.model import split
from mainstay_train.model.losses import cross_entropy_sum
from mainstay_train.models import attention
from mainstay_train.models.llama_config import LlamaConfig


def origins(config: LlamaConfig) -> dict[str, Origin]:
    """Where the parts of a layer's fused matrices lie, by local name."""
    width = config.head_dim
    qkv = (width * (config.heads + 2 * config.kv_heads), config.dim)
    gate_up = (2 * config.hidden, config.dim)
    return {
        "attention_q.weight": Origin("attention_qkv.weight", qkv, 0),
        "attention_k.weight": Origin("attention_qkv.weight", qkv, width * config.heads),
        "attention_v.weight": Origin(
            "attention_qkv.weight", qkv, width * (config.heads + config.kv_heads)
        ),
        "mlp_gate.weight": Origin("mlp_gate_up.weight", gate_up, 0),
        "mlp_up.weight": Origin("mlp_gate_up.weight", gate_up, config.hidden),
    }


class ParallelLayer(nn.Module):
    """One rank's part of a layer: its heads, and its part of SwiGLU's width.

    Raises:
        InvalidSpecError: heads or widths cannot be split among so many ranks.
    """

    def __init__(self, config: LlamaConfig, site: str, mesh: Any) -> None:
        super().__init__()
        for name, value in (
            ("kvHeads", config.kv_heads),
            ("heads", config.heads),
            ("hidden", config.hidden),
        ):
            if value % mesh.size():
                raise InvalidSpecError(
                    f"workload.config.{name}",
                    f"is {value}, must be a multiple of ranksPerStage ({mesh.size()})",
                )
        self.config, self.site, self.mesh = config, site, mesh
        width, dim = config.head_dim, config.dim
        self.attention_norm = split.RMSNorm(dim)
        self.attention_q = _linear(mesh, 0, config.heads * width, dim)
        self.attention_k = _linear(mesh, 0, config.kv_heads * width, dim)
        self.attention_v = _linear(mesh, 0, config.kv_heads * width, dim)
        self.attention_out = _linear(mesh, 1, dim, dim)
        self.mlp_norm = split.RMSNorm(dim)
        self.mlp_gate = _linear(mesh, 0, config.hidden, dim)
        self.mlp_up = _linear(mesh, 0, config.hidden, dim)
        self.mlp_down = _linear(mesh, 1, dim, config.hidden)

    def forward(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        """Map [batch, sequence, dim] to the same shape, equal on all ranks."""
        config, ranks = self.config, self.mesh.size()
        h = _replicated(self.attention_norm(x), self.mesh)
        parts = (self.attention_q(h), self.attention_k(h), self.attention_v(h))
        qkv = torch.cat([part.to_local() for part in parts], dim=-1)
        heads, kv_heads = config.heads // ranks, config.kv_heads // ranks
        mine = attention.attend(
            qkv, heads, kv_heads, config.head_dim, config.rope_base, config.attention
        )
        attended = _summed(self.attention_out(_sharded(mine, self.mesh)))
        x = x + attention.drop(attended, address, f"{self.site}.attention", config.dropout)
        h = _replicated(self.mlp_norm(x), self.mesh)
        gated = functional.silu(self.mlp_gate(h).to_local()) * self.mlp_up(h).to_local()
        mlp = _summed(self.mlp_down(_sharded(gated, self.mesh)))
        return x + attention.drop(mlp, address, f"{self.site}.mlp", config.dropout)


class ParallelEmbedding(nn.Module):
    """One rank's rows of the embedding's table."""

    def __init__(self, config: LlamaConfig, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = _parameter(mesh, 0, config.vocab, config.dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 [...] to [..., dim], equal on all ranks."""
        return _summed(functional.embedding(_replicated(tokens, self.mesh), self.weight))


class ParallelHead(nn.Module):
    """Last norm and one rank's rows of the projection to the vocabulary."""

    def __init__(self, config: LlamaConfig, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = split.RMSNorm(config.dim)
        self.out = _linear(mesh, 0, config.vocab, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, sequence, dim] to logits [batch, sequence, vocab], equal on all ranks."""
        return _summed(self.out(_replicated(self.norm(x), self.mesh)))

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a sum over tokens."""
        return cross_entropy_sum(logits, targets)


def _parameter(mesh: Any, dim: int, rows: int, columns: int) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.empty(rows, columns)
    # No source rank: nothing is sent, as first values come by address.
    return nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))


def _linear(mesh: Any, dim: int, out_features: int, in_features: int) -> nn.Linear:
    module = nn.Linear(in_features, out_features, bias=False, device="meta")
    module.weight = _parameter(mesh, dim, out_features, in_features)
    return module


def _replicated(x: torch.Tensor, mesh: Any) -> Any:
    """Every rank has all of ``x``; its gradient is summed over the mesh."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _sharded(x: torch.Tensor, mesh: Any) -> Any:
    """Ranks have one behind the other what lies in the last dimension."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x, mesh, [Shard(x.dim() - 1)], run_check=False)


def _summed(x: Any) -> torch.Tensor:
    """The whole of a distributed tensor, on every rank: summed, or put together."""
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()]).to_local()  # type: ignore[no-any-return]
