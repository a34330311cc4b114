"""Defines what an injected fault is and where it fires. Runs, tests and simulations share it.

A fault names a rank in the quorum in force when it fires (design 13.8), so the same file means the
same thing in a real run, a test and a simulation. Values decide when it fires: a step and an action
of the program, and what the plan in force says of the faults before it (:class:`View`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mainstay_core.base.bounds import Count, Finite, Index, Name, Seconds
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import RankId
from mainstay_core.dmr.flips import Flip


class FaultAction(enum.StrEnum):
    """The kinds of damage that a fault does to its target."""

    KILL_TRAINER = "kill-trainer"
    KILL_POD = "kill-pod"
    STOP = "stop"
    """SIGSTOP. With a duration the trainer goes on afterwards, as a stale rank."""
    SLOW = "slow"
    DISCONNECT = "disconnect"
    """The pod's network is cut for a while."""
    KILL = "kill"
    """End a process of the control plane, which is then started again."""
    FLUSH = "flush"
    """Empty Redis."""
    FLIP = "flip"
    """Put a wrong bit into what an operator has computed. No process is harmed."""


RANK_ACTIONS = (
    FaultAction.KILL_TRAINER,
    FaultAction.KILL_POD,
    FaultAction.STOP,
    FaultAction.SLOW,
    FaultAction.DISCONNECT,
    FaultAction.FLIP,
)
OWN_ACTIONS = (FaultAction.SLOW, FaultAction.FLIP)
"""Faults that a trainer carries out itself: it goes on, and its process is harmed by nobody."""
SPARE_ACTIONS = tuple(action for action in RANK_ACTIONS if action not in OWN_ACTIONS)
PROCESS_ACTIONS: dict[str, tuple[FaultAction, ...]] = {
    "api": (FaultAction.KILL, FaultAction.STOP),
    "redis": (FaultAction.KILL, FaultAction.STOP, FaultAction.FLUSH),
}
"""Processes of the control plane that can be targets, and what can be done to each."""

PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("FORWARD",),
    "backward": ("BACKWARD_INPUT", "BACKWARD_WEIGHT"),
    "reduce": ("REDUCE",),
    "vote": ("VOTE",),
    "apply": ("APPLY",),
    "checkpoint": ("CHECKPOINT",),
    "checkpoint-write": ("CHECKPOINT_WRITE",),
    "checkpoint-sync": ("CHECKPOINT_SYNC",),
    "checkpoint-safe": ("CHECKPOINT_SAFE",),
    "checkpoint-rename": ("CHECKPOINT_RENAME",),
    "checkpoint-renamed": ("CHECKPOINT_RENAMED",),
    "snapshot": ("SNAPSHOT",),
    "snapshot-copied": ("SNAPSHOT_COPIED",),
    "snapshot-held": ("SNAPSHOT_HELD",),
    "log": ("LOG",),
    "logged": ("LOGGED",),
    "replay": ("REPLAY",),
    "replay-read": ("READ_F", "READ_B"),
    "replay-write": ("WRITE_F", "WRITE_B"),
    "replayed": ("REPLAYED",),
    "settle": ("SETTLE",),
    "heal": ("HEAL",),
    "heal-source": ("SERVE",),
    "inner-wait": ("INNER_WAIT",),
}
"""Aliases of program actions; the action names themselves are accepted as well."""

SENDS_ON = ("SEND_F", "RECV_B")
"""Transfers with the next stage. The last stage has none."""
SENDS_BACK = ("RECV_F", "SEND_B")
"""Transfers with the stage before. The first stage has none."""
OF_CELLS = ("INNER_WAIT",)
"""Actions inside of another one, that only a rank of several to a stage comes to."""
OUTSIDE_STEPS = ("SETTLE", "SERVE", "SNAPSHOT_COPIED", "SNAPSHOT_HELD", *OF_CELLS)
"""Actions of a rank that its program does not begin with, as they are between steps, beside them,
or inside of another action. A fault without a phase does not mean these."""
OF_SNAPSHOTS = (
    "SNAPSHOT",
    "SNAPSHOT_COPIED",
    "SNAPSHOT_HELD",
    "LOG",
    "LOGGED",
    "REPLAY",
    "READ_F",
    "READ_B",
    "WRITE_F",
    "WRITE_B",
    "REPLAYED",
)
"""Actions that only a job with snapshots has."""
COMPUTE = ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "APPLY")
"""Actions that wait for nobody. A slow rank is slow in these."""


class During(enum.StrEnum):
    """A part of the recovery from another fault."""

    SETTLE = "settle"
    """The target tells the others what it holds."""
    MASK = "mask"
    """The target goes on with the interrupted step, in a quorum without what was lost."""
    REPLAY = "replay"
    """The target is about to make its state anew from snapshots."""
    HEAL = "heal"
    """The target is about to copy its state from another cell."""
    HEAL_SOURCE = "heal-source"
    """The target is in the middle of giving its state to another cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The plan in force, as a process sees it that asks whether a fault is due."""

    fired: tuple[str, ...] = ()
    """Faults that had fired when the plan was made."""
    over: tuple[str, ...] = ()
    """Faults that fired and interrupt nobody any more: :data:`STEPS_TO_BE_OVER` have passed."""
    planned: bool = True
    """Whether nobody had failed when the plan was made."""
    whole: bool = True
    """Whether every wanted replica has its chain."""


ORDINARY = View()
STEPS_TO_BE_OVER = 2
"""Steps after which a fault is over. A step needs every member's vote, so by then a loss was
noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPoint:
    """One fault of a faults file, resolved to values.

    Invariant: exactly one of (``replica`` and ``stage``), ``spare`` and ``process`` is set; at most
    one of ``during`` and ``after`` is.
    """

    id: Name
    step: Count
    action: FaultAction
    phase: Name | None = None
    """Alias or action name; None: the step's first action."""
    delay_ms: Finite = 0.0
    """Delay from the named action in milliseconds; 0 halts the rank exactly there."""
    replica: Index | None = None
    stage: Index | None = None
    inner: Index = 0
    spare: Index | None = None
    process: Name | None = None
    """``api`` or ``redis``. The process that started it carries the fault out."""
    soon: bool = False
    """Whether a later step than ``step`` will do: the first one that comes to the action."""
    during: During | None = None
    of: Name | None = None
    """The fault to whose recovery ``during`` refers."""
    after: Name | None = None
    """A fault; this one fires once the job has all its replicas again after it, in ``step`` or
    later."""
    beside: Name | None = None
    """A fault; this one fires in the same step or, if it is late, during the recovery from it."""
    for_s: Seconds | None = None
    """How long a stop or a disconnect lasts, in seconds; None: for ever."""
    slow_ms: Finite = 0.0
    """How much longer each computing action of a slow rank takes."""
    factor: Finite = 1.0
    """How many times as long each computing action of a slow rank takes."""
    num_steps: Count = 1
    """Number of steps for which a rank is slow."""
    flip: Flip | None = field(default=None, metadata=OMITTED)
    """The wrong bit; of the action ``flip`` alone."""

    def matches(self, step: int, rank: RankId, op: str, view: View = ORDINARY) -> bool:
        """Return whether the fault fires at this action of this rank."""
        if self.replica is None:
            return False
        if (self.replica, self.stage, self.inner) != (rank.replica, rank.stage, rank.inner):
            return False
        return self._is_place(op) and self.is_due(step, view)

    def is_due(self, step: int, view: View) -> bool:
        """Return whether it is time for the fault, wherever its target is."""
        if self.during is not None:
            interrupted = not view.planned or self.during is not During.MASK
            return self.of in view.fired and interrupted
        if self.beside is not None and self.beside in (*view.fired, *view.over):
            return True
        if self.after is not None:
            past = self.after in (*view.fired, *view.over)
            return past and view.whole and step >= self.step
        # A target without a program is watched from outside, which may miss a step.
        later_will_do = self.soon or self.replica is None
        return step == self.step or (later_will_do and step > self.step)

    def _is_place(self, op: str) -> bool:
        if self.action is FaultAction.FLIP:
            # It is put in later, by its phase. That may begin before its action does: the sums of
            # a reduction are under way while the last type is computed.
            return op not in OUTSIDE_STEPS
        if self.phase is not None:
            return op in PHASES.get(self.phase, (self.phase,))
        if self.during is None or self.during is During.MASK:
            return op not in OUTSIDE_STEPS
        return op in PHASES[self.during.value]
