"""What is known of pods: the watch is late, and what it missed a list puts right."""

from __future__ import annotations

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.observed import ObservedPod
from mainstay_operator.pod_cache import PodCache


def pod(index: int) -> ObservedPod:
    return ObservedPod(uid=PodUid(f"u{index}"), name=f"demo-{index}", index=index)


def indexes(cache: PodCache) -> list[int]:
    return sorted(p.index for p in cache.list())


def test_what_was_just_made_counts_before_the_watch_shows_it() -> None:
    shown: list[ObservedPod] = []
    cache = PodCache(lambda: shown)

    cache.note_made([pod(0)])
    assert indexes(cache) == [0]
    shown.append(pod(0))
    assert indexes(cache) == [0]
    shown.clear()
    cache.note_deleted(pod(0))
    assert indexes(cache) == []


def test_a_pod_that_ended_before_the_watch_showed_it_is_forgotten() -> None:
    cache = PodCache(list)
    cache.note_made([pod(0)])

    cache.note_deleted(pod(0))

    assert indexes(cache) == []
    assert list(cache.last_words) == ["u0"]


def test_a_list_removes_what_the_watch_missed_and_adds_what_it_has_not_shown() -> None:
    shown = [pod(0), pod(1)]
    cache = PodCache(lambda: shown)
    known = [p.uid for p in cache.list()]

    assert cache.apply_list([pod(1), pod(2)], known)

    assert indexes(cache) == [1, 2]
    assert not cache.apply_list([pod(1), pod(2)], [p.uid for p in cache.list()])


def test_what_came_after_the_question_may_be_missing_in_the_list() -> None:
    cache = PodCache(lambda: [pod(0)])
    known = [p.uid for p in cache.list()]
    cache.note_made([pod(1)])

    assert not cache.apply_list([pod(0)], known)

    assert indexes(cache) == [0, 1]


def test_a_list_that_shows_a_pod_after_all_is_believed() -> None:
    cache = PodCache(lambda: [pod(0)])
    cache.apply_list([], [PodUid("u0")])
    assert indexes(cache) == []

    cache.apply_list([pod(0)], [PodUid("u0")])

    assert indexes(cache) == [0]
