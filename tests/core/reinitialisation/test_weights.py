"""The weights of an average, by the formula of algorithm 1 (Blagoev et al., section 4.2)."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from mainstay_core.reinitialisation.weights import Weighting, weigh

NORM = Weighting.GRADIENT_NORM


def test_weights_are_the_squared_norms_over_their_sum() -> None:
    # Norms of 3 and 1: the squares are 9 and 1.
    before, after = weigh(NORM, 9.0, 1.0)
    assert before == 0.9
    assert after == pytest.approx(0.1, abs=1e-16)
    assert weigh(NORM, 0.0, 1.0) == (0.0, 1.0)
    assert weigh(NORM, 2.0, 0.0) == (1.0, 0.0)


def test_weights_add_up_to_exactly_one_and_are_as_near_as_doubles_come() -> None:
    rng = random.Random(3)
    for _ in range(5000):
        norms = [rng.random() * 10.0 ** rng.randint(-300, 300) for _ in range(2)]
        before, after = weigh(NORM, *norms)

        assert before + after == 1.0
        exact = Fraction(norms[0]) / (Fraction(norms[0]) + Fraction(norms[1]))
        assert abs(Fraction(before) - exact) <= Fraction(1, 2**51)


def test_two_zero_gradients_give_one_half_each() -> None:
    assert weigh(NORM, 0.0, 0.0) == (0.5, 0.5)


def test_the_largest_norms_overflow_nothing() -> None:
    assert weigh(NORM, 1.7e308, 1.7e308) == (0.5, 0.5)


def test_other_weightings_look_at_no_norm() -> None:
    assert weigh(Weighting.UNIFORM, 9.0, 1.0) == (0.5, 0.5)
    assert weigh(Weighting.COPY, 1.0, 9.0) == (1.0, 0.0)


@pytest.mark.parametrize("norm_sq", [-1.0, math.inf, math.nan])
def test_a_norm_that_no_committed_step_has_is_refused(norm_sq: float) -> None:
    with pytest.raises(ValueError, match="squared norm"):
        weigh(NORM, 1.0, norm_sq)
