"""Finds the formulas for what the blocks of a built-in model take, by its entrypoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count
from mainstay_core.job import model_sizes
from mainstay_core.job.sections import Workload
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


def check_built_in(workload: Workload, shape: JobShape) -> None:
    """Refuse a built-in model that no trainer would build; of another one nothing is known here.

    Args:
        workload: of the job.
        shape: degrees of the job.

    Raises:
        InvalidSpecError: names the field and what would be right.
    """
    entrypoint, config = workload.entrypoint, workload.config
    if entrypoint not in model_sizes.BUILT_IN:
        return
    if workload.args:
        raise InvalidSpecError(
            "spec.workload.args", f"a built-in model takes none, got {[*workload.args]}"
        )
    built_in_sizes(
        entrypoint, config, shape.ranks_per_stage, 0, accumulates=shape.micro_batches > 1
    )
    num_blocks = model_sizes.num_blocks(config)
    if shape.stages > num_blocks:
        raise InvalidSpecError(
            "spec.parallelism.stages",
            f"is {shape.stages}, but the model has {count(num_blocks, 'block')} (embedding, "
            f"layers, head), and each stage needs one; use at most {num_blocks}",
        )
