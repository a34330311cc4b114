"""Buckets: what is granted in any time, who waits for how long, and what is kept."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.allowance import Allowances, Bucket, Rate, draw, fill

RATE = Rate(per_s=10.0, burst=20.0)


def test_as_much_as_the_bucket_holds_is_granted_at_once_and_then_as_much_as_comes() -> None:
    bucket, granted = None, 0
    for _ in range(100):
        drawn = draw(bucket, RATE, 1, 5.0)
        bucket, granted = drawn.bucket, granted + (drawn.wait_s == 0)
    assert granted == 20
    assert drawn.wait_s == pytest.approx(0.1)
    for _ in range(100):
        drawn = draw(drawn.bucket, RATE, 1, 6.0)
        granted += drawn.wait_s == 0
    assert granted == 30


def test_who_waits_as_long_as_is_asked_for_is_granted_and_who_waits_less_is_not() -> None:
    drawn = draw(Bucket(level=-3.0, at_s=0.0), RATE, 1, 0.0)
    assert drawn.wait_s == pytest.approx(0.4)
    assert draw(drawn.bucket, RATE, 1, 0.399).wait_s > 0
    assert draw(drawn.bucket, RATE, 1, 0.401).wait_s == 0


def test_a_body_above_the_burst_is_granted_once_and_is_owed_then() -> None:
    bytes_rate = Rate(per_s=100.0, burst=1000.0)
    first = draw(None, bytes_rate, 5000, 0.0)
    assert first.wait_s == 0
    assert draw(first.bucket, bytes_rate, 1, 0.0).wait_s == pytest.approx(40.01)
    assert draw(first.bucket, bytes_rate, 1, 40.02).wait_s == 0


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = fill(Bucket(level=1.0, at_s=10.0), RATE, 9.0)
    assert (bucket.level, bucket.at_s) == (1.0, 10.0)


def test_a_request_of_nothing_is_granted_from_an_empty_bucket_that_owes_nothing() -> None:
    assert draw(Bucket(level=0.0, at_s=0.0), RATE, 0, 0.0).wait_s == 0
    assert draw(Bucket(level=-0.5, at_s=0.0), RATE, 0, 0.0).wait_s > 0


@pytest.mark.parametrize("seed", range(20))
def test_in_no_span_of_time_more_is_granted_than_burst_and_rate_allow(seed: int) -> None:
    """Compared with a brute force over all spans of a random history."""
    rng = random.Random(seed)
    now_s, bucket, granted = 0.0, None, []
    for _ in range(300):
        now_s += rng.choice((0.0, 0.01, 0.05, 0.5))
        drawn = draw(bucket, RATE, 1, now_s)
        bucket = drawn.bucket
        if not drawn.wait_s:
            granted.append(now_s)
    for first in range(len(granted)):
        for last in range(first, len(granted)):
            allowed = RATE.burst + RATE.per_s * (granted[last] - granted[first])
            assert last - first + 1 <= allowed + 1e-6


def test_of_several_buckets_all_are_drawn_from_or_none() -> None:
    kept: Allowances[str] = Allowances()
    small, large = Rate(per_s=1.0, burst=1.0), Rate(per_s=1.0, burst=3.0)
    both = {"pod": (small, 1.0), "job": (large, 1.0)}
    assert kept.take(both, 0.0) == (0.0, None)
    for _ in range(50):
        assert kept.take(both, 0.0) == (1.0, "pod")
    # The pod that asks too much has taken nothing from the others of its job.
    other = {"other": (small, 1.0), "job": (large, 1.0)}
    assert kept.take(other, 0.0) == (0.0, None)
    assert kept.take({}, 0.0) == (0.0, None)


def test_the_number_of_buckets_is_bounded_and_who_asks_all_the_time_keeps_theirs() -> None:
    kept: Allowances[str] = Allowances(max_buckets=10)
    rate = Rate(per_s=1.0, burst=100.0)
    for number in range(99):
        assert kept.take({"busy": (rate, 1.0)}, 0.0)[0] == 0
        kept.take({f"stranger-{number}": (rate, 1.0)}, 0.0)
    assert len(kept) == 10
    assert kept.take({"busy": (rate, 1.0)}, 0.0)[0] == 0
    assert kept.take({"busy": (rate, 1.0)}, 0.0) == (1.0, "busy")
