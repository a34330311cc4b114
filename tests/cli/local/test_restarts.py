"""Whether Redis and the api of a run are started again: values alone."""

from __future__ import annotations

import pytest

from mainstay_cli.local.restarts import RestartMemory, RestartPolicy, plan_restart

POLICY = RestartPolicy()


def live(
    served_s: float, start_s: float, *, serves: bool = True, for_s: float = 86_400.0
) -> tuple[list[float | None], float]:
    """Play a service that always ends; return the pauses, None for the end, and the time then.

    Args:
        served_s: how long it serves each time.
        start_s: how long a start takes.
        serves: whether it ever serves.
        for_s: when the play ends.
    """
    memory, now_s, pauses = RestartMemory(), 0.0, []
    while now_s < for_s:
        now_s += start_s + served_s
        restart = plan_restart(memory, POLICY, served=serves, now_s=now_s)
        memory = restart.memory
        pauses.append(restart.pause_s)
        if restart.pause_s is None:
            break
        now_s += restart.pause_s
    return pauses, now_s


def test_one_end_costs_no_pause_and_further_ones_twice_as_long_each() -> None:
    pauses, _ = live(1.0, 0.2, for_s=60.0)
    assert pauses[:7] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]


@pytest.mark.parametrize("served_s", [3.0, 10.0, 600.0])
@pytest.mark.parametrize("start_s", [0.2, 2.0])
def test_what_is_killed_every_few_seconds_is_kept_for_ever(served_s: float, start_s: float) -> None:
    pauses, _ = live(served_s, start_s)
    assert None not in pauses
    assert len(pauses) > 86_400.0 / (served_s + start_s + POLICY.max_pause_s) - 1


def test_what_ends_at_once_is_given_up_within_the_window() -> None:
    pauses, now_s = live(0.1, 0.2)
    assert pauses[-1] is None
    assert len(pauses) == POLICY.max_restarts + 1
    assert 60.0 < now_s <= POLICY.window_s


@pytest.mark.parametrize("start_s", [0.2, 60.0])
def test_what_never_serves_is_given_up_however_long_its_starts_take(start_s: float) -> None:
    pauses, _ = live(0.0, start_s, serves=False)
    assert pauses[-1] is None
    assert len(pauses) == POLICY.max_failed_starts


def test_one_start_that_serves_ends_a_row_of_failed_ones() -> None:
    memory = RestartMemory(num_failed_starts=POLICY.max_failed_starts - 1)
    served = plan_restart(memory, POLICY, served=True, now_s=1000.0)
    assert served.pause_s == 0.0
    assert served.memory.num_failed_starts == 0
    failed = plan_restart(memory, POLICY, served=False, now_s=1000.0)
    assert failed.pause_s is None
    assert failed.reason == "10 starts in a row failed"


def test_an_end_outside_the_window_is_forgotten() -> None:
    memory = RestartMemory(ended_at_s=tuple(float(n) for n in range(POLICY.max_restarts)))
    within = plan_restart(memory, POLICY, served=True, now_s=POLICY.window_s - 1.0)
    assert (within.pause_s, within.reason) == (None, "31 ends within 300 s")
    later = plan_restart(memory, POLICY, served=True, now_s=POLICY.window_s + 100.0)
    assert later.pause_s == 0.0
    assert later.memory.ended_at_s == (POLICY.window_s + 100.0,)
