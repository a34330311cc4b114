"""All ranks agree on one pace, from what they told each other and nothing else."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.measures import MAX_PEERS, agree, rate, round_measure
from mainstay_core.wire.windows import Measures


def told(copy: int, host: int, network: int, step_us: int) -> Measures:
    return Measures(
        copy_bytes_per_s=copy, host_bytes_per_s=host, network_bytes_per_s=network, step_us=step_us
    )


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0, 0), (7, 7), (99, 99), (104, 100), (105, 110), (995, 1000), (12_499, 12_000)],
)
def test_measures_have_two_digits(value: int, rounded: int) -> None:
    assert round_measure(value) == rounded


def test_rounding_errs_by_a_twentieth_at_most() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        value = rng.randint(1, 10 ** rng.randint(1, 16))
        rounded = round_measure(value)
        assert abs(rounded - value) * 20 <= value
        assert round_measure(rounded) == rounded


def test_a_rate_is_bytes_per_second() -> None:
    assert rate(3 << 20, 500_000_000) == 6_300_000
    with pytest.raises(InvalidSpecError, match="elapsed_ns"):
        rate(1, 0)


def test_the_slowest_leg_of_the_slowest_rank_and_the_median_step_count() -> None:
    pace = agree([told(90, 80, 150, 100), told(70, 99, 140, 300), told(95, 99, 999, 200)], 1)

    assert pace is not None
    assert (pace.bytes_per_s, pace.step_us) == (70, 200)


def test_the_network_carries_each_byte_once_for_each_peer() -> None:
    ranks = [told(1000, 1000, 1200, 2_000_000)]

    one, two, none = (agree(ranks, peers) for peers in (1, 2, 0))

    assert one is not None
    assert two is not None
    assert none is not None
    assert (one.bytes_per_s, two.bytes_per_s, none.bytes_per_s) == (1000, 600, 1000)
    assert two.budget_bytes == 1200
    assert two.reason == (
        "the slowest leg is the network with 600 B/s, shared by 2 peers; a step takes 2 s"
    )


def test_of_two_steps_in_the_middle_the_lower_counts() -> None:
    pace = agree([told(1, 1, 1, step) for step in (40, 10, 20, 30)], 1)

    assert pace is not None
    assert pace.step_us == 20


def test_what_a_joiner_has_not_measured_does_not_count() -> None:
    old, new = told(50, 60, 70, 100), told(0, 0, 0, 0)

    assert agree([old, new], 2) == agree([old], 2)
    assert agree([new], 2) is None
    assert agree([], 2) is None
    assert agree([told(1, 1, 0, 1)], 1) is None
    assert agree([told(1, 1, 0, 1)], 0) is not None


def test_order_of_the_votes_does_not_matter() -> None:
    rng = random.Random(2)
    for _ in range(500):
        ranks = [
            told(*(rng.choice((0, rng.randint(1, 99))) for _ in range(4)))
            for _ in range(rng.randint(0, 6))
        ]
        peers = rng.randint(0, 3)
        assert agree(ranks, peers) == agree(rng.sample(ranks, len(ranks)), peers)


def test_arguments_out_of_their_range_are_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.snapshots\.peers: is 17"):
        agree([], MAX_PEERS + 1)
    with pytest.raises(InvalidSpecError, match="value: is -1"):
        round_measure(-1)
