"""Asks a process with torch to put drawn wrong bits into steps of a job, and carries its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Count, Longest, Name, Range, Sentence, Signed
from mainstay_core.job.config import JobConfig

MAX_FLIPS = 100_000
MAX_CLASSES = 64
MAX_SHOWN = 16
"""Flips that broke the promise, told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipQuestion:
    """The job whose step is computed again and again, each time with another wrong bit."""

    config: JobConfig
    num_flips: Annotated[int, Range(1, MAX_FLIPS)]
    seed: Signed


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """The flips of one class of operators."""

    name: Name
    """Phase and pass, or what is not an operator."""
    drawn: Count = 0
    effective: Count = 0
    """Flips that change a digest where nothing is checked."""
    found: Count = 0
    """Effective ones with a finding in mode Full."""
    equal: Count = 0
    """Flips, effective or not, with which a step in mode Full has the undisturbed digests."""
    is_promised: bool = True
    """Whether all effective ones are to be found, and all digests to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipAnswer:
    """The answer to a :class:`FlipQuestion`."""

    problem: Sentence = ""
    """What is wrong with the job; empty if its step was computed."""
    classes: Annotated[tuple[ClassResult, ...], Longest(MAX_CLASSES)] = ()
    broken: Annotated[tuple[Sentence, ...], Longest(MAX_SHOWN)] = ()
    """Effective flips that were not found, or that moved a digest all the same."""
