"""Decides whether Redis or the api of a run is started again, and after how long.

A run may last for days, so what counts is how often a service ended within a window, not in the
whole run. Training goes on meanwhile: patience costs little, and whatever is wrong (as a full disk)
can be mended while the run lives. What never serves is given up sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.backoff import doubled_s
from mainstay_core.base.words import count


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The bounds on restarts of one service."""

    max_restarts: int = 30
    """Restarts within the window. At the longest pause, what ends a second after its start is over
    the bound within the window, and what serves for three seconds each time is not."""
    window_s: float = 300.0
    max_failed_starts: int = 10
    """Starts in a row after which it ended before it served: with the pauses, about a minute."""
    pause_s: float = 0.5
    """Before the second restart. Each further one within the window doubles it. The first one waits
    for nothing, as most ends are single ends."""
    max_pause_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartMemory:
    """The ends of one service that are remembered."""

    ended_at_s: tuple[float, ...] = ()
    """Those within the window, oldest first; a clock that never jumps."""
    num_failed_starts: int = 0
    """In a row, the newest included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The decision on a service that has ended."""

    pause_s: float | None
    """Before the service is started again; None: it is given up."""
    memory: RestartMemory
    reason: str
    """How often it has ended."""


def plan_restart(
    memory: RestartMemory, policy: RestartPolicy, *, served: bool, now_s: float
) -> Restart:
    """Return what to do about a service that has just ended.

    Args:
        memory: of the ends before.
        policy: the bounds.
        served: whether it answered between its start and this end.
        now_s: a clock that never jumps.
    """
    recent = (*(at_s for at_s in memory.ended_at_s if at_s > now_s - policy.window_s), now_s)
    num_failed = 0 if served else memory.num_failed_starts + 1
    # One more is kept than the bound, so the memory is bounded as well.
    memory = RestartMemory(
        ended_at_s=recent[-policy.max_restarts - 1 :], num_failed_starts=num_failed
    )
    if num_failed >= policy.max_failed_starts:
        reason = f"{count(num_failed, 'start')} in a row failed"
        return Restart(pause_s=None, memory=memory, reason=reason)
    reason = f"{count(len(recent), 'end')} within {policy.window_s:g} s"
    if len(recent) > policy.max_restarts:
        return Restart(pause_s=None, memory=memory, reason=reason)
    num_before = max(len(recent), num_failed) - 1
    pause_s = doubled_s(policy.pause_s, num_before - 1, policy.max_pause_s) if num_before else 0.0
    return Restart(pause_s=pause_s, memory=memory, reason=reason)
