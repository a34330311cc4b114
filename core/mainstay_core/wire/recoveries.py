"""The record of one recovery: what failed, what was done, and how long each stage took."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.wire.plan import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The five times of a recovery, in seconds (design 13.9); None until known."""

    detect_s: float | None = None
    """Death to the first fact at the api."""
    decide_s: float | None = None
    """First fact to the plan being durable."""
    fence_s: float | None = None
    """Plan to the last survivor holding all settle reports."""
    load_s: float | None = None
    """From there to state and table ready on every survivor."""
    resume_s: float | None = None
    """From there to the next commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was done about one fault."""

    fault: str
    """What happened, with rank and slot named."""
    method: Method
    exact: bool
    reason: str
    quorum: QuorumId
    from_step: int
    """Step that was interrupted."""
    slots: tuple[Slot, ...] = ()
    started_at_s: float = 0.0
    times: StageTimes = StageTimes()
    first_commit_after_s: float | None = None
    lost_steps: int = 0
    redone_steps: int = 0
    done: bool = False
