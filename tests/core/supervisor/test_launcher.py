"""A launcher's decisions: what it reports, whom it signals, and when it ends."""

from __future__ import annotations

from mainstay_core.base.ids import Incarnation
from mainstay_core.supervisor.events import Exited, Forked
from mainstay_core.supervisor.launcher import (
    EXIT_SUPERVISOR_GONE,
    Action,
    End,
    EndAsked,
    Event,
    ForkAsked,
    ForkChild,
    LauncherState,
    Report,
    ReportLeaving,
    SignalAsked,
    SignalChild,
    StopAsked,
    SupervisorLost,
    step,
)

A, B = Incarnation("a-0"), Incarnation("b-1")


def run(*events: Event) -> tuple[LauncherState, tuple[Action, ...]]:
    """The state after the events, and the actions of the last one."""
    state, actions = LauncherState(), ()
    for event in events:
        done = step(state, event)
        state, actions = done.state, done.actions
    return state, actions


def test_every_trainer_is_reported_when_it_is_forked_and_when_it_is_reaped() -> None:
    forked, ended = Forked(0, A, 77), Exited(0, A, None, 9)
    assert run(ForkAsked(0, A))[1] == (ForkChild(0, A),)
    assert run(ForkAsked(0, A), forked)[1] == (Report(forked, 77),)
    assert run(ForkAsked(0, A), forked, ended)[1] == (Report(ended, 77),)


def test_a_signal_reaches_the_trainer_of_the_slot_only() -> None:
    state, actions = run(Forked(0, A, 77), Forked(1, B, 78), SignalAsked(1, 9))
    assert actions == (SignalChild(state.children[1], 9),)
    assert run(Forked(0, A, 77), SignalAsked(1, 9))[1] == ()


def test_a_launcher_that_is_told_to_stop_ends_with_its_last_trainer() -> None:
    assert run(StopAsked())[1] == (End(0),)
    both = (Forked(0, A, 77), Forked(1, B, 78), StopAsked())
    assert run(*both)[1] == ()
    first, second = Exited(0, A, 0, None), Exited(1, B, 0, None)
    assert run(*both, first)[1] == (Report(first, 77),)
    assert run(*both, first, second)[1] == (Report(second, 78), End(0))


def test_a_launcher_ends_with_its_supervisor() -> None:
    assert run(Forked(0, A, 77), SupervisorLost())[1] == (End(EXIT_SUPERVISOR_GONE),)


def test_a_launcher_that_is_told_to_end_itself_has_the_work_handed_over_first() -> None:
    state, actions = run(Forked(0, A, 77), EndAsked())
    assert actions == (ReportLeaving(),)
    assert len(state.children) == 1
