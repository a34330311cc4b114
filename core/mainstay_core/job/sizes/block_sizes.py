"""Describes what one block of a model takes on a rank: its parameters, and one micro-batch.

``built_in_sizes`` computes it for a built-in model. A trainer's process measures it for a user's
blocks (``mainstay_train.compute.measure``). ``rank_sizes`` adds blocks up to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import (
    MAX_BLOCKS,
    MAX_TYPES,
    Count,
    Document,
    Finite,
    Index,
    Longest,
    Name,
    Sentence,
    Signed,
    Text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """The sizes of one block on one rank of its stage.

    The bytes of activations are those of one micro-batch. What "beyond" names is counted
    elsewhere: the input is the output of the block before, or what was received.
    """

    name: Name
    cost: Finite
    """Relative cost, by which the model is cut into stages."""
    parameters: Annotated[tuple[Count, ...], Longest(MAX_TYPES)]
    """Number of elements of each parameter on this rank, in no order."""
    moments_bytes: Count
    """State that the optimizer keeps beside the masters."""
    output_bytes: Count
    """What the block passes on; 0 for the last, whose output is the loss."""
    kept_bytes: Count
    """What the backward needs of a forward, beyond input and output."""
    pending_bytes: Count
    """What the weights' gradients still need after the backward, beyond input and its gradient."""
    plain_forward_bytes: Count
    """The most at any time of a forward that keeps nothing, beyond the input; 0 for the last block,
    whose backward comes next."""
    forward_bytes: Count
    """The most at any time of a forward that keeps what the backward needs, beyond the input."""
    backward_bytes: Count
    """The most at any time of the backward, what was kept and both gradients among it, beyond
    input and output."""
    weights_bytes: Count
    """The most at any time while the weights' gradients are computed, beyond the input."""
    constant_bytes: Count
    """What the first forward makes and keeps for later ones, such as a mask."""
    sharers: Name = ""
    """Name of the blocks that use what the first of them makes; empty: those whose parameters are
    as large."""
    sent_forward_bytes: Count = 0
    """What a forward sends to the other ranks of the stage."""
    sent_backward_bytes: Count = 0
    num_units: Count = 1
    """Parts of the block that are snapshotted alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model's blocks, in model order, on the ranks with one inner index."""

    inner: Index
    """Which of a stage's ranks it is."""
    width_bytes: Count
    """Bytes of an element of activations and compute parameters: 4, or 2 in bfloat16."""
    tokens_bytes: Count
    """Input of the first block."""
    targets_bytes: Count
    """What the loss compares with."""
    blocks: Annotated[tuple[BlockSizes, ...], Longest(MAX_BLOCKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureQuestion:
    """A workload whose blocks are to be measured."""

    entrypoint: Text
    config: Document
    args: Annotated[tuple[Text, ...], Longest(4096)] = ()
    ranks_per_stage: Index = 1
    accumulates: bool = False
    """Whether a shard type has several micro-batches."""
    seed: Signed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The answer to a :class:`MeasureQuestion`."""

    problem: Sentence = ""
    """What is wrong with the workload; empty if it was measured."""
    models: Annotated[tuple[ModelSizes, ...], Longest(MAX_BLOCKS)] = ()
    """One for each rank of a stage."""
