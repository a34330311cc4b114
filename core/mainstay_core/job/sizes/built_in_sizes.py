"""Finds the formulas for what the blocks of a built-in model take, by its entrypoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mainstay_core.job import model_sizes
from mainstay_core.job.sizes import llama_sizes, moe_sizes
from mainstay_core.job.sizes.block_sizes import ModelSizes

_FORMULAS = {model_sizes.LLAMA: llama_sizes.sizes_of, model_sizes.MOE: moe_sizes.sizes_of}


def built_in_sizes(
    entrypoint: str,
    config: Mapping[str, Any],
    ranks_per_stage: int,
    inner: int,
    *,
    accumulates: bool,
) -> ModelSizes:
    """Return what a built-in model's blocks take on the ranks with one inner index.

    Args:
        entrypoint: one of ``model_sizes.BUILT_IN``.
        config: ``workload.config``.
        ranks_per_stage: ranks that share a stage.
        inner: which of them.
        accumulates: whether a shard type has several micro-batches.

    Raises:
        InvalidSpecError: the configuration cannot be used.
    """
    formulas = _FORMULAS[entrypoint]
    return formulas(config, ranks_per_stage, inner, accumulates=accumulates)
