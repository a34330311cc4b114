"""Computes how large a built-in model is from its configuration alone, without torch.

The provider needs this. The trainers' own model is the truth (``mainstay_train.models``), and
a test compares the two. Nothing is known here of a model that a user's entrypoint makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.bounds import MAX_BLOCKS
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import Cut
from mainstay_core.job.stages import cut_blocks

LLAMA = "mainstay_train.models.llama:workload"
"""The entrypoint of the built-in Llama."""
MOE = "mainstay_train.models.moe:workload"
"""The entrypoint of the built-in mixture of experts."""
BUILT_IN = (LLAMA, MOE)
STATE_BYTES = 12
"""Bytes per parameter: the master and AdamW's two moments, each in fp32."""
_SIZES = {
    "dim": 192,
    "layers": 8,
    "heads": 6,
    "kvHeads": 2,
    "hidden": 512,
    "vocab": 256,
    "sequence": 128,
}
"""Keys of ``workload.config`` that say how many parameters there are and what they cost, and
their defaults."""
_MOE_SIZES = {
    "denseLayers": 1,
    "experts": 8,
    "activeExperts": 2,
    "sharedExperts": 1,
    "expertHidden": 128,
}
"""The keys that a mixture of experts has besides, and their defaults."""
_MAY_BE_0 = frozenset({"denseLayers", "sharedExperts"})
_BIAS_RATE = 1e-3
"""Default of the mixture's ``biasRate``."""
MAX_CUTS = 4_000_000
"""Bound on the work of cutting a model into stages here, stages x blocks^2: half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """The number of parameters of a block, and its cost to compute."""

    split: int
    """Parameters that the ranks of a stage share out among them."""
    copied: int
    """Parameters of which every rank of a stage has a copy."""
    cost: float


def check_config(entrypoint: str, config: Mapping[str, Any]) -> None:
    """Refuse sizes of a built-in model that cannot be used.

    Raises:
        InvalidSpecError: a size is not a whole number above 0, there are too many layers, or they
            contradict each other.
    """
    size = sizes_in(entrypoint, config)
    for key, value in size.items():
        least = 0 if key in _MAY_BE_0 else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            right = "a whole number, 0 or above" if least == 0 else "a whole number above 0"
            raise _wrong(key, f"is {value!r}, must be {right}")
    if size["layers"] > MAX_BLOCKS:  # what is computed from them grows with their number
        raise _wrong("layers", f"is {size['layers']}, must be at most {MAX_BLOCKS}")
    if entrypoint == MOE:
        if size["activeExperts"] > size["experts"]:
            raise _wrong(
                "activeExperts",
                f"is {size['activeExperts']}, must be at most experts ({size['experts']})",
            )
        if size["denseLayers"] >= size["layers"]:
            raise _wrong(
                "denseLayers",
                f"is {size['denseLayers']}, must be below layers ({size['layers']}), so that a "
                "layer with experts is left",
            )


def check_ranks(entrypoint: str, ranks_per_stage: int) -> None:
    """Refuse to spread a built-in model over ranks of a stage that it cannot be spread over.

    Raises:
        InvalidSpecError: it is a mixture of experts, and a stage has several ranks.
    """
    if entrypoint == MOE and ranks_per_stage > 1:
        raise InvalidSpecError(
            "spec.parallelism.ranksPerStage",
            f"is {ranks_per_stage}, but the built-in mixture of experts is not spread over the "
            "ranks of a stage; use 1, and more stages",
        )


def num_blocks(config: Mapping[str, Any]) -> int:
    """Return the number of blocks, which is the largest number of stages of a built-in model."""
    return int(sizes_in(LLAMA, config)["layers"]) + 2


def blocks_of(entrypoint: str, config: Mapping[str, Any]) -> tuple[BlockSize, ...]:
    """Return a built-in model's blocks: embedding, layers, head.

    Raises:
        InvalidSpecError: see :func:`check_config`.
    """
    check_config(entrypoint, config)
    size = sizes_in(entrypoint, config)
    dim, hidden, vocab = size["dim"], size["hidden"], size["vocab"]
    heads_width = dim // size["heads"] * (size["heads"] + 2 * size["kvHeads"])
    attention, products = dim * (heads_width + dim), 2 * size["sequence"] * dim
    matrices = attention + 3 * dim * hidden
    layer = BlockSize(split=matrices, copied=2 * dim, cost=float(matrices + products))
    embedding = BlockSize(split=vocab * dim, copied=0, cost=float(dim))
    head = BlockSize(split=vocab * dim, copied=dim, cost=float(dim * vocab))
    if entrypoint == LLAMA:
        return (embedding, *[layer] * size["layers"], head)
    experts, router = size["experts"], dim * size["experts"]
    expert = 3 * dim * size["expertHidden"]
    taken = size["activeExperts"] + size["sharedExperts"]
    mixture = BlockSize(
        split=attention + router + (experts + size["sharedExperts"]) * expert,
        copied=2 * dim + (experts if bias_rate_in(config) else 0),
        cost=float(attention + products + router + taken * expert),
    )
    dense = size["denseLayers"]
    return (embedding, *[layer] * dense, *[mixture] * (size["layers"] - dense), head)


def largest_state(
    blocks: tuple[BlockSize, ...], stages: int, ranks_per_stage: int, cut: Cut = Cut.BALANCED
) -> int:
    """Return the bytes of the largest state that a rank may have to hold, whatever its stage.

    Raises:
        ValueError: there are more stages than blocks.
    """
    cuts = cut_blocks([block.cost for block in blocks], stages, cut)
    return STATE_BYTES * max(
        sum(-(-blocks[i].split // ranks_per_stage) + blocks[i].copied for i in stage)
        for stage in cuts
    )


def sizes_in(entrypoint: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a configuration gives, with defaults, unchecked."""
    known = _SIZES | _MOE_SIZES if entrypoint == MOE else _SIZES
    return {key: config[key] if config.get(key) is not None else known[key] for key in known}


def bias_rate_in(config: Mapping[str, Any]) -> Any:
    """Return by how much a step changes a mixture's biases, with its default, unchecked."""
    given = config.get("biasRate")
    return _BIAS_RATE if given is None else given


def _wrong(key: str, problem: str) -> InvalidSpecError:
    return InvalidSpecError(f"spec.workload.config.{key}", problem)
