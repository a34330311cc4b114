"""Computes what the blocks of the built-in Llama take on a rank, from ``workload.config`` alone.

What one micro-batch takes in a block is in ``llama_passes``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import MAX_QUOTED, quote
from mainstay_core.job import model_sizes
from mainstay_core.job.sizes.block_sizes import BlockSizes, ModelSizes
from mainstay_core.job.sizes.llama_passes import (
    Embedding,
    Head,
    Kind,
    Layer,
    ParallelEmbedding,
    ParallelLayer,
)
from mainstay_core.job.sizes.llama_tensors import LlamaShape, Memory, TensorSizes
from mainstay_core.job.sizes.reduction_sizes import PAD

PATH = "spec.workload.config"
EMBEDDING, HEAD = "embedding", "head"
"""Names of the first and the last block."""
BYTE_VALUES = 256
"""Tokens are bytes of text: the vocabulary holds all of them."""
TOKEN_BYTES = 8
"""A token is an int64."""
ATTENTION = ("auto", "flash", "explicit")
"""Forms of attention. ``auto`` is flash, but for fp32 on a GPU."""
WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of an element of activations, by ``dtype``."""
KEYS = frozenset(
    {
        "dim", "layers", "heads", "kvHeads", "hidden", "vocab", "sequence", "microBatchSize",
        "ropeBase", "dropout", "dtype", "lr", "warmupSteps", "decaySteps", "weightDecay",
        "clipNorm", "attention", "data",
    }
)  # fmt: skip
"""Keys of ``workload.config`` that the built-in Llama takes."""


def padded(numel: int) -> int:
    """Return the elements that a parameter takes in its block's buffer."""
    return -(-numel // PAD) * PAD


def sizes_of(
    config: Mapping[str, Any], ranks_per_stage: int, inner: int, *, accumulates: bool
) -> ModelSizes:
    """Return what the built-in Llama's blocks take on the ranks with one inner index.

    Args:
        config: ``workload.config``.
        ranks_per_stage: ranks that share a stage.
        inner: which of them.
        accumulates: whether a shard type has several micro-batches.

    Raises:
        InvalidSpecError: the configuration cannot be used.
    """
    refuse_unknown(config, KEYS)
    c = read_shape(model_sizes.LLAMA, config, ranks_per_stage, inner)
    costs = [block.cost for block in model_sizes.blocks_of(model_sizes.LLAMA, config)]
    kinds: tuple[type[Kind], type[Kind]] = (Embedding, Layer)
    if c.ranks > 1:
        kinds = (ParallelEmbedding, ParallelLayer)
    first = sizes_of_kind(kinds[0](c, accumulates), EMBEDDING, cost=costs[0])
    middle = sizes_of_kind(kinds[1](c, accumulates), "layers", cost=costs[1])
    last = sizes_of_kind(Head(c, accumulates), HEAD, cost=costs[-1])
    u = TensorSizes(c)
    ring = 2 * (c.ranks - 1)
    summed = u.act * ring // c.ranks
    gathered = c.tokens * c.most_rows * c.width * (c.ranks - 1)
    if c.ranks > 1:
        # Sums over the ranks of a stage, by a ring: two in a layer, forward and backward.
        first = replace(first, sent_forward_bytes=summed)
        middle = replace(middle, sent_forward_bytes=2 * summed, sent_backward_bytes=2 * summed)
        last = replace(last, sent_forward_bytes=gathered, sent_backward_bytes=summed)
    layers = [replace(middle, name=f"layers.{index}") for index in range(c.layers)]
    return model_of(c, (first, *layers, last))


def model_of(c: LlamaShape, blocks: Sequence[BlockSizes]) -> ModelSizes:
    """Return the sizes of a model of some blocks: embedding, layers, head."""
    first, *others = blocks[1:]
    # Mask and rotations are made by the first layer of a process, for all.
    first = replace(first, constant_bytes=TensorSizes(c).constants)
    return ModelSizes(
        inner=c.inner,
        width_bytes=c.width,
        tokens_bytes=TOKEN_BYTES * c.tokens,
        targets_bytes=TOKEN_BYTES * c.tokens,
        blocks=(blocks[0], first, *others),
    )


def refuse_unknown(config: Mapping[str, Any], keys: Collection[str]) -> None:
    """Refuse a configuration with another key.

    Raises:
        InvalidSpecError: there is one; the valid ones are named.
    """
    for key in config:
        if key not in keys:
            raise InvalidSpecError(
                f"{PATH}.{str(key)[:MAX_QUOTED]}", f"is unknown (valid: {', '.join(sorted(keys))})"
            )


def read_shape(entrypoint: str, config: Mapping[str, Any], ranks: int, inner: int) -> LlamaShape:
    """Return the part of a configuration that a Llama and a mixture of experts share.

    Args:
        entrypoint: of a built-in model.
        config: ``workload.config``.
        ranks: ranks that share a stage.
        inner: which of them.

    Raises:
        InvalidSpecError: a value cannot be used.
    """
    model_sizes.check_config(entrypoint, config)
    size = model_sizes.sizes_in(entrypoint, config)
    given = {key: value for key, value in config.items() if value is not None}
    batch, dropout = given.get("microBatchSize", 1), given.get("dropout", 0.0)
    dtype = given.get("dtype", "float32")
    dim, heads, kv_heads, hidden = size["dim"], size["heads"], size["kvHeads"], size["hidden"]
    require(type(batch) is int and batch > 0, "microBatchSize", batch, "a whole number above 0")
    require(
        isinstance(dtype, str) and dtype in WIDTHS, "dtype", dtype, f"one of {', '.join(WIDTHS)}"
    )
    form = given.get("attention", "auto")
    require(form in ATTENTION, "attention", form, f"one of {', '.join(ATTENTION)}")
    is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    require(is_number and 0 <= dropout < 1, "dropout", dropout, "within 0 and below 1")
    require(dim % heads == 0, "heads", heads, f"a divisor of dim ({dim})")
    require(dim // heads % 2 == 0, "heads", heads, "such that dim / heads is even (rotary)")
    require(heads % kv_heads == 0, "kvHeads", kv_heads, f"a divisor of heads ({heads})")
    require(size["vocab"] >= BYTE_VALUES, "vocab", size["vocab"], f"at least {BYTE_VALUES}")
    for key in ("lr", "ropeBase"):
        require_number(given, key)
    for key in ("weightDecay", "clipNorm"):
        require_number(given, key, may_be_0=True)
    require_number(given, "decaySteps", whole=True)
    require_number(given, "warmupSteps", whole=True, may_be_0=True)
    _require_data(given.get("data"))
    if ranks > 1:
        for key, value in (("kvHeads", kv_heads), ("heads", heads), ("hidden", hidden)):
            require(value % ranks == 0, key, value, f"a multiple of ranksPerStage ({ranks})")
    return LlamaShape(
        dim=dim,
        layers=size["layers"],
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        vocab=size["vocab"],
        sequence=size["sequence"],
        batch=batch,
        width=WIDTHS[dtype],
        drops=dropout > 0,
        flash=form != "explicit",
        ranks=ranks,
        inner=inner,
    )


def require(holds: bool, key: str, value: object, right: str) -> None:
    """Refuse a value of a configuration unless something holds.

    Args:
        holds: what must hold.
        key: of the value.
        value: as it is given.
        right: what would be right.

    Raises:
        InvalidSpecError: it does not hold.
    """
    if not holds:
        raise InvalidSpecError(f"{PATH}.{key}", f"is {quote(value)}, must be {right}")


def require_number(
    given: Mapping[str, Any], key: str, *, whole: bool = False, may_be_0: bool = False
) -> None:
    """Refuse a value that is no number above 0; one that is not given has a good default.

    Args:
        given: the configuration.
        key: of the value.
        whole: whether it must be a whole number.
        may_be_0: whether it may be 0 as well.

    Raises:
        InvalidSpecError: it cannot be used.
    """
    value = given.get(key, 1)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    right = "a whole number" if whole else "a number"
    right += ", 0 or above" if may_be_0 else " above 0"
    require(is_number and (value > 0 or (may_be_0 and value == 0)), key, value, right)


def _require_data(source: object) -> None:
    if not source:
        return
    if not isinstance(source, Mapping):
        raise InvalidSpecError(
            f"{PATH}.data", f"is {quote(source)}, must have the field path: a file or a directory"
        )
    for key in source:
        if key != "path":
            raise InvalidSpecError(
                f"{PATH}.data.{str(key)[:MAX_QUOTED]}", "is unknown (valid: path)"
            )
    path = source.get("path", "")
    require(isinstance(path, str), "data.path", path, "the path of a file or a directory")


def sizes_of_kind(kind: Kind, name: str, *, cost: float) -> BlockSizes:
    """Return the sizes of a block by taking a micro-batch through it."""
    u = kind.u
    output = 0 if name == HEAD else u.act
    plain, m = Memory(), Memory()
    if output:
        kind.forward(plain, keeps=False)
    kind.forward(m, keeps=True)
    forward = m.restart()
    kept = m.now - output
    m.drop(output)
    m.restart()
    m.take(output)  # of the output's gradient
    kind.backward(m)
    backward = m.restart()
    m.drop(0 if name == EMBEDDING else u.act)
    pending = m.now
    m.restart()
    kind.weights(m)
    parameters = kind.parameters
    return BlockSizes(
        name=name,
        cost=cost,
        parameters=parameters,
        # AdamW: two moments in fp32, and a count of steps for each parameter that it trains.
        moments_bytes=8 * sum(map(padded, parameters)) + 4 * (len(parameters) - kind.untrained),
        output_bytes=output,
        kept_bytes=kept,
        pending_bytes=pending,
        plain_forward_bytes=plain.peak,
        forward_bytes=forward,
        backward_bytes=backward,
        weights_bytes=m.peak,
        constant_bytes=0,
    )
