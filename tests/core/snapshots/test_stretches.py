"""Stretches: lost neighbours replay together, and a later loss enlarges only what it touches."""

from __future__ import annotations

import random

from mainstay_core.snapshots.stretches import Cascade, Stretch, find_stretches, note_loss


def stretch(first: int, last: int) -> Stretch:
    return Stretch(first=first, last=last)


def test_neighbouring_stages_are_one_segment() -> None:
    assert find_stretches([4, 1, 2, 7, 2]) == (stretch(1, 2), stretch(4, 4), stretch(7, 7))
    assert find_stretches([]) == ()
    assert [str(one) for one in find_stretches([1, 2, 4])] == ["stages 1 to 2", "stage 4"]


def test_a_loss_beside_a_replay_enlarges_it_and_leaves_others_alone() -> None:
    running = [stretch(1, 2), stretch(6, 6)]

    assert note_loss(running, [3]) == Cascade(going_on=(stretch(6, 6),), begun=(stretch(1, 3),))
    assert note_loss(running, [9]) == Cascade(going_on=tuple(running), begun=(stretch(9, 9),))


def test_a_loss_inside_a_replay_starts_it_again() -> None:
    assert note_loss([stretch(1, 2)], [2]) == Cascade(going_on=(), begun=(stretch(1, 2),))


def test_a_loss_between_two_replays_joins_them() -> None:
    cascade = note_loss([stretch(1, 2), stretch(4, 5)], [3])

    assert cascade == Cascade(going_on=(), begun=(stretch(1, 5),))


def test_segments_hold_each_lost_stage_once_and_never_touch() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        lost = {rng.randrange(12) for _ in range(rng.randint(0, 8))}
        more = {rng.randrange(12) for _ in range(rng.randint(0, 4))}
        running = find_stretches(lost)
        assert [stage for one in running for stage in one.stages] == sorted(lost)
        stages = {stage for one in running for stage in (one.first - 1, one.last + 1)}
        assert stages.isdisjoint(lost)

        cascade = note_loss(running, more)

        now = sorted([*cascade.going_on, *cascade.begun])
        assert tuple(now) == find_stretches(lost | more)
        for one in cascade.going_on:
            assert one in running
            assert more.isdisjoint(range(one.first - 1, one.last + 2))
        touched = [
            one for one in running if not more.isdisjoint(range(one.first - 1, one.last + 2))
        ]
        assert set(cascade.going_on) == set(running) - set(touched)
