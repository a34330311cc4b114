"""A decoder-only mixture of experts, configured by ``workload.config``.

The built-in Llama's embedding, attention and head (:mod:`mainstay_train.models.llama`). The first
``denseLayers`` layers are the Llama's; in the others experts take the place of SwiGLU
(:mod:`mainstay_train.models.experts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.model import data, split
from mainstay_train.model import workload as workloads
from mainstay_train.model.blocks import BlockSpec
from mainstay_train.models import llama
from mainstay_train.models.experts import Mixture
from mainstay_train.models.llama_config import parse_config
from mainstay_train.models.moe_config import MoeConfig


def warm_up() -> None:
    """Read the default corpus once in the warm parent, for all its trainers."""
    data.load_corpus(data.STDLIB)


def workload(config: Mapping[str, Any], args: Sequence[str] = ()) -> workloads.Workload:
    """The entrypoint.

    Raises:
        InvalidSpecError: See :func:`parse_config`; or arguments are given.
    """
    if args:
        raise InvalidSpecError(
            "workload.args", f"the built-in mixture of experts takes none, got {list(args)}"
        )
    parsed = parse_config(config, MoeConfig)
    return llama.workload_of(parsed, block_specs(parsed))


def block_specs(config: MoeConfig) -> tuple[BlockSpec, ...]:
    """Embedding, layers and head; costs in multiply-adds per token of a forward.

    No block is spread over ranks of a stage: each would need the tokens of all its experts.
    """
    specs = [replace(spec, parallelize=None, origins={}) for spec in llama.block_specs(config)]
    taken = config.active_experts + config.shared_experts
    cost = llama.attention_cost(config) + config.dim * config.experts
    cost += taken * 3 * config.dim * config.expert_hidden
    for number in range(1 + config.dense_layers, 1 + config.layers):
        name = specs[number].name
        build = partial(MixtureLayer, config, name)
        specs[number] = replace(specs[number], build=build, cost=float(cost))
    return tuple(specs)


class MixtureLayer(llama.AttentionLayer):
    """Attention and experts, each normalised before and added to its input."""

    def __init__(self, config: MoeConfig, site: str) -> None:
        super().__init__(config, site)
        self.mlp_norm = split.RMSNorm(config.dim)
        self.mixture = Mixture(config)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the normalised tokens of [batch, sequence, dim] to their experts."""
        mixed: torch.Tensor = self.mixture(self.mlp_norm(x))
        return mixed
