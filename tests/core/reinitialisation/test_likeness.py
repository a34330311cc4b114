"""Like blocks, and which block of another stage stands for a lost one."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mainstay_core.reinitialisation.likeness import kind_of, match_index


def test_like_blocks_have_the_same_parameters_by_name_and_shape_in_any_order() -> None:
    kind = kind_of([("w", (4, 8)), ("norm", (8,))])

    assert kind_of([("norm", (8,)), ("w", (4, 8))]) == kind
    assert kind_of([("w", (8, 4)), ("norm", (8,))]) != kind
    assert kind_of([("v", (4, 8)), ("norm", (8,))]) != kind
    assert kind_of([("w", (4, 8))]) != kind


@pytest.mark.parametrize("num", [1, 2, 3, 12])
def test_equal_numbers_match_one_to_one(num: int) -> None:
    assert [match_index(k, num, num) for k in range(num)] == list(range(num))


def test_a_block_takes_the_one_in_whose_part_its_middle_lies() -> None:
    for lost in range(1, 14):
        for other in range(1, 14):
            for k in range(lost):
                middle = Fraction(2 * k + 1, 2 * lost)
                (where,) = [
                    i for i in range(other) if Fraction(i, other) <= middle < Fraction(i + 1, other)
                ]
                assert match_index(k, lost, other) == where, (k, lost, other)


def test_unequal_stages_match_evenly() -> None:
    assert [match_index(k, 4, 2) for k in range(4)] == [0, 0, 1, 1]
    assert [match_index(k, 2, 4) for k in range(2)] == [1, 3]
    assert [match_index(k, 3, 2) for k in range(3)] == [0, 1, 1]
    assert [match_index(k, 3, 1) for k in range(3)] == [0, 0, 0]
