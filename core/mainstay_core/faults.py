"""The shared fault language: what an injected fault is, and where it fires.

A fault names a rank in the quorum in force when it fires (design 13.8), so the
same file means the same thing in a real run, a test and a simulation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mainstay_core.ids import RankId


class FaultAction(enum.StrEnum):
    """What is done to the target."""

    KILL_TRAINER = "kill-trainer"
    KILL_POD = "kill-pod"
    STOP = "stop"
    SLOW = "slow"


PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("FORWARD",),
    "backward": ("BACKWARD_INPUT", "BACKWARD_WEIGHT"),
    "reduce": ("REDUCE",),
    "vote": ("VOTE",),
    "apply": ("APPLY",),
    "checkpoint": ("CHECKPOINT",),
    "heal": ("HEAL",),
}
"""Aliases of program actions; the action names themselves are accepted as well."""

SENDS_ON = ("SEND_F", "RECV_B")
"""Transfers with the next stage: the last stage has none."""
SENDS_BACK = ("RECV_F", "SEND_B")
"""Transfers with the stage before: the first stage has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPoint:
    """One fault of a faults file, resolved to values."""

    id: str
    step: int
    action: FaultAction
    phase: str | None = None
    """Alias or action name; None fires at the step's first action."""
    delay_ms: float = 0.0
    """Counts from the named action; 0 halts the rank exactly there."""
    replica: int | None = None
    stage: int | None = None
    inner: int = 0
    spare: int | None = None

    def matches(self, step: int, rank: RankId, op: str) -> bool:
        """Return whether the fault fires at this action of this rank."""
        if self.step != step or self.replica is None:
            return False
        if (self.replica, self.stage, self.inner) != (rank.replica, rank.stage, rank.inner):
            return False
        if self.phase is None:
            return True
        return op in PHASES.get(self.phase, (self.phase,))
