"""Follows a micro-batch through the blocks of the built-in Llama: what memory each pass takes.

Each function follows the code of ``mainstay_train.models`` line by line: what a tensor adds when it
is made, and what goes when the last name of it goes. So a change of that code is one change here.
Tests compare every number with what is measured of the model itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from mainstay_core.job.sizes.llama_tensors import (
    LOGITS,
    PICKING,
    WIDENED_ELEMENTS,
    LlamaShape,
    Memory,
    TensorSizes,
)


def _norm(m: Memory, u: TensorSizes, *, keeps: bool) -> None:
    """Normalise: adds the output and, where it is kept, the normalised input and its scale."""
    if u.narrow:
        m.touch(3 * u.wide, u.act, u.scale)
    else:
        m.touch(2 * u.wide, u.scale)
    m.take(u.act)
    if keeps:
        m.take(u.wide, u.scale)


def swiglu(m: Memory, hidden: int, *, keeps: bool) -> None:
    """Multiply two halves of ``hidden`` bytes each, which go unless they are kept."""
    m.touch(2 * hidden)
    m.take(hidden)
    if not keeps:
        m.drop(2 * hidden)


def swiglu_backward(m: Memory, hidden: int) -> None:
    """Make the gradient of SwiGLU's halves from that of the matrix behind it."""
    m.take(hidden)
    m.take(3 * hidden)
    m.drop(4 * hidden)


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
    if u.flash:
        m.take(u.query, u.log_sums)
        if not keeps:
            m.drop(u.log_sums, u.rotated)
        return
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
    if u.flash:
        m.take(u.query, 2 * u.key)
        m.drop(u.query, u.qkv, u.rotated, u.log_sums)
    else:
        _explicit_backward(m, u)
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
    m.take(u.qkv)
    m.drop(u.rotated)
    m.touch(u.qkv)
    m.drop(u.qkv)


def _explicit_backward(m: Memory, u: TensorSizes) -> None:
    """Take the gradient of the heads' outputs through products and softmax."""
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


def _drop(m: Memory, u: TensorSizes, c: LlamaShape, *, keeps: bool) -> int:
    """Drop out at random: adds the output and, where it is kept, which elements are.

    Returns:
        Size of the output; 0 where it is the input.
    """
    if not c.drops:
        return 0
    chosen = c.tokens * c.dim
    m.touch(chosen, max(u.wide, (3 if keeps else 2) * u.act))
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

    untrained = 0
    """Parameters that the optimizer leaves alone."""

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

    def _product(self, m: Memory, outputs: int, inputs: int, tokens: int | None = None) -> None:
        """Write the gradient of a matrix, in fp32, of some tokens; None: of all."""
        if not self.u.narrow:
            m.touch(4 * outputs * inputs if self.accumulates else 0)
            return
        rows = min(outputs, max(1, WIDENED_ELEMENTS // inputs))
        most = max(1, WIDENED_ELEMENTS // max(rows, inputs))
        tokens = min(self.c.tokens if tokens is None else tokens, most)
        m.touch(4 * (rows * inputs + tokens * (rows + inputs)))


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
        rows = min(c.tokens, c.rows)  # sums of those that occur, and their places
        m.touch(8 * c.tokens, 8 * rows, 4 * rows * c.dim, self.u.wide if self.u.narrow else 0)


class ParallelEmbedding(Embedding):
    """One rank's rows of the table."""

    @property
    def parameters(self) -> tuple[int, ...]:
        return (self.c.rows * self.c.dim,)

    def forward(self, m: Memory, *, keeps: bool) -> None:
        u, c = self.u, self.c
        places, elsewhere = 8 * c.tokens, c.tokens
        m.take(places, elsewhere)
        m.touch(2 * elsewhere)
        m.take(u.act, u.act)
        m.drop(u.act, *(() if keeps else (places, elsewhere)))

    def backward(self, m: Memory) -> None:
        m.take(self.u.act)
        m.drop(self.u.act, self.c.tokens)


class Layer(Kind):
    """A layer on the only rank of a stage."""

    @property
    def parameters(self) -> tuple[int, ...]:
        c = self.c
        return (*self._of_attention, c.dim, 2 * c.dim * c.hidden, c.dim * c.hidden)

    @property
    def _of_attention(self) -> tuple[int, ...]:
        c = self.c
        return c.dim, c.dim * c.head_dim * (c.heads + 2 * c.kv_heads), c.dim * c.dim

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
        self._feed_forward(m, keeps=keeps)
        dropped = _drop(m, u, c, keeps=keeps)
        m.take(u.act)
        m.drop(dropped)
        # Names of the function that go with it: both sums, and what was added to them.
        m.drop(3 * u.act, 0 if keeps and u.keeps_qkv else u.qkv)
        if not keeps:
            m.drop(u.query)

    def _feed_forward(self, m: Memory, *, keeps: bool) -> None:
        """Make the output of SwiGLU; its normalised input is there, and goes unless it is kept."""
        u = self.u
        m.take(2 * u.hidden)
        m.drop(0 if keeps else u.act)
        swiglu(m, u.hidden, keeps=keeps)
        m.take(u.act)
        if not keeps:
            m.drop(u.hidden)

    def backward(self, m: Memory) -> None:
        u, c = self.u, self.c
        _drop_backward(m, u, c)
        self._feed_backward(m)
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

    def _feed_backward(self, m: Memory) -> None:
        """Make the gradient of what SwiGLU takes; that of its output is there."""
        swiglu_backward(m, self.u.hidden)
        m.take(self.u.act)

    def weights(self, m: Memory) -> None:
        c = self.c
        heads = c.head_dim * (c.heads + 2 * c.kv_heads)
        self._product(m, heads, c.dim)
        self._product(m, c.dim, c.dim)
        self._feed_weights(m)
        m.touch(self.u.wide)

    def _feed_weights(self, m: Memory) -> None:
        self._product(m, 2 * self.c.hidden, self.c.dim)
        self._product(m, self.c.dim, self.c.hidden)


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
        m.drop(u.qkv)
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
        m.drop(dropped, 3 * u.act, 0 if keeps and u.keeps_qkv else u.qkv)
        if not keeps:
            m.drop(u.act, u.query, u.hidden)

    def _add_up(self, m: Memory) -> None:
        """Sum over the ranks of a stage: the own term and the sum are both there."""
        m.take(self.u.act, self.u.act)
        m.drop(self.u.act)

    def backward(self, m: Memory) -> None:
        u, c = self.u, self.c
        _drop_backward(m, u, c)
        m.take(u.hidden)
        m.take(2 * u.hidden)
        m.drop(3 * u.hidden)
        m.take(u.act)
        m.take(u.hidden)
        m.drop(2 * u.hidden)
        m.touch(u.act)
        m.touch(u.act)
        _norm_backward(m, u)
        m.touch(u.act)
        _drop_backward(m, u, c)
        m.take(u.query)
        _attend_backward(m, u)
        m.take(u.act)
        m.touch(u.act)
        m.touch(u.act)
        _norm_backward(m, u)
        m.touch(u.act)
        if c.drops:
            m.drop(2 * u.act)  # as on the only rank of a stage

    def weights(self, m: Memory) -> None:
        c = self.c
        heads, kv_heads = c.heads // c.ranks * c.head_dim, c.kv_heads // c.ranks * c.head_dim
        hidden = c.hidden // c.ranks
        for outputs in (heads, kv_heads, hidden):
            self._product(m, outputs, c.dim)
        for inputs in (heads, hidden):
            self._product(m, c.dim, inputs)
        m.touch(self.u.wide)


class Head(Kind):
    """Last norm, projection and loss, on one rank or on several."""

    @property
    def parameters(self) -> tuple[int, ...]:
        c = self.c
        return (c.dim, c.rows * c.dim)

    @property
    def _chunk(self) -> int:
        """Tokens whose logits are there at a time."""
        return min(self.c.tokens, max(1, LOGITS // self.c.vocab))

    def forward(self, m: Memory, *, keeps: bool) -> None:
        c, u = self.c, self.u
        _norm(m, u, keeps=keeps)
        m.take(u.act, u.scale)  # of the input's gradient, and of the sums of exponentials
        if c.ranks > 1:
            self._gather(m)
        self._gradients(m, self._chunk, c.rows)
        if self._chunk == c.tokens:
            m.take(c.tokens * c.rows * c.width)

    def _gather(self, m: Memory) -> None:
        """Make the logits of a chunk of which each rank has a part, and cut out the own ones."""
        c, tokens = self.c, self._chunk
        part, most = tokens * c.rows * c.width, tokens * c.most_rows * c.width
        padded = most if c.rows < c.most_rows else 0
        logits = tokens * c.vocab * c.width
        m.touch(part, padded, most * c.ranks, logits)
        wide = 4 * tokens * c.vocab
        m.touch(wide, logits if self.u.narrow else 0)
        m.touch(wide, 4 * tokens * c.rows)

    def _gradients(self, m: Memory, tokens: int, classes: int) -> None:
        """Make logits in fp32, and their gradient of them in the model's type."""
        wide = 4 * tokens * classes
        m.touch(wide, wide // 4 * self.c.width if self.u.narrow else PICKING * tokens)

    def backward(self, m: Memory) -> None:
        if self.c.ranks > 1:
            m.touch(self.u.act)
        _norm_backward(m, self.u)

    def weights(self, m: Memory) -> None:
        c = self.c
        if self._chunk == c.tokens:
            self._product(m, c.rows, c.dim)
        else:
            classes = min(c.rows, max(1, LOGITS // c.tokens))
            self._gradients(m, c.tokens, classes)
            m.take(c.tokens * classes * c.width)
            self._product(m, classes, c.dim)
            m.drop(c.tokens * classes * c.width)
        m.touch(self.u.wide)
