"""Compares two runs by their reports: the digests of every step, and the final ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mainstay_cli.base.exits import UsageError
from mainstay_core.base import codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.words import count
from mainstay_core.wire.reinitialisation import Fork, describe_course, describe_fork

HISTORY = "history"
"""Of two reports: whether their jobs are exact, or approximate in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value in which two reports differ. ``step`` is None for the final state."""

    step: int | None
    what: str
    left: object
    right: object

    def __str__(self) -> str:
        if self.what == HISTORY:
            return f"{HISTORY}: {self.left} != {self.right}"
        where = "final state" if self.step is None else f"step {self.step}"
        return f"{where}: {self.what}: {self.left} != {self.right}"


def load_report(path: Path) -> dict[str, Any]:
    """Return a report.

    Raises:
        UsageError: the file is no report.
    """
    try:
        report: Any = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    digests = report.get("digests") if isinstance(report, dict) else None
    if not isinstance(digests, dict) or not isinstance(digests.get("steps", []), list):
        raise UsageError(f"{path}: not a report of mainstay (it has no digests)")
    try:
        _history_of(report)
    except (MalformedError, AttributeError, TypeError) as error:
        raise UsageError(f"{path}: its lineage is not understood: {error}") from error
    return dict(report)


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
        Difference(step=None, what=name, left=final_left.get(name), right=final_right.get(name))
        for name in sorted(final_left.keys() | final_right.keys())
        if final_left.get(name) != final_right.get(name)
    ]


def _compare_histories(left: dict[str, Any], right: dict[str, Any]) -> list[Difference]:
    told_left, told_right = _history_of(left), _history_of(right)
    if told_left == told_right:
        return []
    return [Difference(step=None, what=HISTORY, left=told_left, right=told_right)]


def _history_of(report: dict[str, Any]) -> str:
    """Return since when a job is approximate and by which forks, as one line."""
    forks = (report.get("lineage") or {}).get("forks", [])
    course = describe_course(report.get("approximate_since"))
    told = "; ".join(describe_fork(codec.decode(Fork, fork)) for fork in forks)
    return f"{course} ({told})" if told else course


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
