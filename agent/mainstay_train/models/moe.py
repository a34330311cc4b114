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
from mainstay_core.snapshots.units import UnitKind
from mainstay_core.wire.reinitialisation import Rule
from mainstay_train.model import split
from mainstay_train.model import workload as workloads
from mainstay_train.model.blocks import BlockSpec, CommittedState
from mainstay_train.model.units import PROBABILITY, Unit
from mainstay_train.models import llama
from mainstay_train.models.experts import Mixture, shift_bias
from mainstay_train.models.llama_config import parse_config
from mainstay_train.models.moe_config import MoeConfig

_BIAS = "mixture.router.bias"
_KINDS = {"router": UnitKind.GATE}
"""Parts of a layer that are not the rest of it; experts are those that are counted."""

warm_up = llama.warm_up
"""Both models have the same default corpus."""


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
    units, committed = _units(config), _router_bias(config)
    for number in range(1 + config.dense_layers, 1 + config.layers):
        specs[number] = replace(
            specs[number],
            build=partial(MixtureLayer, config, specs[number].name),
            cost=float(cost),
            units=units,
            statistics=_statistics(config),
            committed=committed,
            reinitialise=Rule.COPY,  # experts of two layers do not correspond
        )
    return tuple(specs)


def _units(config: MoeConfig) -> tuple[Unit, ...]:
    """Each expert, the router, and the rest of a layer with experts."""
    with torch.device("meta"):
        names = [name for name, _ in MixtureLayer(config, "").named_parameters()]
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(_unit_of(name), []).append(name)
    return tuple(
        Unit(name=unit, parameters=tuple(within), kind=_KINDS.get(unit, UnitKind.REST))
        for unit, within in units.items()
    )


def _unit_of(parameter: str) -> str:
    match parameter.split("."):
        case ["mixture", "experts", number, *_]:
            return f"experts.{number}"
        case ["mixture", "router", *_]:
            return "router"
    return "rest"


def _statistics(config: MoeConfig) -> tuple[str, ...]:
    """The tokens of each expert; then, if it is wanted, the probabilities of each."""
    tokens = tuple(f"experts.{expert}" for expert in range(config.experts))
    if not config.counts_probabilities:
        return tokens
    return (*tokens, *(f"{name}{PROBABILITY}" for name in tokens))


def _router_bias(config: MoeConfig) -> CommittedState | None:
    if not config.bias_rate:
        return None

    def shift(masters: Mapping[str, torch.Tensor], counts: Sequence[int]) -> None:
        shift_bias(masters[_BIAS], counts[: config.experts], config.bias_rate)

    return CommittedState(parameters=(_BIAS,), rule=shift)


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
