"""Computes how large the built-in model is from its configuration alone, without torch.

The provider needs this. The trainers' own model is the truth (``mainstay_train.models``), and
a test compares the two. Nothing is known here of a model that a user's entrypoint makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.stages import stage_blocks

BUILT_IN = "mainstay_train.models.llama:workload"
"""The entrypoint of the built-in Llama."""
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


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse sizes of the built-in model that cannot be used.

    Raises:
        InvalidSpecError: a size is not a whole number above 0.
    """
    for key, value in sizes_in(config).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidSpecError(
                f"spec.workload.config.{key}", f"is {value!r}, must be a whole number above 0"
            )


def num_blocks(config: Mapping[str, Any]) -> int:
    """Return the number of blocks, which is the largest number of stages of the built-in model."""
    return int(sizes_in(config)["layers"]) + 2


def blocks_of(config: Mapping[str, Any]) -> tuple[BlockSize, ...]:
    """Return the built-in model's blocks: embedding, layers, head.

    Raises:
        InvalidSpecError: see :func:`check_config`.
    """
    check_config(config)
    size = sizes_in(config)
    dim, hidden, vocab = size["dim"], size["hidden"], size["vocab"]
    heads_width = dim // size["heads"] * (size["heads"] + 2 * size["kvHeads"])
    matrices = dim * (heads_width + dim + 3 * hidden)
    cost = matrices + 2 * size["sequence"] * dim
    layer = BlockSize(split=matrices, copied=2 * dim, cost=float(cost))
    embedding = BlockSize(split=vocab * dim, copied=0, cost=float(dim))
    head = BlockSize(split=vocab * dim, copied=dim, cost=float(dim * vocab))
    return (embedding, *[layer] * size["layers"], head)


def largest_state(blocks: tuple[BlockSize, ...], stages: int, ranks_per_stage: int) -> int:
    """Return the bytes of the largest state that a rank may have to hold, whatever its stage.

    Raises:
        ValueError: there are more stages than blocks.
    """
    cuts = stage_blocks([block.cost for block in blocks], stages)
    return STATE_BYTES * max(
        sum(-(-blocks[i].split // ranks_per_stage) + blocks[i].copied for i in cut) for cut in cuts
    )


def sizes_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a configuration gives, with defaults, unchecked."""
    return {key: config[key] if config.get(key) is not None else _SIZES[key] for key in _SIZES}
