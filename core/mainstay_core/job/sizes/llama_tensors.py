"""Describes the built-in Llama as far as memory goes: its shape, its tensors, and what is there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The part of ``workload.config`` on which sizes depend, and the ranks of a stage."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    sequence: int
    batch: int
    width: int
    """Bytes of an element of activations."""
    drops: bool
    flash: bool
    """Whether attention is by the fused kernel."""
    ranks: int
    """Ranks of a stage."""
    inner: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.sequence

    @property
    def most_rows(self) -> int:
        """Rows of the vocabulary that the first rank has; what is gathered is padded to them."""
        return -(-self.vocab // self.ranks)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary that this rank has."""
        return max(0, min(self.most_rows, self.vocab - self.inner * self.most_rows))


LOGITS = 1 << 24
"""Logits that are in fp32 at a time."""
PICKING = 37
"""Bytes for each token while its target's place in the gradient of logits is found."""
WIDENED_ELEMENTS = 1 << 22
"""Elements of an operand in bf16 that are widened to fp32 at a time."""


class Memory:
    """The bytes that tensors take, now and at the most."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def take(self, *sizes: int) -> None:
        """Make tensors."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def drop(self, *sizes: int) -> None:
        """Let go of tensors."""
        self.now -= sum(sizes)

    def touch(self, *sizes: int) -> None:
        """Make tensors that go at once."""
        self.peak = max(self.peak, self.now + sum(sizes))

    def restart(self) -> int:
        """Return the peak, and look for another from here on."""
        peak, self.peak = self.peak, self.now
        return peak


class TensorSizes:
    """The sizes of the tensors of a layer on one rank, in bytes."""

    def __init__(self, c: LlamaShape) -> None:
        self.narrow = c.width < 4
        """Activations are not fp32: what is computed in fp32 is a copy."""
        self.act = c.tokens * c.dim * c.width
        """An activation of the model's width."""
        self.wide = 4 * c.tokens * c.dim
        """The same in fp32."""
        self.scale = 4 * c.tokens
        heads, kv_heads, width = c.heads // c.ranks, c.kv_heads // c.ranks, c.head_dim
        self.query = c.tokens * heads * width * c.width
        self.key = c.tokens * kv_heads * width * c.width
        self.qkv = self.query + 2 * self.key
        self.rotated = self.query + self.key
        self.rotated_wide = self.rotated // c.width * 4
        self.scores = c.tokens * c.sequence * heads * c.width
        self.scores_wide = self.scores // c.width * 4
        self.hidden = c.tokens * c.hidden // c.ranks * c.width
        one = c.batch == 1 or kv_heads == 1
        self.key_is_view = one
        """Keys and values need no copy to become matrices: they keep all of what they are in."""
        self.query_is_view = one and heads == kv_heads
        self.flash = c.flash
        self.log_sums = 4 * c.tokens * heads
        """A number for each token and head, which the fused kernel keeps."""
        self.keeps_qkv = one or c.flash
        """The backward keeps values as a view of all that they are in."""
        mask = 0 if c.flash else heads // kv_heads * c.sequence**2 * c.width
        self.constants = mask + 8 * c.sequence * (width // 2)
