"""The built-in Llama over an inner mesh: tensor parallelism.

Column, then row parallel matrices with one sum over the mesh per sublayer (Shoeybi
et al., "Megatron-LM", 2019, section 3); heads and the width of SwiGLU are split,
the table of the embedding and the rows of the head too. Between blocks every rank
has the whole activation, so pipeline neighbours exchange plain tensors.

Parameters are DTensors until a block takes them over: that says which part of which tensor
a rank holds. Each rank computes with its parts as plain tensors, and DTensor adds up and gathers
what they yield. So weight gradients are products of what a rank has, made like those of the dense
model.

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
from mainstay_train.comm.mesh import plain
from mainstay_train.exact.draws import Address
from mainstay_train.exact.layout import Origin
from mainstay_train.model import split
from mainstay_train.model.losses import ProjectedCrossEntropy
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
        self.attention_q = PartLinear(mesh, 0, config.heads * width, dim)
        self.attention_k = PartLinear(mesh, 0, config.kv_heads * width, dim)
        self.attention_v = PartLinear(mesh, 0, config.kv_heads * width, dim)
        self.attention_out = PartLinear(mesh, 1, dim, dim)
        self.mlp_norm = split.RMSNorm(dim)
        self.mlp_gate = PartLinear(mesh, 0, config.hidden, dim)
        self.mlp_up = PartLinear(mesh, 0, config.hidden, dim)
        self.mlp_down = PartLinear(mesh, 1, dim, config.hidden)

    def forward(self, x: torch.Tensor, address: Address) -> torch.Tensor:
        """Map [batch, sequence, dim] to the same shape, equal on all ranks."""
        config, ranks = self.config, self.mesh.size()
        h = _shared(self.attention_norm(x), self.mesh)
        projections = (self.attention_q, self.attention_k, self.attention_v)
        qkv = torch.cat([project(h) for project in projections], dim=-1)
        heads, kv_heads = config.heads // ranks, config.kv_heads // ranks
        mine = attention.attend(
            qkv, heads, kv_heads, config.head_dim, config.rope_base, config.attention
        )
        attended = _summed(self.attention_out(mine), self.mesh)
        x = x + attention.drop(attended, address, self.site, "attention", config.dropout)
        h = _shared(self.mlp_norm(x), self.mesh)
        gated = functional.silu(self.mlp_gate(h)) * self.mlp_up(h)
        mlp = _summed(self.mlp_down(gated), self.mesh)
        return x + attention.drop(mlp, address, self.site, "mlp", config.dropout)


class PartLinear(split.Linear):
    """One rank's rows (``dim`` 0) or columns (1) of a matrix without a bias."""

    takes_parts = True

    def __init__(self, mesh: Any, dim: int, out_features: int, in_features: int) -> None:
        with torch.device("meta"):
            super().__init__(in_features, out_features)
        self.weight = _parameter(mesh, dim, out_features, in_features)


class ParallelEmbedding(split.Embedding):
    """One rank's rows of the embedding's table.

    Raises:
        InvalidSpecError: some rank would have no row.
    """

    takes_parts = True

    def __init__(self, config: LlamaConfig, mesh: Any) -> None:
        with torch.device("meta"):
            super().__init__(config.vocab, config.dim)
        self.mesh = mesh
        self.weight, self.first = _rows(mesh, config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 [...] to [..., dim], equal on all ranks."""
        places = tokens - self.first
        elsewhere = (places < 0) | (places >= len(self.weight))
        mine = super().forward(places.masked_fill_(elsewhere, 0))
        return _summed(mine.masked_fill_(elsewhere[..., None], 0), self.mesh)


class PartProjectedCrossEntropy(ProjectedCrossEntropy):
    """One rank's rows of the last projection, and the loss over the logits of all ranks."""

    takes_parts = True

    def __init__(self, config: LlamaConfig, mesh: Any) -> None:
        with torch.device("meta"):
            super().__init__(config.dim, config.vocab)
        self.mesh, self.vocab = mesh, config.vocab
        self.weight, self.first = _rows(mesh, config)

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Put the ranks' logits together: [tokens, own rows] to [tokens, vocab]."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parts = DTensor.from_local(
            logits,
            self.mesh,
            [Shard(1)],
            run_check=False,
            shape=torch.Size((len(logits), self.vocab)),
            stride=(self.vocab, 1),
        )
        return plain(parts.redistribute(placements=[Replicate()]).to_local())


class ParallelHead(nn.Module):
    """Last norm, one rank's rows of the projection to the vocabulary, and the loss.

    Raises:
        InvalidSpecError: some rank would have no row.
    """

    def __init__(self, config: LlamaConfig, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = split.RMSNorm(config.dim)
        self.out = PartProjectedCrossEntropy(config, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [batch, sequence, dim]; logits are made with the loss."""
        normalised: torch.Tensor = self.norm(x)
        return normalised

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, a sum over tokens, of what :meth:`forward` returned."""
        total: torch.Tensor = self.out(_shared(x, self.mesh), targets)
        return total


def _parameter(mesh: Any, dim: int, rows: int, columns: int) -> nn.Parameter:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.empty(rows, columns)
    # No source rank: nothing is sent, as first values come by address.
    return nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))


def _rows(mesh: Any, config: LlamaConfig) -> tuple[nn.Parameter, int]:
    """A parameter with a row for each class of the vocabulary, and this rank's first row."""
    ranks = mesh.size()
    most = -(-config.vocab // ranks)
    if config.vocab <= (ranks - 1) * most:
        raise InvalidSpecError(
            "workload.config.vocab",
            f"is {config.vocab}, of which the last of ranksPerStage ({ranks}) would have no row as "
            f"the others have {most} each; use a multiple of ranksPerStage",
        )
    return _parameter(mesh, 0, config.vocab, config.dim), mesh.get_coordinate()[0] * most


def _shared(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """What every rank has all of, for work that each does a part of: gradients are summed."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _summed(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The sum of what the ranks have, on every rank; its gradient is that of each term."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    terms = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return terms.redistribute(placements=[Replicate()]).to_local()
