"""Histories of forks: the learning rates that they raise, their digests, and what is told."""

from __future__ import annotations

from tests.core.rank.forks.pipelines import fork

from mainstay_core.rank.forks import histories
from mainstay_core.wire.reinitialisation import MAX_TOLD_FORKS, Fork, Reinitialisation


def test_the_learning_rate_of_what_was_made_is_raised_from_then_on() -> None:
    history = (fork(8, "x"), fork(20, "x", "y"))

    assert [histories.boosts_of(history, step, 0).get("x", 1.0) for step in (7, 8, 19, 20, 99)] == [
        1.0,
        1.1,
        1.1,
        1.1,
        1.1,
    ], "a second loss sets it again, and does not compound"
    of_y = [histories.boosts_of(history, step, 0).get("y", 1.0) for step in (8, 19, 20)]
    assert of_y == [1.0, 1.0, 1.1]
    assert "z" not in histories.boosts_of(history, 99, 0)


def test_an_inner_rank_that_was_not_made_anew_learns_as_before() -> None:
    history = (fork(8, "x", inner=1),)

    assert [histories.boosts_of(history, 9, inner) for inner in (0, 1)] == [{}, {"x": 1.1}]


def test_a_boost_may_last_for_some_steps() -> None:
    history = (fork(8, "x", steps=3), fork(20, "x", steps=3))

    boosts = [histories.boosts_of(history, step, 0).get("x", 1.0) for step in range(30)]
    assert [step for step, boost in enumerate(boosts) if boost > 1] == [8, 9, 10, 20, 21, 22]


def test_a_steps_outcome_depends_on_the_forks_up_to_its_version() -> None:
    history = (fork(8, "x"), fork(20, "x"))

    assert histories.digest_of(()) == ""
    assert histories.history_at(history, 7) == ()
    assert histories.history_at(history, 8) == history[:1]
    assert histories.digest_of(history[:1]) != histories.digest_of(history)
    assert histories.digest_of((*history[:1], *history[1:])) == histories.digest_of(history)


def test_a_long_history_is_told_by_its_newest_forks() -> None:
    made = Reinitialisation(positions=(), reason="")
    history = tuple(Fork(version=v, chain=str(v), made=made) for v in range(3, 40))
    told = histories.tell_history(history, made=False)
    assert told is not None
    assert (told.since, told.num_forks, told.newest) == (3, 37, history[-MAX_TOLD_FORKS:])
    assert histories.tell_history((), made=False) is None
