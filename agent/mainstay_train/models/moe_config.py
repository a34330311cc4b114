"""Sizes of the built-in mixture of experts and of its training, from ``workload.config``."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.bounds import MAX_STATISTICS
from mainstay_train.models.llama_config import LlamaConfig

SOFTMAX, SIGMOID = "softmax", "sigmoid"
ROUTERS = (SIGMOID, SOFTMAX)
"""Values of ``workload.config.router``."""
NORMALIZED, PLAIN = "normalized", "plain"
GATES = (NORMALIZED, PLAIN)
"""Values of ``workload.config.gates``."""
NONE, SEQUENCE = "none", "sequence"
BALANCE_LOSSES = (NONE, SEQUENCE)
"""Values of ``workload.config.balanceLoss``."""
TOKENS, PROBABILITIES = "tokens", "probabilities"
COUNTS = (TOKENS, PROBABILITIES)
"""Values of ``workload.config.counts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """A Llama's sizes, and those of the mixtures that take the place of its SwiGLU.

    Raises:
        InvalidSpecError: A value is out of bounds or two contradict.
    """

    dense_layers: int = 1
    """First layers, whose SwiGLU of width ``hidden`` every token takes."""
    experts: int = 8
    """Experts of each other layer, among which a router chooses for each token."""
    active_experts: int = 2
    """Experts that a token takes."""
    shared_experts: int = 1
    """Experts that every token takes besides."""
    expert_hidden: int = 128
    """Inner width of an expert's SwiGLU."""
    router: str = SIGMOID
    """How an expert's score is made of its logit: by a softmax over all experts, or by itself."""
    gates: str = NORMALIZED
    """Weights of a token's experts: their scores divided by their sum, or the scores as they are
    (plain)."""
    gate_scale: float = 1.0
    """Factor of all gates."""
    bias_rate: float = 1e-3
    """By how much a step changes the bias that each expert's score has where experts are chosen: up
    if the expert had fewer tokens than the mean, down if it had more. 0: there is no bias."""
    balance_loss: str = NONE
    """What is added to the loss so that experts get equally many tokens: nothing, or a term for
    each sequence. One over a batch would depend on what is in a micro-batch together."""
    balance_weight: float = 1e-3
    """Factor of that term."""
    counts: str = TOKENS
    """What is counted of each expert: its tokens, or its shares of the scores as well, in fixed
    point. By these shares snapshots order experts with ``ordering: SoftCount``."""

    @property
    def counts_probabilities(self) -> bool:
        """Whether shares of the scores are counted."""
        return self.counts == PROBABILITIES

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)  # super() knows no class with slots
        for name in ("experts", "active_experts", "expert_hidden", "gate_scale"):
            self.require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("dense_layers", "shared_experts", "bias_rate", "balance_weight"):
            self.require(getattr(self, name) >= 0, name, "must not be negative")
        self.require(
            self.dense_layers < self.layers,
            "dense_layers",
            f"must be below layers ({self.layers}), so that a layer with experts is left",
        )
        self.require(
            self.active_experts <= self.experts,
            "active_experts",
            f"must be at most experts ({self.experts})",
        )
        counted = (self.layers - self.dense_layers) * self.experts
        counted *= 1 + self.counts_probabilities
        self.require(
            counted <= MAX_STATISTICS,
            "experts",
            f"must leave at most {MAX_STATISTICS} experts in all layers, not {counted}",
        )
        self.require_one_of("router", ROUTERS)
        self.require_one_of("gates", GATES)
        self.require_one_of("counts", COUNTS)
        self.require(
            self.active_experts > 1 or self.gates == PLAIN,
            "gates",
            f"must be {PLAIN} where activeExperts is 1, as the only gate of a token would always "
            "be 1 and the router would learn nothing",
        )
        self.require(
            self.balance_loss != "batch",
            "balance_loss",
            f"must be {SEQUENCE} or {NONE}, as a loss over a batch would make a sample's gradient "
            "depend on which others are computed with it",
        )
        self.require_one_of("balance_loss", BALANCE_LOSSES)
