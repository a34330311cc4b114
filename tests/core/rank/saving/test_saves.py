"""Which versions on a disk are outdated."""

from __future__ import annotations

from itertools import combinations

import pytest

from mainstay_core.rank.saving.saves import Outdated, find_outdated


def test_a_torn_version_is_not_one_of_those_that_are_kept() -> None:
    torn = 6
    good = [2, 4, 8]
    assert torn not in good
    assert find_outdated(good, keep=2) == Outdated(complete=3, unfinished=8)


def test_nothing_complete_goes_before_there_are_enough() -> None:
    assert find_outdated([4], keep=2) == Outdated(complete=-1, unfinished=4)
    assert find_outdated([], keep=2) == Outdated(complete=-1, unfinished=-1)


@pytest.mark.parametrize("keep", [2, 3])
def test_exactly_the_newest_good_versions_stay(keep: int) -> None:
    for size in range(6):
        for good in combinations(range(1, 8), size):
            outdated = find_outdated(good, keep)
            stay = [version for version in good if version > outdated.complete]
            assert stay == sorted(good)[-keep:]
