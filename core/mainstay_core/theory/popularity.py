"""Draws how tokens spread over experts, with a given skewness (MoEvement, appendix D)."""

from __future__ import annotations

import math
import random


def plan_alpha(skewness: float, num_experts: int) -> float:
    """Return the parameter of a symmetric Dirichlet distribution whose skewness has this mean.

    With ``E[HHI] = (alpha + 1) / (alpha E + 1)`` the normalised mean is ``E[S] = 1 / (alpha E +
    1)``.

    Args:
        skewness: E[S], above 0 and below 1.
        num_experts: E.
    """
    return (1 / skewness - 1) / num_experts


def skewness_of(popularity: tuple[float, ...]) -> float:
    """Return the normalised Herfindahl-Hirschman index: 0 for equal shares, 1 for a single one.

    Args:
        popularity: shares of at least two experts; their sum is 1.
    """
    equal = 1 / len(popularity)
    return (sum(share * share for share in popularity) - equal) / (1 - equal)


def draw_popularity(rng: random.Random, skewness: float, num_experts: int) -> tuple[float, ...]:
    """Return the tokens' shares of the experts of one layer.

    Gamma variates of a small shape are too small for a float. So their logarithms are drawn:
    ``Gamma(a) = Gamma(a + 1) U^(1/a)``.

    Args:
        rng: what is drawn from.
        skewness: mean of the draws' skewness; 0 gives equal shares.
        num_experts: at least 2.
    """
    if skewness == 0:
        return (1 / num_experts,) * num_experts
    alpha = plan_alpha(skewness, num_experts)
    logs = [
        math.log(rng.gammavariate(alpha + 1, 1.0)) + math.log(1 - rng.random()) / alpha
        for _ in range(num_experts)
    ]
    largest = max(logs)
    weights = [math.exp(log - largest) for log in logs]
    total = sum(weights)
    return tuple(weight / total for weight in weights)
