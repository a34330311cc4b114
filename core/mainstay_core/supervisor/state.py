"""Defines the state of a pod's supervisor: its slots, its limits, and how it ends.

The transitions are in :mod:`mainstay_core.supervisor.machine`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mainstay_core.base.ids import Incarnation, PodUid, QuorumId
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import (
    Adopted,
    Failed,
    Finished,
    Leaving,
    Named,
    Parked,
    Paused,
    Settled,
    SlotStatus,
    TrainerDown,
    TrainerUp,
)
from mainstay_core.wire.plan import Plan

EXIT_FINISHED = 0
EXIT_USER_ERROR = 10
SIGKILL = 9
MAX_NAMED = 16
"""Named devices that a pod remembers; the oldest go first."""
LATER_S = 0.1
"""How long a fact waits that another one, or a plan, makes needless as a rule: all of a quorum tell
such facts at once, each with a request of its own, just when the job recovers and needs the
processors. How a quorum ended does not wait where perhaps nobody else tells it. It is less than
half of ``JobConfig.probe_s``, the time that the api leaves them."""
GOES_ON_S = 1.0
"""How long it waits at most that a member goes on after a loss, and with it that it has adopted the
plan. Both are told before its next fact, that of the first step as a rule: all of a quorum go on at
once, and every request takes from the processors, which compute that step."""
TELLERS = 2
"""Members of a position that tell at once that its reduction has ended: the first ones. The lost
member may be one of them."""
STEPS_THAT_PROVE = 2
"""Steps above all former ones after which a life's program counts as working. In the first step
after it has joined it computes nothing, so one proves nothing. Steps that a restart of the job does
again prove nothing either: they worked before as well."""


class SlotPhase(enum.StrEnum):
    """The phase of a slot: where its trainer is in its life."""

    DOWN = "down"
    FORKING = "forking"
    UP = "up"
    ENDING = "ending"
    """Its socket has ended, but its process is not reaped yet."""
    BACKOFF = "backoff"
    GIVEN_UP = "given-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLimits:
    """The times that a supervisor waits before it acts, in seconds."""

    max_restarts: int = 10
    """Restarts of one slot until its program works again. More than these cannot mend what is
    wrong."""
    hang_s: float = 300.0
    """A running trainer without progress for so long is killed."""
    silence_s: float = 15.0
    """A trainer that gives no sign of life for so long is killed: it is stopped, or a call
    never lets another thread run. Its own thread reports its status every second, whatever it
    computes."""
    backoff_s: float = 0.25
    """Delay of the second restart. Each further restart doubles it. The first one waits for
    nothing, as most ends are single ends."""
    backoff_max_s: float = 10.0
    stop_grace_s: float = 3.0
    """How long trainers may take to end when told to. Then they are killed."""
    handover_s: float = 30.0
    """How long a pod that is told to end serves until its work is handed over; 0: it ends at
    once."""


SECOND_LOOK = 3
"""A trainer is killed only a while after its supervisor has seen that a sign or progress is missed:
one part in so many of how long it may lack. It reports its status with each heartbeat, so a third
of the silence has at least one sign. One action may take long without progress, so that has a third
of its own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """One slot and its trainer. ``incarnation`` is the life that ``phase`` describes."""

    index: int
    phase: SlotPhase = SlotPhase.DOWN
    incarnation: Incarnation | None = None
    pid: int = 0
    restarts: int = 0
    """Restarts since its program was last seen to work."""
    newest_step: int = -1
    """Newest step that any life on this slot has committed; -1 without one."""
    new_steps: int = 0
    """Steps above all former ones that this life has committed."""
    restart_at_s: float = 0.0
    status: SlotStatus | None = None
    alive_at_s: float = 0.0
    """When it last said anything."""
    progress_at_s: float = 0.0
    """When it last made progress or was blocked on others."""
    missed_at_s: float | None = None
    """When a look found that a sign of life is missed. A later sign makes it void."""
    stalled_at_s: float | None = None
    """When a look found that progress is missed. Later progress makes it void."""
    killed_for: str = ""
    """Why the supervisor killed it, for the evidence."""
    lost_at_s: float = 0.0
    """When a killed trainer gave the last sign for whose lack it was killed; 0: nothing lacked."""
    crash: Crash | None = None
    """The exception that ends its program, as it has told."""
    up: TrainerUp | None = None
    """The fact that this life is up."""
    down: TrainerDown | None = None
    """The newest fact about an end."""
    parked: Parked | None = None
    """The fact that it gave up its quorum, until a newer plan arrives."""
    later: tuple[Adopted | Parked | Settled, ...] = ()
    """Facts that are told a little later: with the trainer's next one, or when they are due."""
    later_due_s: float = 0.0
    final: Finished | Failed | Paused | None = None
    """Its last words: that it finished, failed or pauses. They are repeated to an api that has lost
    them. That a former life finished is kept until this one has last words of its own: it says what
    the final state is, whoever computes it again."""

    @property
    def has_failed(self) -> bool:
        """Whether the trainer has said that it cannot go on: another one would say the same."""
        return isinstance(self.final, Failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorState:
    """Everything on which the decisions of a pod's supervisor depend."""

    pod: PodUid
    settings: SupervisorLimits = field(default_factory=SupervisorLimits)
    slots: tuple[SlotState, ...] = ()
    launcher_up: bool = False
    registered: bool = False
    plan: Plan | None = None
    """Newest plan."""
    named: tuple[Named, ...] = ()
    """The last word that its trainers have had of each device that computes wrongly each time. It
    is repeated to an api that has lost it, whatever has become of the trainer that told it."""
    met: QuorumId | None = None
    """The newest quorum in which a trainer of this pod has met all members: all their supervisors
    have its plan."""
    leaving: Leaving | None = None
    """Why the pod was told to end. It serves until its work is handed over."""
    leave_by_s: float = 0.0
    leave_acknowledged: bool = False
    """Whether the api knows that the pod leaves. No plan made from then on gives the pod a new
    place."""
    released: bool = False
    """Whether no rank of this pod is needed any more."""
    handed_over: bool = False
    """Whether nobody meets here either: the pod ends in good order."""
    ending: str = ""
    """Why everything ends; empty while the job runs."""
    exit_code: int = 0
    """The supervisor's exit code, once all trainers have ended."""
    ending_at_s: float = 0.0
    left: bool = False
