"""Skewness of experts: the paper's parameters, and draws that have it."""

from __future__ import annotations

import random

import pytest

from mainstay_core.theory.popularity import draw_popularity, plan_alpha, skewness_of


@pytest.mark.parametrize(
    ("skewness", "printed", "digits"),
    [(0.25, 0.0469, 4), (0.5, 0.0156, 4), (0.75, 0.0052, 4), (0.99, 0.000158, 6)],
)
def test_alphas_are_the_papers_to_the_printed_digit(
    skewness: float, printed: float, digits: int
) -> None:
    assert round(plan_alpha(skewness, 64), digits) == printed


def test_alpha_inverts_the_papers_mean_skewness() -> None:
    for num_experts in (2, 8, 64):
        for skewness in (0.01, 0.3, 0.9):
            alpha = plan_alpha(skewness, num_experts)
            mean_hhi = (alpha + 1) / (alpha * num_experts + 1)
            mean = (mean_hhi - 1 / num_experts) / (1 - 1 / num_experts)
            assert mean == pytest.approx(skewness)


@pytest.mark.parametrize("skewness", [0.0, 0.25, 0.5, 0.75, 0.99])
def test_draws_have_the_skewness_in_the_mean_and_add_up_to_one(skewness: float) -> None:
    rng = random.Random(7)
    draws = [draw_popularity(rng, skewness, 64) for _ in range(400)]

    assert all(sum(draw) == pytest.approx(1) for draw in draws)
    assert sum(map(skewness_of, draws)) / len(draws) == pytest.approx(skewness, abs=0.03)


def test_skewness_is_0_for_equal_shares_and_1_for_a_single_one() -> None:
    assert skewness_of((0.25,) * 4) == pytest.approx(0)
    assert skewness_of((0.0, 1.0, 0.0)) == pytest.approx(1)
