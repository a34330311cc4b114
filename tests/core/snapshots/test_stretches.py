"""Stretches: lost neighbours replay together, and a later loss enlarges only what it touches."""

from __future__ import annotations

import random
from collections.abc import Iterable

from mainstay_core.snapshots.stretches import Stretch, find_stretch, find_stretches


def stretch(first: int, last: int) -> Stretch:
    return Stretch(first=first, last=last)


def test_neighbouring_stages_are_one_segment() -> None:
    assert find_stretches([4, 1, 2, 7, 2]) == (stretch(1, 2), stretch(4, 4), stretch(7, 7))
    assert find_stretches([]) == ()
    assert [str(one) for one in find_stretches([1, 2, 4])] == ["stages 1 to 2", "stage 4"]


def found(lost: Iterable[int]) -> dict[int, Stretch]:
    """The stretch of each lost stage, as its members find it in a settle."""
    lost = {*lost}
    return {stage: find_stretch(lost, stage, 1) for stage in sorted(lost)}


def test_a_loss_beside_a_replay_enlarges_it_and_leaves_others_alone() -> None:
    running = [1, 2, 6]

    assert found([*running, 3]) == dict.fromkeys((1, 2, 3), stretch(1, 3)) | {6: stretch(6, 6)}
    assert found([*running, 9]) == found(running) | {9: stretch(9, 9)}


def test_a_loss_between_two_replays_joins_them() -> None:
    assert found([1, 2, 4, 5, 3]) == dict.fromkeys(range(1, 6), stretch(1, 5))


def test_a_stage_is_lost_with_one_of_its_ranks() -> None:
    assert find_stretch([2, 5], 3, 2) == stretch(1, 2)
    assert find_stretch([], 3, 2) == stretch(1, 1)


def test_stretches_hold_each_lost_stage_once_and_a_further_loss_changes_those_that_it_touches() -> (
    None
):
    rng = random.Random(1)
    for _ in range(2000):
        lost = {rng.randrange(12) for _ in range(rng.randint(0, 8))}
        more = {rng.randrange(12) for _ in range(rng.randint(0, 4))}
        running = find_stretches(lost)
        assert [stage for one in running for stage in one.stages] == sorted(lost)
        stages = {stage for one in running for stage in (one.first - 1, one.last + 1)}
        assert stages.isdisjoint(lost)
        assert {*found(lost).values()} == {*running}

        now = found(lost | more)

        for one in running:
            around = range(one.first - 1, one.last + 2)
            is_touched = not (more - {*one.stages}).isdisjoint(around)
            assert (now[one.first] != one) == is_touched
            assert all(now[stage] == now[one.first] for stage in one.stages)
