"""The jobs that a command can ask about: runs of this machine, or TrainingJobs of a cluster.

``mainstay`` shows the first, ``kubectl mainstay`` the second; both are the same
commands. Which it is is said once, when the command line begins.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mainstay_cli.base import client, reports, state_dir
from mainstay_cli.base.exits import UsageError


class Run(Protocol):
    """A job, wherever it runs."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def job(self) -> str:
        """Its uid."""
        ...

    def is_running(self) -> bool:
        """Return whether an api can be asked about it."""
        ...

    def connect(self) -> client.ApiClient:
        """Return a client of its api."""
        ...

    def load_report(self) -> dict[str, Any]:
        """Return what an ended run left; empty if it left nothing.

        Raises:
            UsageError: it cannot be read.
        """
        ...

    def describe_place(self) -> dict[str, str]:
        """Return where it is, for those who read JSON."""
        ...


class Runs(Protocol):
    """A source of jobs: this machine's runs, or a cluster's TrainingJobs."""

    def find(self, name: str | None) -> Run:
        """Return the job of a name.

        Raises:
            UsageError: there is none, or no name is given and several could be meant.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run of ``mainstay local run`` on this machine."""

    record: state_dir.RunRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def job(self) -> str:
        return self.record.job

    def is_running(self) -> bool:
        return state_dir.is_running(self.record)

    def connect(self) -> client.ApiClient:
        return client.connect(self.record)

    def load_report(self) -> dict[str, Any]:
        return reports.load_shown(Path(self.record.state_dir) / "report.json")

    def describe_place(self) -> dict[str, str]:
        url = {"url": self.record.url} if self.is_running() else {}
        return {**url, "state_dir": self.record.state_dir}


class LocalRuns:
    """The runs of this machine; the newest one where no name is given."""

    def find(self, name: str | None) -> LocalRun:
        return LocalRun(state_dir.find_record(name))


PLACE: ContextVar[Runs | None] = ContextVar("PLACE", default=None)
"""Where this command line looks for jobs; this machine unless it says otherwise."""


def find(name: str | None) -> Run:
    """Return the job of a name.

    Raises:
        UsageError: there is none.
    """
    return (PLACE.get() or LocalRuns()).find(name)


def find_running(name: str | None) -> Run:
    """Return the job of a name, which runs.

    Raises:
        UsageError: there is none, or it has ended.
    """
    run = find(name)
    if not run.is_running():
        raise UsageError(f"job {run.name} has ended; mainstay timeline says what happened")
    return run


def read_report(run: Run) -> dict[str, Any]:
    """Return the report of a run that has ended.

    Raises:
        UsageError: it left none, or one that cannot be read.
    """
    report = run.load_report()
    if not report:
        place = run.describe_place().get("state_dir", "")
        raise UsageError(f"job {run.name} has ended without a report (see {place}/logs)")
    return report
