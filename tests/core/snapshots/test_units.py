"""Spans of units: the same elements, whatever order and pieces they come in."""

from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.snapshots.units import Span, agreed_number, merge_spans


@pytest.mark.parametrize("seed", range(4))
def test_merged_spans_have_the_same_elements_ascend_and_do_not_touch(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        edges = [sorted(rng.sample(range(40), 2)) for _ in range(rng.randint(0, 6))]
        spans = [Span(start=start, stop=stop) for start, stop in edges]
        merged = merge_spans(spans)
        expected = sorted({n for span in spans for n in range(span.start, span.stop)})
        assert [n for span in merged for n in range(span.start, span.stop)] == expected
        assert all(one.stop < after.start for one, after in itertools.pairwise(merged))


@pytest.mark.parametrize(
    ("told", "number"),
    [
        ([(0, 3)], 3),
        ([(0, 2), (1, 2), (1, 3)], 2),
        ([(0, 1), (0, 9)], 1),  # all units of one are there
        ([(0, 8), (0, 9)], 9),
        ([(0, 2), (0, 2), (1, 5)], 2),
    ],
)
def test_of_different_numbers_of_units_that_of_most_copies_counts(
    told: list[tuple[int, int]], number: int
) -> None:
    assert agreed_number(told) == agreed_number(reversed(told)) == number
