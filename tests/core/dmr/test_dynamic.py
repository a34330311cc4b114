"""The dynamic planner: every operator is checked once, in bounded memory, in the best window."""

from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.dmr.dynamic import (
    CheckDone,
    CheckQueue,
    Completed,
    Event,
    Executed,
    Grown,
    Needed,
    StepEnding,
    WindowClosed,
    WindowOpened,
    step,
)
from mainstay_core.dmr.plan import Method
from mainstay_core.dmr.profiles import WindowKind

INTER, INTRA = WindowKind.INTER, WindowKind.INTRA


def executed(name: str, seconds: float = 1.0, size: int = 1, *, gathers: bool = False) -> Executed:
    return Executed(operator=name, expected_s=seconds, size_bytes=size, communicates=gathers)


def play(budget: int, *events: Event) -> list[list[tuple[str, str]]]:
    """What is checked after each event, with its method."""
    queue, told = CheckQueue(budget_bytes=budget), []
    for event in events:
        decision = step(queue, event)
        queue = decision.queue
        told.append([(check.operator, check.method.value) for check in decision.checks])
    return told


def test_a_window_of_known_length_takes_what_fills_it_best() -> None:
    told = play(
        9,
        executed("a", 4.0),
        executed("b", 3.0),
        executed("c", 2.0),
        WindowOpened(kind=INTRA, length_s=5.0),
        StepEnding(),
    )

    assert told == [[], [], [], [("b", "intra"), ("c", "intra")], [("a", "naive")]]


def test_a_window_of_unknown_length_takes_one_after_the_other_while_it_is_open() -> None:
    told = play(
        9,
        executed("a"),
        executed("b"),
        executed("c"),
        WindowOpened(kind=INTER, length_s=None),
        CheckDone(),
        WindowClosed(),
        StepEnding(),
    )

    assert told[3:] == [[("a", "inter")], [("b", "inter")], [], [("c", "naive")]]


def test_what_is_needed_now_waits_no_longer_and_the_rest_does() -> None:
    told = play(
        9,
        executed("a"),
        executed("b"),
        executed("c"),
        Needed(operators=("c", "gone", "a")),
        WindowOpened(kind=INTER, length_s=None),
    )

    assert told[3:] == [[("a", "naive"), ("c", "naive")], [("b", "inter")]]


def test_near_the_budget_the_most_bytes_for_their_time_are_freed_at_once() -> None:
    told = play(5, executed("a", 2.0, 2), executed("b", 1.0, 3), executed("c", 9.0, 1))

    assert told == [[], [], [("b", "naive")]]


def test_a_full_queue_makes_room_for_several() -> None:
    told = play(80, *(executed(str(number)) for number in range(102)))

    assert [at for at, checks in enumerate(told) if checks] == [80, 91]
    assert [name for name, _ in told[80]] == [str(number) for number in range(11)]


def test_what_may_not_wait_is_checked_at_once() -> None:
    assert play(5, executed("large", size=6)) == [[("large", "naive")]]
    assert play(5, executed("gathers", gathers=True)) == [[("gathers", "naive")]]
    assert play(0, executed("a")) == [[("a", "naive")]]


def grown(name: str, seconds: float = 1.0, size: int = 1) -> Grown:
    return Grown(piece=name, expected_s=seconds, size_bytes=size)


def test_no_window_takes_a_piece_before_it_is_complete() -> None:
    opened, closed = WindowOpened(kind=INTER, length_s=None), WindowClosed()

    told = play(
        9,
        grown("piece"),
        executed("a"),
        opened,
        closed,
        grown("piece", size=3),
        Completed(piece="piece"),
        opened,
        closed,
        StepEnding(),
    )

    assert told[2] == [("a", "inter")]
    assert told[6] == [("piece", "inter")]
    assert [checks for number, checks in enumerate(told) if number not in (2, 6)] == [[]] * 7
    assert play(9, grown("piece"), executed("a"), Needed(operators=("piece",)))[-1] == [
        ("piece", "naive")
    ]
    late = play(9, grown("piece"), Completed(piece="piece"), grown("piece"), opened, closed)
    assert late[3:] == [[("piece", "inter")], []]
    assert play(9, grown("piece"), StepEnding())[-1] == [("piece", "naive")]


def test_a_piece_that_grows_beyond_the_budget_is_replayed_as_far_as_it_is() -> None:
    assert play(3, grown("piece", size=3), grown("piece", size=1)) == [[], [("piece", "naive")]]
    dear = play(5, grown("piece", 9.0, 3), executed("a", 0.5, 2), grown("piece", 9.0, 1))
    assert dear == [[], [], [("a", "naive")]]


def test_the_same_operator_of_two_micro_batches_is_checked_for_each() -> None:
    told = play(1, executed("a"), executed("a"), StepEnding())

    assert told == [[], [("a", "naive")], [("a", "naive")]]


@pytest.mark.parametrize(
    "events",
    [
        [CheckDone()],
        [WindowOpened(kind=INTER, length_s=None), executed("a")],
        [WindowOpened(kind=INTER, length_s=None), WindowOpened(kind=INTER, length_s=1.0)],
        [WindowOpened(kind=INTER, length_s=None), StepEnding()],
    ],
)
def test_an_event_that_does_not_fit_is_refused(events: list[Event]) -> None:
    with pytest.raises(LocalProtocolError):
        play(9, *events)


def test_each_execution_is_checked_once_within_the_budget() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        queue = CheckQueue(budget_bytes=rng.randint(0, 12))
        done: list[str] = []
        names_of_pieces: list[str] = []
        names = [str(number) for number in range(rng.randint(1, 25))]
        for name in names:
            events: list[Event] = [
                executed(
                    name, float(rng.randint(1, 9)), rng.randint(1, 6), gathers=rng.random() < 0.1
                )
            ]
            if rng.random() < 0.3:
                known = rng.random() < 0.5
                length_s = float(rng.randint(0, 20)) if known else None
                events.append(WindowOpened(kind=rng.choice([INTER, INTRA]), length_s=length_s))
                events += [] if known else [CheckDone()] * rng.randint(0, 4)
                events.append(WindowClosed())
            if rng.random() < 0.3:
                piece = f"piece {name}"
                events += [grown(piece, size=rng.randint(1, 4))]
                events += [Completed(piece=piece)] * (rng.random() < 0.5)
                names_of_pieces.append(piece)
            for event in events:
                before = queue
                decision = step(queue, event)
                queue = decision.queue
                done += [check.operator for check in decision.checks]
                assert queue.size_bytes <= queue.budget_bytes
                everything = (*queue.waiting, *queue.growing)
                assert queue.size_bytes == sum(check.size_bytes for check in everything)
                if isinstance(event, WindowOpened) and event.length_s is not None:
                    times = [check.expected_s for check in before.waiting[:8]]
                    chosen = {check.operator for check in decision.checks}
                    taken_s = sum(c.expected_s for c in before.waiting if c.operator in chosen)
                    sums = [
                        sum(some)
                        for size in range(len(times) + 1)
                        for some in itertools.combinations(times, size)
                    ]
                    assert max(s for s in sums if s <= event.length_s) <= taken_s <= event.length_s
        done += [check.operator for check in step(queue, StepEnding()).checks]

        assert sorted(done) == sorted([*names, *names_of_pieces])


def test_checks_at_the_end_of_a_step_are_naive() -> None:
    queue = step(CheckQueue(budget_bytes=9), executed("a")).queue

    (check,) = step(queue, StepEnding()).checks

    assert check.method is Method.NAIVE
