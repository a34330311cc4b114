"""Traces are drawn from a seed, or read from CSV with an error that names the line."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.theory.traces import draw_count, draw_poisson, read_trace


def test_a_poisson_trace_ascends_within_the_run_and_has_the_mean_that_was_asked() -> None:
    trace = draw_poisson(random.Random(3), 600.0, 6_000_000.0)

    assert list(trace) == sorted(trace)
    assert trace[-1] < 6_000_000.0
    assert len(trace) == pytest.approx(10_000, rel=0.03)
    assert trace == draw_poisson(random.Random(3), 600.0, 6_000_000.0)


def test_a_trace_of_a_given_number_has_it() -> None:
    trace = draw_count(random.Random(1), 24, 21_600.0)

    assert len(trace) == 24
    assert list(trace) == sorted(trace)
    assert 0 <= trace[0] <= trace[-1] <= 21_600


def test_a_trace_that_would_have_too_many_failures_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="mtbf: is 1e-06 s, must be at least"):
        draw_poisson(random.Random(0), 1e-6, 3600.0)


def test_a_file_is_read_by_the_name_of_its_column() -> None:
    assert read_trace("node,time_s\nb,3\n\na, 4.5 \n") == (3.0, 4.5)
    assert read_trace("time_s\r\n0\r\n0\r\n") == (0.0, 0.0)
    assert read_trace("time_s\n") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace line 1: must be a heading that names the column time_s"),
        ("1\n2\n", "trace line 1: is '1', must be a heading that names the column time_s"),
        ("time_s\n1\nx\n", "trace line 3: time_s is 'x', must be a number of seconds"),
        ("time_s\n\n1\n\nnan\n", "trace line 5: time_s is 'nan', must be a number"),
        ("time_s\n-1\n", "trace line 2: time_s is '-1', must be a number of seconds from 0"),
        ("time_s\n1e11\n", "trace line 2: time_s is '1e11'"),
        ("time_s\n5\n4\n", "trace line 3: time_s is 4, before the 5 of the line above"),
        ("node,time_s\na\n", "trace line 2: has no column time_s"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read_trace(text)
    assert str(caught.value).startswith(message)
