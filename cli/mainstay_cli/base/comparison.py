"""Compares two runs by their reports: the digests of every step, and the final ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mainstay_cli.base.exits import UsageError
from mainstay_core.base import codec
from mainstay_core.base.bounds import Count, Longest
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.words import count, printable
from mainstay_core.job.config import MAX_FORKS
from mainstay_core.wire.reinitialisation import ToldFork, describe_course, describe_fork

HISTORY = "history"
"""Of two reports: whether their jobs are exact, or approximate in the same way."""
FINAL_NAMES = {HISTORY: "digest of the history"}
"""What differences call digests of a final state, where that is not the name in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedLineage:
    """The forks of a run, and of which job they are, as its report has them."""

    num_forks: Count | None = None
    """How many its final state contains. None: so many as are known in full."""
    forks: Annotated[tuple[ToldFork, ...], Longest(MAX_FORKS)] = ()
    """Those that are known in full, the newest ones, in order."""
    of: dict[str, str] = field(default_factory=dict)
    """What a job must share that makes them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCourse:
    """The part of a report that says whether its job is exact, and what was made anew."""

    approximate_since: Count | None = None
    lineage: ReportedLineage | None = None
    """None: in a report of a release that tells none."""

    @property
    def forks(self) -> tuple[ToldFork, ...]:
        """The forks that are known in full, the newest ones, in order."""
        return self.lineage.forks if self.lineage is not None else ()

    @property
    def num_forks(self) -> int | None:
        """How many forks there were; None: that is not known."""
        if self.approximate_since is None or self.lineage is None:
            return 0 if self.approximate_since is None else None
        # One that learns late that a job is approximate knows since when, and no fork.
        told = self.lineage.num_forks
        return (len(self.forks) if told is None else told) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digests:
    """The digests of a report, as far as their shape goes."""

    steps: list[Any] = field(default_factory=list)
    final: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The number of the first step of which a report has a digest."""

    first: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """The parts of a report that are compared beside its lineage."""

    digests: _Digests
    steps: _Steps = _Steps()


def read_course(report: Mapping[str, Any]) -> ReportedCourse:
    """Return whether a reported job is exact, and what was made anew.

    Raises:
        MalformedError: it cannot be read; the message names the field.
    """
    known = {f: report[f] for f in ("approximate_since", "lineage") if f in report}
    return codec.decode(ReportedCourse, known, "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value in which two reports differ. ``step`` is None for the final state."""

    step: int | None
    what: str
    left: object
    right: object

    def __str__(self) -> str:
        if self.what == HISTORY:
            return printable(f"{HISTORY}: {self.left} != {self.right}")
        where = "final state" if self.step is None else f"step {self.step}"
        return printable(f"{where}: {self.what}: {self.left} != {self.right}")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a report is.

    Raises:
        UsageError: the file cannot be read, or has no JSON object.
    """
    try:
        report: Any = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(report, dict):
        raise UsageError(
            f"{path}: not a report of mainstay: expected a JSON object, got {type(report).__name__}"
        )
    return report


def load_report(path: Path) -> dict[str, Any]:
    """Return a report.

    Raises:
        UsageError: the file is no report.
    """
    report = read_object(path)
    if not isinstance(report.get("digests"), dict):
        raise UsageError(f"{path}: not a report of mainstay (it has no digests)")
    try:
        codec.decode(_Compared, report, "report")
        read_course(report)
    except MalformedError as error:
        raise UsageError(f"{path}: not understood: {error}") from error
    return report


def describe_equality(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Return what is equal in two reports that do not differ, and nothing that neither of them has.

    Raises:
        UsageError: they have no step in common and no final state, so nothing was compared.
    """
    first = max(_first(left), _first(right))
    steps = [step for step in _steps_from(left, first) if step is not None]
    unknown = len(_steps_from(left, first)) - len(steps)
    final = bool(left["digests"].get("final"))
    if not steps and not final:
        raise UsageError("nothing to compare: neither run has a digest of a step or of the end")
    since = left.get("approximate_since")
    return (
        f"equal: {count(len(steps), 'step')}"
        + (f" ({unknown} more are in neither ledger)" if unknown else "")
        + (" and the final state, bit for bit" if final else ", bit for bit")
        + ("" if final else "; neither run has a final state")
        + ("" if since is None else f"; both {describe_course(since)}")
    )


def compare_reports(left: dict[str, Any], right: dict[str, Any]) -> list[Difference]:
    """Return all differences, histories first, then the first differing step; none: equal bits.

    Only what must be equal is compared: histories of forks, and digests. How many recoveries and
    seconds it took may differ.
    """
    first = max(_first(left), _first(right))
    differences = _compare_histories(left, right)
    differences += _compare_steps(_steps_from(left, first), _steps_from(right, first), first)
    final_left = left["digests"].get("final") or {}
    final_right = right["digests"].get("final") or {}
    if not final_left or not final_right:
        if final_left != final_right:
            differences.append(
                Difference(
                    step=None, what="digests", left=_has(final_left), right=_has(final_right)
                )
            )
        return differences
    return differences + [
        Difference(
            step=None,
            what=FINAL_NAMES.get(name, name),
            left=final_left.get(name),
            right=final_right.get(name),
        )
        for name in sorted(final_left.keys() | final_right.keys())
        if final_left.get(name) != final_right.get(name)
    ]


def _compare_histories(left: dict[str, Any], right: dict[str, Any]) -> list[Difference]:
    one, other = read_course(left), read_course(right)
    digest = _history_digest(left)
    is_same = one.approximate_since == other.approximate_since and (
        (bool(digest) and digest == _history_digest(right)) or _may_be_same(one, other)
    )
    if is_same:
        return []
    return [Difference(step=None, what=HISTORY, left=_describe(one), right=_describe(other))]


def _history_digest(report: dict[str, Any]) -> object:
    """Return the digest of all forks that a run's final state contains; None if it has none."""
    return (report["digests"].get("final") or {}).get("history")


def _may_be_same(one: ReportedCourse, other: ReportedCourse) -> bool:
    """Return whether two lineages are the same as far as both reports know them.

    A store that was lost meanwhile has the newest forks alone.
    """
    numbers = {one.num_forks, other.num_forks} - {None}
    both = min(len(one.forks), len(other.forks))
    known = [
        [describe_fork(fork) for fork in course.forks[len(course.forks) - both :]]
        for course in (one, other)
    ]
    return len(numbers) <= 1 and known[0] == known[1]


def _describe(course: ReportedCourse) -> str:
    """Return since when a job is approximate and by which forks, as one line."""
    told = describe_course(course.approximate_since)
    unknown = (course.num_forks or 0) - len(course.forks)
    forks = [f"{unknown} earlier: not known in full here"] if unknown > 0 else []
    forks += map(describe_fork, course.forks)
    return f"{told} ({'; '.join(forks)})" if forks else told


def _first(report: dict[str, Any]) -> int:
    """The first step of a run: one that went on from an earlier run's checkpoint begins later."""
    return int(report.get("steps", {}).get("first", 0))


def _steps_from(report: dict[str, Any], first: int) -> list[Any]:
    """Digests of the steps that both runs have."""
    return list(report["digests"].get("steps", []))[first - _first(report) :]


def _compare_steps(left: list[Any], right: list[Any], first: int) -> list[Difference]:
    differences = []
    for index, (one, other) in enumerate(zip(left, right, strict=False), start=first):
        if one == other:
            continue
        if not isinstance(one, dict) or not isinstance(other, dict):
            left_text, right_text = (text or "not in the ledger" for text in (one, other))
            difference = Difference(step=index, what="digest", left=left_text, right=right_text)
            differences.append(difference)
            continue
        step = one.get("step", index)
        differences += [
            Difference(step=step, what=name, left=one.get(name), right=other.get(name))
            for name in sorted(one.keys() | other.keys())
            if one.get(name) != other.get(name)
        ]
    if len(left) != len(right):
        differences.append(
            Difference(
                step=first + min(len(left), len(right)),
                what="committed steps",
                left=first + len(left),
                right=first + len(right),
            )
        )
    return differences


def _has(final: dict[str, Any]) -> str:
    return "present" if final else "absent"
