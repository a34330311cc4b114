"""Follows a micro-batch through a layer with experts: what memory each pass takes.

As ``llama_passes``, line by line, for the code of ``mainstay_train.models.experts``. How many
tokens an expert has is known only when it has them: here all have equally many. What is kept does
not depend on it, since every token is kept once for each of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.job.sizes.llama_passes import Layer, swiglu, swiglu_backward
from mainstay_core.job.sizes.llama_tensors import LlamaShape, Memory

INDEX = 8
"""Bytes of an index: int64."""
WIDE = 4
"""Bytes of an element of fp32, in which experts are scored and their outputs are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape(LlamaShape):
    """The part of ``workload.config`` on which sizes depend."""

    experts: int
    active: int
    """Experts that a token takes."""
    expert_hidden: int
    shared_hidden: int
    """Width of the shared experts together; 0 where there are none."""
    biased: bool
    """Whether experts are chosen with a bias."""
    normalized: bool
    """Whether a token's gates are divided by their sum."""
    soft: bool
    """Whether scores are those of a softmax."""


class MixtureLayer(Layer):
    """A layer with experts."""

    def __init__(self, c: MoeShape, accumulates: bool) -> None:
        super().__init__(c, accumulates)
        self.moe = c
        pairs = c.tokens * c.active
        self.scores = WIDE * c.tokens * c.experts
        self.gates = WIDE * pairs
        self.choice = INDEX * pairs
        """An index for each token and slot."""
        self.rows = pairs * c.dim * c.width
        self.totals = WIDE * c.tokens if c.normalized else 0
        self.counts = INDEX * c.experts
        self.loads = [pairs // c.experts + (i < pairs % c.experts) for i in range(c.experts)]
        """Tokens of each expert."""
        self.untrained = int(c.biased)

    @property
    def parameters(self) -> tuple[int, ...]:
        c = self.moe
        router = (c.experts * c.dim, *([c.experts] if c.biased else []))
        expert = (2 * c.dim * c.expert_hidden, c.dim * c.expert_hidden)
        shared = (2 * c.dim * c.shared_hidden, c.dim * c.shared_hidden) if c.shared_hidden else ()
        return (*self._of_attention, c.dim, *router, *(expert * c.experts), *shared)

    def _feed_forward(self, m: Memory, *, keeps: bool) -> None:
        u, c = self.u, self.moe
        self._choose(m, keeps=keeps)
        m.touch(4 * self.choice)  # of the sorts
        m.take(2 * self.choice, self.counts)
        m.touch(self.choice, self.rows)
        m.take(self.rows)
        for load in self.loads:
            self._expert(m, load, c.expert_hidden, keeps=keeps)
        m.take(self.rows)
        m.drop(self.rows, 0 if keeps else self.rows)
        self._combine(m)
        if not keeps:
            m.drop(self.rows, self.gates, 3 * self.choice, self.counts)
        if c.shared_hidden:
            self._expert(m, c.tokens, c.shared_hidden, keeps=keeps)
            m.take(u.act)
            m.drop(2 * u.act)
        m.drop(0 if keeps else u.act)

    def _choose(self, m: Memory, *, keeps: bool) -> None:
        """Score and choose experts: adds the choice and gates and, where they are kept, scores."""
        c = self.moe
        m.touch(self.scores, self.u.wide + WIDE * c.experts * c.dim if self.u.narrow else 0)
        m.take(self.scores, self.scores)
        wanted = self.scores if c.biased else 0
        sorted_indices = INDEX * c.tokens * c.experts
        m.take(wanted)
        m.touch(sorted_indices, max(self.scores, 2 * self.choice))
        m.take(self.choice, self.gates)
        m.touch(self.gates + 2 * self.totals)
        m.drop(self.scores, wanted)
        if keeps:
            # Gates as they are used, before they were scaled, and the sums that they are parts of.
            m.take(self.gates, self.totals)
        else:
            m.drop(self.scores)

    def _expert(self, m: Memory, tokens: int, hidden: int, *, keeps: bool) -> None:
        """Make the output of an expert for some tokens."""
        size = tokens * hidden * self.moe.width
        m.take(2 * size)
        swiglu(m, size, keeps=keeps)
        m.take(tokens * self.moe.dim * self.moe.width)
        if not keeps:
            m.drop(size)

    def _combine(self, m: Memory) -> None:
        """Add up weighted outputs in fp32."""
        u = self.u
        terms = u.wide if self.moe.active > 1 else 0
        m.touch(u.wide, terms, u.act if u.narrow else 0)
        m.take(u.act)

    def _feed_backward(self, m: Memory) -> None:
        u, c = self.u, self.moe
        if c.shared_hidden:
            swiglu_backward(m, c.tokens * c.shared_hidden * c.width)
            m.take(u.act)
        self._combine_backward(m)
        if c.drops and not c.shared_hidden:
            m.drop(u.act)  # the shared experts' weights would need the gradient of their output
        for load in self.loads:
            swiglu_backward(m, load * c.expert_hidden * c.width)
            m.take(load * c.dim * c.width)
        m.take(self.rows)  # the experts' gradients side by side
        m.drop(self.rows)
        terms = 2 * u.wide if c.active > 1 else u.wide
        m.touch(terms, u.act if u.narrow else 0)
        m.take(u.act)
        m.drop(self.rows)
        if c.shared_hidden:
            m.touch(u.act)
            m.drop(u.act)
        self._choose_backward(m)
        m.touch(u.act)
        m.drop(u.act)

    def backward(self, m: Memory) -> None:
        super().backward(m)
        if not self.c.drops and not self.moe.shared_hidden:
            m.drop(self.u.act)  # as above: it is the gradient of the layer's output

    def _combine_backward(self, m: Memory) -> None:
        """Make the gradients of the experts' outputs, and of the gates."""
        u = self.u
        wide = u.wide if u.narrow else 0
        rows = self.rows // self.moe.width * WIDE
        m.take(wide, self.gates)
        m.touch(rows, self.choice if not u.narrow else self.rows)
        m.take(self.rows)
        m.touch(self.gates, u.wide, u.act if u.narrow else 0)
        m.take(self.gates)
        m.drop(wide, self.gates, self.rows, self.gates)

    def _choose_backward(self, m: Memory) -> None:
        """Make the gradient of the input from that of the gates; that of the logits stays."""
        u, c = self.u, self.moe
        m.take(self.scores)
        more = 2 if c.soft else 3
        m.touch(3 * self.gates, self.counts, more * self.scores)
        # The gradient of the logits takes the place of the scores.
        m.drop(self.gates, self.scores, self.totals, self.gates, self.choice)
        m.touch(u.wide + u.act + WIDE * c.experts * c.dim if u.narrow else 0)
        m.take(u.act)

    def _feed_weights(self, m: Memory) -> None:
        c = self.moe
        m.touch(self.u.wide if self.u.narrow else 0, WIDE * c.experts * c.dim)
        self._product(m, 2 * c.expert_hidden, c.dim, self.loads[0])
        self._product(m, c.dim, c.expert_hidden, self.loads[0])
        if c.shared_hidden:
            self._product(m, 2 * c.shared_hidden, c.dim)
            self._product(m, c.dim, c.shared_hidden)
