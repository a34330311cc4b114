"""Reads the report that an ended run has left, and refuses one that cannot be shown.

What commands show of a report is declared here by its types. So a file that was changed by hand, or
is none of ours, ends with the name of the field that is wrong, and not in the middle of a table.
docs/report.md has the whole schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mainstay_cli.base.comparison import ReportedLineage, read_object
from mainstay_cli.base.exits import UsageError
from mainstay_core.base import codec
from mainstay_core.base.bounds import Count, Finite, Range
from mainstay_core.base.errors import MalformedError
from mainstay_core.faults.points import FaultPoint
from mainstay_core.wire.findings import FindingsPage
from mainstay_core.wire.recoveries import Replayed, StageTimes

LAST_S = 253_370_764_800.0
"""The year 9999: later moments have no date."""
Moment = Annotated[float, Range(0.0, LAST_S)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The part of a report that counts steps."""

    committed: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crash:
    """The exception that ended a trainer."""

    trainer: str
    type: str
    message: str = ""
    frames: list[str] = field(default_factory=list)
    rank: str | None = None
    step: Count | None = None
    times: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protection:
    """A protection that the job has or lacks."""

    name: str
    given: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taint:
    """The steps that a wrong device may have computed, in one sentence."""

    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recovery(StageTimes):
    """A recovery as timeline and status show it."""

    fault: str
    method: str
    reason: str
    lost_steps: Count
    exact: bool = False
    approximate_since: Count | None = None
    from_step: Count | None = None
    first_commit_after_s: Finite | None = None
    times: StageTimes | None = None
    replays: list[Replayed] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """An event of the job's history."""

    at_s: Moment
    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fired:
    """The place where a fault has fired."""

    pod: str
    slot: Count | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault(FaultPoint):
    """An injected fault, and what became of it."""

    state: str
    fired: _Fired | None = None
    problem: str = ""

    def __post_init__(self) -> None:
        if self.process is None and self.spare is None and None in (self.replica, self.stage):
            raise ValueError("has no target: replica and stage, spare, or process")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """The plan of checks of one stage."""

    stage: Count
    plan: str
    shares: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """The parts of a report that commands show."""

    state: str = ""
    reason: str = ""
    steps: _Steps = _Steps()
    approximate_since: Count | None = None
    lineage: ReportedLineage | None = None
    crash: _Crash | None = None
    entry: str | None = None
    protections: list[_Protection] = field(default_factory=list)
    tainted: list[_Taint] = field(default_factory=list)
    dmr_coverage: str | None = None
    checks: list[_Checks] = field(default_factory=list)
    findings: FindingsPage | None = None
    recoveries: list[_Recovery] = field(default_factory=list)
    events: list[_Event] = field(default_factory=list)
    faults: list[_Fault] = field(default_factory=list)


def load_shown(path: Path) -> dict[str, Any]:
    """Return the report of a run, for commands that show it; empty if there is none.

    Raises:
        UsageError: the file cannot be read, is no JSON object, or has a field that is not what it
            should be: the message names the file and the field.
    """
    if not path.exists():
        return {}
    report = read_object(path)
    try:
        codec.decode(_Shown, report, "report")
    except MalformedError as error:
        raise UsageError(f"{path}: not understood: {error}") from error
    return report
