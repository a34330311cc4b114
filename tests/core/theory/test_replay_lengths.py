"""Length and computation of a replay."""

from __future__ import annotations

import pytest

from mainstay_core.theory.built_replays import list_replays
from mainstay_core.theory.replay_lengths import conversion_cost, plan_replay_length


@pytest.mark.parametrize("window", range(1, 9))
def test_without_lag_a_replay_takes_one_to_two_windows(window: int) -> None:
    length = plan_replay_length(window, 0, window)

    assert (length.least, length.mean, length.most) == (window, 1.5 * window, 2 * window)


@pytest.mark.parametrize("lag", range(5))
@pytest.mark.parametrize("window", range(1, 9))
def test_replays_of_windows_as_built_have_the_length_that_is_planned(window: int, lag: int) -> None:
    planned = plan_replay_length(window, lag, window + lag)
    replays = list_replays(window, lag, 10)

    # The step that a failure interrupts is computed again, too: up to a whole one.
    assert min(replays) == planned.least
    assert max(replays) + 1 == planned.most
    assert sum(replays) / len(replays) + 0.5 == pytest.approx(planned.mean)
    assert planned.mean == pytest.approx(1.5 * (window + lag))


def test_a_conversion_spares_a_third_of_what_is_frozen() -> None:
    compute = {"a": 0.5, "b": 0.3, "c": 0.2}

    assert conversion_cost([(("a", "b", "c"), ())], compute) == 1
    assert conversion_cost([(("a",), ("b", "c")), (("b",), ("c",)), (("c",), ())], compute) == (
        pytest.approx(3 - (0.5 + 0.2) / 3)
    )


def test_the_popular_unit_last_is_the_cheapest_conversion() -> None:
    compute = {"a": 0.7, "b": 0.2, "c": 0.1}

    def cost(*order: str) -> float:
        return conversion_cost([((order[i],), order[i + 1 :]) for i in range(len(order))], compute)

    assert cost("c", "b", "a") < cost("b", "c", "a") < cost("a", "b", "c")
