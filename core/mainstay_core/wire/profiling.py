"""Asks a process with torch to profile a stage of a job, and carries its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Count, Index, Name, Range, Seconds, Sentence
from mainstay_core.dmr.profiles import WHOLE_WAY, Profile
from mainstay_core.job.config import JobConfig

DEFAULT_STEPS = 3
"""Repetitions: a median of fewer is one of them, and shapes that vary must be seen to."""
MAX_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileQuestion:
    """A stage of a job that is to be profiled."""

    config: JobConfig
    stage: Index
    way: Name = WHOLE_WAY
    """Of the micro-batches through the stage."""
    steps: Annotated[int, Range(1, MAX_STEPS)] = DEFAULT_STEPS
    """Micro-batches with different data; one more goes before them."""
    window_s: Seconds = 0.0
    """Seconds of each wait, which a single process has not."""
    budget_bytes: Count
    """Memory that checks may retain on a rank of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileAnswer:
    """The answer to a :class:`ProfileQuestion`."""

    problem: Sentence = ""
    """What is wrong with the job; empty if its stage was profiled."""
    profile: Profile | None = None
