"""Segments: lost neighbours replay together, and a later loss enlarges only what it touches."""

from __future__ import annotations

import random

from mainstay_core.snapshots.segments import Cascade, Segment, find_segments, note_loss


def segment(first: int, last: int) -> Segment:
    return Segment(first=first, last=last)


def test_neighbouring_stages_are_one_segment() -> None:
    assert find_segments([4, 1, 2, 7, 2]) == (segment(1, 2), segment(4, 4), segment(7, 7))
    assert find_segments([]) == ()
    assert [str(one) for one in find_segments([1, 2, 4])] == ["stages 1 to 2", "stage 4"]


def test_a_loss_beside_a_replay_enlarges_it_and_leaves_others_alone() -> None:
    running = [segment(1, 2), segment(6, 6)]

    assert note_loss(running, [3]) == Cascade(going_on=(segment(6, 6),), begun=(segment(1, 3),))
    assert note_loss(running, [9]) == Cascade(going_on=tuple(running), begun=(segment(9, 9),))


def test_a_loss_inside_a_replay_starts_it_again() -> None:
    assert note_loss([segment(1, 2)], [2]) == Cascade(going_on=(), begun=(segment(1, 2),))


def test_a_loss_between_two_replays_joins_them() -> None:
    cascade = note_loss([segment(1, 2), segment(4, 5)], [3])

    assert cascade == Cascade(going_on=(), begun=(segment(1, 5),))


def test_segments_hold_each_lost_stage_once_and_never_touch() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        lost = {rng.randrange(12) for _ in range(rng.randint(0, 8))}
        more = {rng.randrange(12) for _ in range(rng.randint(0, 4))}
        running = find_segments(lost)
        assert [stage for one in running for stage in one.stages] == sorted(lost)
        stages = {stage for one in running for stage in (one.first - 1, one.last + 1)}
        assert stages.isdisjoint(lost)

        cascade = note_loss(running, more)

        now = sorted([*cascade.going_on, *cascade.begun])
        assert tuple(now) == find_segments(lost | more)
        for one in cascade.going_on:
            assert one in running
            assert more.isdisjoint(range(one.first - 1, one.last + 2))
        touched = [
            one for one in running if not more.isdisjoint(range(one.first - 1, one.last + 2))
        ]
        assert set(cascade.going_on) == set(running) - set(touched)
