"""A launcher's decisions: which trainers it forks, signals and reports, and when it ends.

A launcher is the warm parent of a pod's trainers. It does what its supervisor says and
decides nothing about the job. ``step(state, event)`` returns the new state, actions for the
shell and a reason.

Invariants: every child that was forked is reported once as forked, and once as ended when it
is reaped; the launcher ends with its supervisor, and all its children with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mainstay_core.base.ids import Incarnation
from mainstay_core.supervisor.events import Exited, Forked

EXIT_SUPERVISOR_GONE = 4


@dataclass(frozen=True, slots=True)
class Child:
    """A trainer that was forked and is not reaped yet."""

    slot: int
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class LauncherState:
    """The state of one launcher."""

    children: tuple[Child, ...] = ()
    stopping: bool = False
    """The supervisor has said that nothing is left to do."""


# Events ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkAsked:
    """The supervisor wants a trainer."""

    slot: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SignalAsked:
    """The supervisor wants a signal sent to the trainer of a slot."""

    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The supervisor leaves: the launcher ends once its trainers have."""


@dataclass(frozen=True, slots=True)
class SupervisorLost:
    """The supervisor's socket has ended."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The launcher itself is told to end (SIGTERM)."""


Event = ForkAsked | Forked | SignalAsked | Exited | StopAsked | SupervisorLost | EndAsked
"""What happens to a launcher; Forked and Exited are the outcomes of what its shell did."""


# Actions -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForkChild:
    """Fork a trainer: Forked."""

    slot: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SignalChild:
    """Send a signal to one trainer."""

    child: Child
    number: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the supervisor what became of a trainer."""

    what: Forked | Exited
    pid: int


@dataclass(frozen=True, slots=True)
class ReportLeaving:
    """Tell the supervisor that the pod is told to end: it hands the work over first."""


@dataclass(frozen=True, slots=True)
class End:
    """Kill whatever child is left, and exit with this code."""

    exit_code: int


Action = ForkChild | SignalChild | Report | ReportLeaving | End


@dataclass(frozen=True, slots=True)
class Transition:
    """Outcome of one event."""

    state: LauncherState
    actions: tuple[Action, ...] = ()
    reason: str = ""


def step(state: LauncherState, event: Event) -> Transition:
    """Return what a launcher does after ``event``."""
    match event:
        case ForkAsked(slot=slot, incarnation=incarnation):
            return Transition(state, (ForkChild(slot, incarnation),))
        case Forked():
            child = Child(event.slot, event.incarnation, event.pid)
            told = Report(event, event.pid)
            return Transition(replace(state, children=(*state.children, child)), (told,))
        case SignalAsked(slot=slot, number=number):
            hit = [child for child in state.children if child.slot == slot]
            return Transition(state, tuple(SignalChild(child, number) for child in hit))
        case Exited():
            ended = next(c for c in state.children if c.incarnation == event.incarnation)
            left = tuple(c for c in state.children if c is not ended)
            return _unless_done(replace(state, children=left), Report(event, ended.pid))
        case StopAsked():
            return _unless_done(replace(state, stopping=True))
        case SupervisorLost():
            why = "the supervisor is gone; this pod's trainers end"
            return Transition(state, (End(EXIT_SUPERVISOR_GONE),), why)
        case EndAsked():
            return Transition(state, (ReportLeaving(),))


def _unless_done(state: LauncherState, *actions: Action) -> Transition:
    """Return the transition with the launcher's end, if it was told to stop and has no child."""
    if state.stopping and not state.children:
        return Transition(state, (*actions, End(0)), "nothing is left to do")
    return Transition(state, actions)
