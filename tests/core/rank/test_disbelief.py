"""Whether a copy is believed, by the digests of those who have the state."""

from __future__ import annotations

import itertools

import pytest

from mainstay_core.rank.serving import disbelieved_part


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        ("", True),
        ("x", True),
        ("y", False),
        ("xx", True),
        ("xy", False),
        ("xxy", True),
        ("xyy", False),
        ("xyz", False),
        ("xxyz", True),
        ("xxyy", False),
    ],
)
def test_a_part_is_believed_if_more_hold_it_than_anything_else(told: str, believed: bool) -> None:
    for order in set(itertools.permutations(told)):
        others = {str(number): ["a", digest] for number, digest in enumerate(order)}
        assert disbelieved_part(["a", "x"], others) == (None if believed else 1)
