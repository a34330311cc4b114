"""Defines a supervisor's events (what comes in) and actions (what its shell does).

The transitions are in :mod:`mainstay_core.supervisor.machine`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.ids import Incarnation
from mainstay_core.supervisor.state import SupervisorLimits
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import Fact, RankFact, SlotStatus
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Outline

# Events of a slot: each speaks of one incarnation.


@dataclass(frozen=True, slots=True)
class Forked:
    """The launcher has forked a trainer."""

    slot: int
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class Hello:
    """A trainer has connected and is ready for a rank."""

    slot: int
    incarnation: Incarnation
    pid: int
    fingerprint: dict[str, str]
    outline: Outline = ()
    """The blocks of every stage, in a job that may go on approximately."""
    accelerator: str = ""
    """UUID of its accelerator; empty on a CPU."""


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """A trainer reports its status."""

    slot: int
    incarnation: Incarnation
    status: SlotStatus


@dataclass(frozen=True, slots=True)
class FactSeen:
    """A trainer reports a fact for the api."""

    slot: int
    incarnation: Incarnation
    fact: RankFact


@dataclass(frozen=True, slots=True)
class Crashed:
    """A trainer tells the exception that ends its program, before it says hello or after."""

    slot: int
    incarnation: Incarnation
    crash: Crash


@dataclass(frozen=True, slots=True)
class Committed:
    """A trainer has committed a step, or tells again that it has."""

    slot: int
    incarnation: Incarnation
    step: int
    """Number of the step, from 0."""


@dataclass(frozen=True, slots=True)
class SocketEnded:
    """A trainer's socket has ended."""

    slot: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Exited:
    """The launcher has reaped a trainer: a code, or the signal that ended it."""

    slot: int
    incarnation: Incarnation
    code: int | None
    signal: int | None


SlotEvent = Forked | Hello | StatusSeen | FactSeen | Crashed | Committed | SocketEnded | Exited

# Events of the pod.


@dataclass(frozen=True, slots=True)
class LauncherUp:
    """The launcher has connected."""


@dataclass(frozen=True, slots=True)
class LauncherLost:
    """The launcher's socket has ended, and its trainers with it."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The api has registered the pod, for the first time or again.

    The job's settings are known now.
    """

    settings: SupervisorLimits


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """A plan has arrived, from the api or from another supervisor."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended (code 0), or this pod has to end."""

    why: str
    exit_code: int = 0
    handed_over: bool = False
    """Whether this pod leaves, is released, and nobody meets here any more."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """This pod is told to end, and has time to hand its work over."""

    why: str


@dataclass(frozen=True, slots=True)
class LeaveAcknowledged:
    """The api has acknowledged that this pod leaves."""


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    """The time has come to repeat what must not be lost."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


PodEvent = (
    LauncherUp
    | LauncherLost
    | Registered
    | PlanReceived
    | Ended
    | LeaveRequested
    | LeaveAcknowledged
    | HeartbeatDue
    | Tick
)
Event = SlotEvent | PodEvent

# Actions.


@dataclass(frozen=True, slots=True)
class Fork:
    """Have the launcher fork a trainer."""

    slot: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to a slot's trainer."""

    slot: int
    incarnation: Incarnation
    number: int


@dataclass(frozen=True, slots=True)
class SendFact:
    """Post a fact to the api at once, and again until it is acknowledged."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass a plan on to the trainers of these slots."""

    plan: Plan
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopTrainers:
    """Tell the trainers of these slots that nothing is left to do."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """End the pod (``Ended``) as soon as no rank meets at its gather server any more."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Dismiss the launcher and exit with this code: all trainers have ended."""

    exit_code: int


Action = Fork | Signal | SendFact | Forward | StopTrainers | Release | Leave
