"""Computes what the blocks of the built-in mixture of experts take, from ``workload.config`` alone.

What one micro-batch takes in a layer with experts is in ``moe_passes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from mainstay_core.base.bounds import MAX_STATISTICS
from mainstay_core.job import model_sizes
from mainstay_core.job.sizes import llama_sizes
from mainstay_core.job.sizes.block_sizes import ModelSizes
from mainstay_core.job.sizes.llama_passes import Embedding, Head, Layer
from mainstay_core.job.sizes.llama_sizes import (
    EMBEDDING,
    HEAD,
    require,
    require_number,
    sizes_of_kind,
)
from mainstay_core.job.sizes.moe_passes import MixtureLayer, MoeShape

ROUTERS = ("sigmoid", "softmax")
GATES = ("normalized", "plain")
BALANCE_LOSSES = ("none", "sequence")
COUNTS = ("tokens", "probabilities")
KEYS = llama_sizes.KEYS | {
    "denseLayers", "experts", "activeExperts", "sharedExperts", "expertHidden", "router", "gates",
    "gateScale", "biasRate", "balanceLoss", "balanceWeight",
    "counts",
}  # fmt: skip
"""Keys of ``workload.config`` that the mixture takes."""


def sizes_of(
    config: Mapping[str, Any], ranks_per_stage: int, inner: int, *, accumulates: bool
) -> ModelSizes:
    """Return what the mixture's blocks take on a rank.

    Args:
        config: ``workload.config``.
        ranks_per_stage: 1: its blocks are not spread over ranks.
        inner: 0.
        accumulates: whether a shard type has several micro-batches.

    Raises:
        InvalidSpecError: the configuration cannot be used.
    """
    llama_sizes.refuse_unknown(config, KEYS)
    model_sizes.check_ranks(model_sizes.MOE, ranks_per_stage)
    c = _read(config, inner)
    costs = [block.cost for block in model_sizes.blocks_of(model_sizes.MOE, config)]
    dense = sizes_of_kind(Layer(c, accumulates), "layers", cost=costs[1])
    mixture = replace(
        sizes_of_kind(MixtureLayer(c, accumulates), "layers", cost=costs[-2]),
        num_units=c.experts + 2,  # the router, and the rest of the layer
    )
    num_dense = model_sizes.sizes_in(model_sizes.MOE, config)["denseLayers"]
    layers = [
        replace(dense if number < num_dense else mixture, name=f"layers.{number}", sharers="layers")
        for number in range(c.layers)
    ]
    first = sizes_of_kind(Embedding(c, accumulates), EMBEDDING, cost=costs[0])
    last = sizes_of_kind(Head(c, accumulates), HEAD, cost=costs[-1])
    return llama_sizes.model_of(c, (first, *layers, last))


def _read(config: Mapping[str, Any], inner: int) -> MoeShape:
    shape = llama_sizes.read_shape(model_sizes.MOE, config, 1, inner)
    size = model_sizes.sizes_in(model_sizes.MOE, config)
    given = {key: value for key, value in config.items() if value is not None}
    router, gates = given.get("router", ROUTERS[0]), given.get("gates", GATES[0])
    balance, rate = given.get("balanceLoss", "none"), model_sizes.bias_rate_in(config)
    for key, value, known in (
        ("router", router, ROUTERS),
        ("gates", gates, GATES),
        ("balanceLoss", balance, BALANCE_LOSSES),
        ("counts", given.get("counts", COUNTS[0]), COUNTS),
    ):
        require(value in known, key, value, f"one of {', '.join(known)}")
    require_number(given, "gateScale")
    for key in ("biasRate", "balanceWeight"):
        require_number(given, key, may_be_0=True)
    require(
        size["activeExperts"] > 1 or gates == "plain",
        "gates",
        gates,
        "plain where activeExperts is 1: the only gate of a token would always be 1",
    )
    counted = (size["layers"] - size["denseLayers"]) * size["experts"]
    counted *= 2 if given.get("counts") == "probabilities" else 1
    require(
        counted <= MAX_STATISTICS,
        "experts",
        size["experts"],
        f"so few that a step counts at most {MAX_STATISTICS} integers in all layers, not {counted}",
    )
    return MoeShape(
        **asdict(shape),
        experts=size["experts"],
        active=size["activeExperts"],
        expert_hidden=size["expertHidden"],
        shared_hidden=size["sharedExperts"] * size["expertHidden"],
        biased=bool(rate),
        normalized=gates == "normalized",
        soft=router == "softmax",
    )
