"""Follows a micro-batch through the blocks of the built-in Llama: what memory each pass takes.

Each function follows the code of ``mainstay_train.models`` line by line: what a tensor adds when it
is made, and what goes when the last name of it goes. So a change of that code is one change here.
Tests compare every number with what is measured of the model itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        self.logits = c.tokens * c.vocab * c.width
        self.logits_wide = 4 * c.tokens * c.vocab
        one = c.batch == 1 or kv_heads == 1
        self.key_is_view = one
        """Keys and values need no copy to become matrices: they keep all of what they are in."""
        self.query_is_view = one and heads == kv_heads
        mask = heads // kv_heads * c.sequence**2 * c.width
        self.constants = mask + 8 * c.sequence * (width // 2)


def _norm(m: Memory, u: TensorSizes, *, keeps: bool) -> None:
    """Normalise: adds the output and, where it is kept, the normalised input and its scale."""
    if u.narrow:
        m.touch(3 * u.wide, u.act, u.scale)
    else:
        m.touch(2 * u.wide, u.scale)
    m.take(u.act)
    if keeps:
        m.take(u.wide, u.scale)


def _norm_backward(m: Memory, u: TensorSizes) -> None:
    """Take the gradient of the output back: leaves it in fp32, and the input's gradient."""
    if u.narrow:
        m.take(u.wide)
    m.touch(2 * u.wide, u.scale)
    if u.narrow:
        m.touch(u.wide, u.act, u.scale)
        m.drop(u.act)
    m.take(u.act)
    m.drop(u.scale)


def _attend(m: Memory, u: TensorSizes, *, keeps: bool) -> None:
    """Attend: adds the heads' outputs and, where it is kept, what the backward needs."""
    if u.narrow:
        m.touch(2 * u.rotated_wide, u.rotated)
    m.take(u.rotated)
    queries = 0 if u.query_is_view else u.query
    keys = 0 if u.key_is_view else 2 * u.key
    m.take(queries, keys, u.scores)
    if u.narrow:
        m.touch(2 * u.scores_wide)
        m.take(u.scores_wide, u.scores)
        if not keeps:
            m.drop(u.scores_wide)
    else:
        m.take(u.scores)
    m.take(u.query, u.query)
    m.drop(u.scores, u.query)
    if not keeps:
        m.drop(u.scores, queries, keys, u.rotated)
    elif not u.key_is_view:
        m.drop(u.rotated)


def _attend_backward(m: Memory, u: TensorSizes) -> None:
    """Turn the gradient of the heads' outputs into that of queries, keys and values."""
    m.touch(u.query)
    m.take(u.key, u.scores)
    # Values as views keep all of the queries, keys and values.
    m.drop(u.query, u.qkv if u.key_is_view else u.key)
    if u.narrow:
        m.drop(u.scores)
        m.take(u.scores_wide)
        m.drop(u.scores)
    m.take(u.scores_wide)
    m.drop(u.scores_wide, u.scores_wide)
    if u.narrow:
        m.take(u.scores)
        m.drop(u.scores_wide)
    m.touch(2 * u.query)
    m.take(u.query, u.key)
    m.touch(u.key)
    m.drop(u.scores)
    m.drop(0 if u.query_is_view else u.query, u.rotated if u.key_is_view else u.key)
    m.take(u.qkv)
    m.drop(u.key)
    m.take(u.rotated)
    m.drop(u.key)
    m.take(u.rotated)
    m.drop(u.query)
    m.take(u.rotated)
    m.drop(2 * u.rotated)
    if u.narrow:
        m.touch(2 * u.rotated_wide)
    m.touch(u.rotated)
    m.touch(2 * u.qkv)
    m.drop(u.rotated)


def _drop(m: Memory, u: TensorSizes, c: LlamaShape, *, keeps: bool) -> int:
    """Drop out at random: adds the output and, where it is kept, which elements are.

    Returns:
        Size of the output; 0 where it is the input.
    """
    if not c.drops:
        return 0
    chosen = c.tokens * c.dim
    m.touch(chosen, max(u.wide, 3 * u.act))
    m.take(u.act)
    if keeps:
        m.take(u.act)
    return u.act


def _drop_backward(m: Memory, u: TensorSizes, c: LlamaShape) -> None:
    """Make the gradient of the input; which elements were kept is no longer needed."""
    if c.drops:
        m.take(u.act)
        m.drop(u.act)


class Kind(ABC):
    """A kind of block on one rank: what its passes make and let go of, in the order of its code."""

    def __init__(self, c: LlamaShape, accumulates: bool) -> None:
        self.c, self.u, self.accumulates = c, TensorSizes(c), accumulates

    @property
    @abstractmethod
    def parameters(self) -> tuple[int, ...]:
        """Number of elements of each parameter."""

    @abstractmethod
    def forward(self, m: Memory, *, keeps: bool) -> None:
        """Make the output and, where it is kept, what the backward needs."""

    @abstractmethod
    def backward(self, m: Memory) -> None:
        """Make the input's gradient; the output's is there."""

    @abstractmethod
    def weights(self, m: Memory) -> None:
        """Write the weights' gradients."""


class Embedding(Kind):
    """The table of the embedding on the only rank of a stage."""

    @property
    def parameters(self) -> tuple[int, ...]:
        return (self.c.vocab * self.c.dim,)

    def forward(self, m: Memory, *, keeps: bool) -> None:
        del keeps  # the tokens are its input
        m.take(self.u.act)

    def backward(self, m: Memory) -> None:
        pass  # the output's gradient waits

    def weights(self, m: Memory) -> None:
        c = self.c
        rows = min(c.tokens, c.vocab)  # sums of those that occur, and their places
        m.touch(8 * c.tokens, 8 * rows, 4 * rows * c.dim, self.u.wide if self.u.narrow else 0)


class ParallelEmbedding(Kind):
    """One rank's rows of the table."""

    @property
    def parameters(self) -> tuple[int, ...]:
        return (self.c.rows * self.c.dim,)

    def forward(self, m: Memory, *, keeps: bool) -> None:
        del keeps
        m.take(self.u.act, self.u.act)
        m.drop(self.u.act)

    def backward(self, m: Memory) -> None:
        # The gradient is made of the whole table, and then cut.
        m.take(self.c.vocab * self.c.dim * self.c.width)
        m.drop(self.u.act)

    def weights(self, m: Memory) -> None:
        m.touch(self.c.rows * self.c.dim * self.c.width)


class Layer(Kind):
    """A layer on the only rank of a stage."""

    @property
    def parameters(self) -> tuple[int, ...]:
        c = self.c
        qkv = c.head_dim * (c.heads + 2 * c.kv_heads)
        return (
            c.dim, c.dim * qkv, c.dim * c.dim, c.dim, 2 * c.dim * c.hidden, c.dim * c.hidden
        )  # fmt: skip

    def forward(self, m: Memory, *, keeps: bool) -> None:
        u, c = self.u, self.c
        kept = u.act if keeps else 0
        _norm(m, u, keeps=keeps)
        m.take(u.qkv)
        m.drop(u.act - kept)
        _attend(m, u, keeps=keeps)
        m.take(u.act)
        dropped = _drop(m, u, c, keeps=keeps)
        m.take(u.act)
        m.drop(dropped)
        _norm(m, u, keeps=keeps)
        m.take(2 * u.hidden)
        m.drop(u.act - kept)
        m.touch(2 * u.hidden)
        m.take(u.hidden)
        if not keeps:
            m.drop(2 * u.hidden)
        m.take(u.act)
        dropped = _drop(m, u, c, keeps=keeps)
        m.take(u.act)
        m.drop(dropped)
        # Names of the function that go with it: both sums, and what was added to them.
        m.drop(3 * u.act, 0 if keeps and u.key_is_view else u.qkv)
        if not keeps:
            m.drop(u.query, u.hidden)

    def backward(self, m: Memory) -> None:
        u, c = self.u, self.c
        _drop_backward(m, u, c)
        m.take(u.hidden)
        m.take(3 * u.hidden)
        m.drop(4 * u.hidden)
        m.take(u.act)
        _norm_backward(m, u)
        m.take(u.act)
        m.drop(u.act)
        _drop_backward(m, u, c)
        m.take(u.query)
        _attend_backward(m, u)
        m.take(u.act)
        _norm_backward(m, u)
        m.touch(u.act)
        if c.drops:
            m.drop(2 * u.act)  # gradients of both sums: weights need those of what was dropped out

    def weights(self, m: Memory) -> None:
        largest = max(self.parameters) * self.c.width
        m.touch(largest if self.accumulates or self.u.narrow else 0)
        m.touch(self.u.wide)


class ParallelLayer(Kind):
    """One rank's heads, and its part of SwiGLU's width."""

    @property
    def parameters(self) -> tuple[int, ...]:
        c = self.c
        query, key = c.dim * c.dim // c.ranks, c.dim * c.head_dim * c.kv_heads // c.ranks
        hidden = c.dim * c.hidden // c.ranks
        return (query, key, key, query, hidden, hidden, hidden, c.dim, c.dim)

    def forward(self, m: Memory, *, keeps: bool) -> None:
        u, c = self.u, self.c
        _norm(m, u, keeps=keeps)
        m.take(u.qkv, u.qkv)
        _attend(m, u, keeps=keeps)
        self._add_up(m)
        dropped = _drop(m, u, c, keeps=keeps)
        m.take(u.act)
        m.drop(dropped)
        _norm(m, u, keeps=keeps)
        if not keeps:
            m.drop(u.act)
        m.take(u.hidden, u.hidden)
        if not keeps:
            m.drop(u.hidden)
        m.take(u.hidden, u.hidden)
        if not keeps:
            m.drop(2 * u.hidden)
        self._add_up(m)
        dropped = _drop(m, u, c, keeps=keeps)
        m.take(u.act)
        m.drop(dropped, 3 * u.act, u.qkv, 0 if keeps and u.key_is_view else u.qkv)
        if not keeps:
            m.drop(u.act, u.query, u.hidden)

    def _add_up(self, m: Memory) -> None:
        """Sum over the ranks of a stage: the own term and the sum are both there."""
        m.take(self.u.act, self.u.act)
        m.drop(self.u.act)

    def backward(self, m: Memory) -> None:
        u, c = self.u, self.c
        query, key, _, _, hidden, *_ = (n * c.width for n in self.parameters)
        _drop_backward(m, u, c)
        m.take(hidden, u.hidden)
        m.drop(u.hidden, u.act if c.drops else 0)
        m.take(2 * u.hidden)
        m.drop(3 * u.hidden)
        m.take(hidden, u.act)
        m.drop(u.hidden)
        m.take(u.hidden)
        m.drop(2 * u.hidden)
        m.take(hidden, u.act)
        m.drop(u.hidden, u.act)
        m.take(u.act)
        m.drop(2 * u.act)
        self._add_up(m)
        m.drop(u.act)
        _norm_backward(m, u)
        m.take(u.act)
        m.drop(u.act)
        _drop_backward(m, u, c)
        m.take(query, u.query)
        m.drop(u.query, u.act if c.drops else 0)
        _attend_backward(m, u)
        m.take(2 * key, 2 * u.act)
        m.take(u.act)
        m.drop(2 * u.act)
        m.take(query, u.act)
        m.drop(u.qkv, u.act)
        m.take(u.act)
        m.drop(2 * u.act)
        self._add_up(m)
        m.drop(u.act)
        _norm_backward(m, u)
        m.take(u.act)
        m.drop(3 * u.act)

    def weights(self, m: Memory) -> None:
        m.touch(self.u.wide)


class Head(Kind):
    """Last norm, projection and loss, on one rank or on several."""

    @property
    def parameters(self) -> tuple[int, ...]:
        c = self.c
        return (c.dim, c.rows * c.dim)

    @property
    def _part(self) -> int:
        """Logits of this rank."""
        return self.c.tokens * self.c.rows * self.c.width

    def forward(self, m: Memory, *, keeps: bool) -> None:
        u = self.u
        _norm(m, u, keeps=keeps)
        if self.c.ranks == 1:
            m.take(u.logits)
        else:
            most = self.c.tokens * self.c.most_rows * self.c.width
            padded = most if self.c.rows < self.c.most_rows else 0
            whole = most * self.c.ranks
            m.take(self._part, padded, whole, u.logits)
            m.drop(self._part, padded, whole)
        if keeps:
            m.take(u.logits_wide if u.narrow else 0)
            m.take(u.logits_wide)
            m.drop(u.logits, u.logits_wide if u.narrow else 0)

    def backward(self, m: Memory) -> None:
        u, c = self.u, self.c
        m.take(2 * u.logits_wide)
        m.drop(2 * u.logits_wide)
        if u.narrow:
            m.take(u.logits)
            m.drop(u.logits_wide)
        if c.ranks == 1:
            m.take(u.act)
        else:
            m.take(self._part)
            m.drop(u.logits)
            m.take(c.rows * c.dim * c.width, u.act)
            m.drop(self._part, u.act)
            m.take(u.act)
            m.drop(u.act)
        _norm_backward(m, u)

    def weights(self, m: Memory) -> None:
        weight = self.c.rows * self.c.dim * self.c.width if self.c.ranks == 1 else 0
        m.touch(weight if self.accumulates or self.u.narrow else 0)
        m.touch(self.u.wide)
