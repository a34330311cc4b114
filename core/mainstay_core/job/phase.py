"""The phases of a job, and which of them are its end."""

from __future__ import annotations

import enum


class JobPhase(enum.StrEnum):
    """The phase of a job, as the api, the status and the command line name it."""

    FORMING = "forming"
    RUNNING = "running"
    RECOVERING = "recovering"
    WAITING = "waiting"
    SUSPENDED = "suspended"
    COMPLETE = "complete"
    FAILED = "failed"
    STOPPED = "stopped"


TERMINAL = frozenset({JobPhase.COMPLETE, JobPhase.FAILED, JobPhase.STOPPED})
"""The phases that a job never leaves."""
