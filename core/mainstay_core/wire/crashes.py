"""Defines a crash: the exception that ended a trainer's program, as it travels and is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Count, Instant, Longest, Name, cut
from mainstay_core.base.ids import QuorumId, RankId
from mainstay_core.base.words import first_line

MAX_FRAMES = 5
"""Frames of a crash: enough to find the line, few enough for a status."""
MAX_FRAME = 300
MAX_TYPE = 256
MAX_MESSAGE = 2048
"""With the bounds above a crash fits into the first frame of a trainer that said no hello yet."""
MAX_LINE = 300
"""Characters of the message in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """An exception that ended a trainer's program."""

    type: Name
    """Name of its class."""
    message: Annotated[str, Longest(MAX_MESSAGE)] = ""
    """Its text. Of a long one the beginning and the end are here."""
    frames: Annotated[tuple[Name, ...], Longest(MAX_FRAMES)] = ()
    """Last frames of the user's code, innermost last, each as ``file:line in function``. If none
    was the user's, the frame that raised it."""
    rank: RankId | None = None
    """Rank of the trainer; None before it had one."""
    quorum: QuorumId | None = None
    """The quorum in which it had that rank."""
    step: Count | None = None
    """The step that was tried, counted from 0; None before the trainer had a rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", cut(self.type, MAX_TYPE))
        object.__setattr__(self, "message", cut(self.message, MAX_MESSAGE))
        object.__setattr__(self, "frames", tuple(cut(f, MAX_FRAME) for f in self.frames))

    def is_like(self, other: Crash) -> bool:
        """Return whether this is the same failure as another one.

        It is if the same class of exception left the same lines at the same step. Messages are for
        people, and may differ: they name addresses and sizes.
        """
        mine = (self.type, self.step, self.frames)
        return mine == (other.type, other.step, other.frames)

    def describe(self) -> str:
        """Return the crash in one line: class, message, rank, step and innermost frame."""
        line = cut(first_line(self.message), MAX_LINE)
        return self.place(f"{self.type}: {line}" if line else self.type)

    def place(self, said: str) -> str:
        """Return a sentence about the crash with rank, step and innermost frame added."""
        where = [str(self.rank)] if self.rank is not None else []
        where += [f"step {self.step}"] if self.step is not None else []
        where += self.frames[-1:]
        return f"{said} ({', '.join(where)})" if where else said


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldCrash:
    """The newest crash of a job, as its status shows it."""

    crash: Crash
    trainer: Annotated[str, Longest(1024)]
    """Name of the trainer's slot."""
    at_s: Instant
    times: Count = 1
    """Tries of the step that ended like this."""
