"""Says which blocks are like which, and which block of another stage stands for a lost one.

Like blocks have the same local parameters, by name and shape. The paper averages stages with equal
numbers of layers (Blagoev et al., section 4.2). Here a stage may have more or fewer of a kind than
the one beside it: the blocks of a kind are spread evenly over those of the other stage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from mainstay_core.wire.reinitialisation import BlockOutline

Parameter = tuple[str, tuple[int, ...]]
"""(local name, shape)"""


def kind_of(parameters: Iterable[Parameter]) -> str:
    """Return the name of the kind of a block with these parameters: equal for like blocks."""
    listed = sorted((name, list(shape)) for name, shape in parameters)
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:32]


def match_index(index: int, num_lost: int, num_other: int) -> int:
    """Return which of another stage's like blocks stands for a lost one.

    It is floor((index + 1/2) * num_other / num_lost): the block in whose part of the other stage
    the middle of the lost one lies. Equal numbers match one to one.

    Args:
        index: of the block among its like ones, 0..num_lost-1.
        num_lost: like blocks of the lost stage.
        num_other: like blocks of the other stage, at least 1.
    """
    return (2 * index + 1) * num_other // (2 * num_lost)


def like_blocks(stage: Sequence[BlockOutline], kind: str) -> tuple[BlockOutline, ...]:
    """Return a stage's blocks of a kind, in model order."""
    return tuple(block for block in stage if block.kind == kind)
