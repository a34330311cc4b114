import pytest

from mainstay_cli.views.monitor import MAX_POLL_S, POLL_S, JobState, Pace


def waits(*looks):
    """The seconds to the next look after each of (time, step, recovering)."""
    pace, found = Pace(), [Pace().wait_s]
    for now_s, step, recovering in looks:
        pace.see(JobState(state="Running", reason="", step=step, recovering=recovering), now_s)
        found.append(pace.wait_s)
    return found[-1]


@pytest.mark.parametrize(
    ("step_s", "expected"), [(0.02, POLL_S), (0.5, 0.5), (0.9, 0.9), (30.0, MAX_POLL_S)]
)
def test_a_job_is_looked_at_about_once_a_step_within_bounds(step_s, expected):
    looks = [(100 + number * step_s, number, False) for number in range(5)]
    assert waits(*looks) == pytest.approx(expected)


def test_time_to_the_first_step_is_no_step():
    assert waits((0.0, 0, False), (60.0, 1, False)) == POLL_S


def test_what_several_steps_took_is_divided_by_their_number():
    assert waits((0.0, 4, False), (1.2, 6, False)) == pytest.approx(0.6)


def test_a_job_that_was_watched_for_long_is_looked_at_less_often():
    steps = [(number * 0.3, number, False) for number in range(1, 101)]
    assert waits(*steps[:10]) == pytest.approx(0.3)
    assert waits(*steps[:41]) == pytest.approx(0.6)
    assert waits(*steps) == MAX_POLL_S
    assert waits(*steps, (31.0, 101, True)) == pytest.approx(1.0)  # that step took a second
    assert waits(*steps, (30.3, 101, True)) == pytest.approx(0.3)
    assert waits(*steps, (31.0, 100, False)) == MAX_POLL_S


@pytest.mark.parametrize("step", [101, 100, 1])
@pytest.mark.parametrize("step_s", [0.05, 0.3])
def test_recoveries_and_restarts_are_looked_at_about_once_a_step(step_s, step):
    """Not more often: a recovery needs the processors that a look would take."""
    looks = [(number * step_s, number, False) for number in range(1, 101)]
    last = (101 * step_s, step, step > 1)
    assert waits(*looks, last) == pytest.approx(max(POLL_S, step_s))
