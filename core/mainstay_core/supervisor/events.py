"""What a supervisor's decisions depend on, what happens to it, and what its shell is told to do.

The transitions are in :mod:`mainstay_core.supervisor.machine`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.wire.facts import (
    Fact,
    Failed,
    Finished,
    Leaving,
    Parked,
    Paused,
    RankFact,
    SlotStatus,
    TrainerDown,
    TrainerUp,
)
from mainstay_core.wire.plan import Plan

EXIT_FINISHED = 0
EXIT_USER_ERROR = 10
SIGKILL = 9


class SlotPhase(enum.StrEnum):
    """Where a slot's trainer is in its life."""

    DOWN = "down"
    FORKING = "forking"
    UP = "up"
    ENDING = "ending"
    """Its socket has ended, its process is not reaped yet."""
    BACKOFF = "backoff"
    GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLimits:
    """How patient a supervisor is. All times in seconds."""

    max_restarts: int = 10
    """Restarts of one slot without a commit in between; then something is wrong that
    restarting does not mend."""
    hang_s: float = 300.0
    """No progress while running for this long: killed."""
    silence_s: float = 15.0
    """No sign of life at all (stopped, or a call that never lets another thread run) for this
    long: killed. A trainer's own thread tells its status every second, whatever it computes."""
    backoff_s: float = 0.25
    """Delay of the second restart, doubled by each further one; the first waits for
    nothing, as most ends are single ends."""
    backoff_max_s: float = 10.0
    stop_grace_s: float = 3.0
    """How long trainers may take to end after they were told to; then they are killed."""
    handover_s: float = 30.0
    """How long a pod that is told to end serves on until its work is handed over; 0: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """One slot. ``incarnation`` is the life that ``phase`` speaks of."""

    index: int
    phase: SlotPhase = SlotPhase.DOWN
    incarnation: Incarnation | None = None
    pid: int = 0
    restarts: int = 0
    """Since the last commit."""
    restart_at_s: float = 0.0
    done: bool = False
    """It said that it finished or failed: its end is no reason to fork another."""
    status: SlotStatus | None = None
    alive_at_s: float = 0.0
    """When it last said anything."""
    progress_at_s: float = 0.0
    """When it last moved or was blocked on others."""
    killed_for: str = ""
    """Why we killed it, for the evidence."""
    up: TrainerUp | None = None
    """That this life is there."""
    down: TrainerDown | None = None
    """The newest end that was told."""
    parked: Parked | None = None
    """The quorum it gave up, until a newer plan arrives."""
    final: Finished | Failed | Paused | None = None
    """Its last words, that it finished, failed or pauses: told again to an api that has forgotten
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorState:
    """One pod."""

    pod: PodUid
    settings: SupervisorLimits = field(default_factory=SupervisorLimits)
    slots: tuple[SlotState, ...] = ()
    launcher_up: bool = False
    registered: bool = False
    plan: Plan | None = None
    """Newest plan."""
    leaving: Leaving | None = None
    """That the pod was told to end: it serves on until its work is handed over."""
    leave_by_s: float = 0.0
    leave_acknowledged: bool = False
    """The api knows: no plan made from then on gives this pod a new place."""
    released: bool = False
    """No rank of this pod is needed any more."""
    ending: str = ""
    """Why everything ends; empty while the job runs."""
    exit_code: int = 0
    """Of the supervisor, once all has ended."""
    ending_at_s: float = 0.0
    left: bool = False


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


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """A trainer says where it is."""

    slot: int
    incarnation: Incarnation
    status: SlotStatus


@dataclass(frozen=True, slots=True)
class FactSeen:
    """A trainer has learnt something for the api to know."""

    slot: int
    incarnation: Incarnation
    fact: RankFact


@dataclass(frozen=True, slots=True)
class Committed:
    """A trainer has committed a step: restarts are counted anew."""

    slot: int
    incarnation: Incarnation


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


SlotEvent = Forked | Hello | StatusSeen | FactSeen | Committed | SocketEnded | Exited

# Events of the pod.


@dataclass(frozen=True, slots=True)
class LauncherUp:
    """The launcher has connected."""


@dataclass(frozen=True, slots=True)
class LauncherLost:
    """The launcher's socket has ended, and its trainers with it."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The api knows the pod, for the first time or again; the job's settings are known here."""

    settings: SupervisorLimits


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """A plan came, by whatever way."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended (code 0), or this pod is told to end."""

    why: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """This pod is told to end, and has time to hand its work over."""

    why: str


@dataclass(frozen=True, slots=True)
class LeaveAcknowledged:
    """The api has acknowledged that this pod leaves."""


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    """Time to repeat what must not be lost."""


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
    """Post a fact to the api, at once and until it is acknowledged."""

    fact: Fact


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass a plan on to the trainers of these slots."""

    plan: Plan
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopTrainers:
    """Tell the trainers of these slots that there is nothing left to do."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """End the pod (``Ended``) as soon as nobody meets at its gather server any more."""


@dataclass(frozen=True, slots=True)
class Leave:
    """All trainers have ended: dismiss the launcher and exit with this code."""

    exit_code: int


Action = Fork | Signal | SendFact | Forward | StopTrainers | Release | Leave
