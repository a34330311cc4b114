"""Computes how much of each of two stages goes into an average.

The weight of a stage is its squared gradient norm in the last committed step, before clipping: it
gives more to the stage that has converged less (Blagoev et al., section 4.2, algorithm 1).
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple


class Weighting(enum.StrEnum):
    """The ways in which two neighbours are weighed."""

    GRADIENT_NORM = "GradientNorm"
    """By their squared gradient norms."""
    UNIFORM = "Uniform"
    """One half each."""
    COPY = "Copy"
    """The stage before alone."""


class Weights(NamedTuple):
    """The weights of two sources, fp64; they add up to exactly 1."""

    before: float
    after: float


def weigh(weighting: Weighting, norm_sq_before: float, norm_sq_after: float) -> Weights:
    """Return the weights of the stages before and after a lost one.

    Args:
        weighting: how they are weighed.
        norm_sq_before: squared norm of the stage before, over the like blocks alone.
        norm_sq_after: that of the stage after.

    Raises:
        ValueError: a norm is negative or not finite: no committed step has such.
    """
    for norm_sq in (norm_sq_before, norm_sq_after):
        if not math.isfinite(norm_sq) or norm_sq < 0:
            raise ValueError(f"a squared norm is {norm_sq}; it must be finite and at least 0")
    if weighting is Weighting.UNIFORM:
        return Weights(0.5, 0.5)
    if weighting is Weighting.COPY:
        return Weights(1.0, 0.0)
    largest = max(norm_sq_before, norm_sq_after)
    if largest == 0:
        return Weights(0.5, 0.5)
    # By a power of two, which changes no bit of the result: the sum of large ones stays finite.
    exponent = math.frexp(largest)[1]
    first, second = (math.ldexp(n, -exponent) for n in (norm_sq_before, norm_sq_after))
    before = first / (first + second)
    return Weights(before, 1.0 - before)
