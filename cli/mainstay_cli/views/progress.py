"""Prints a run's progress: one line per step, recovery, warning and change of quorum."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from mainstay_cli.views.lineage import describe_exactness
from mainstay_core.base.words import count, first_line, printable, printable_lines
from mainstay_core.wire.reinitialisation import describe_course


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One committed step, as it is shown."""

    step: int
    num_steps: int
    loss: float
    tokens_per_s: float
    quorum: str
    replicas: int
    approximate_since: int | None = None
    """First step of another course than without failures; None: the step is exact."""

    def text(self) -> str:
        """Return the line as it is printed."""
        width, since = len(str(self.num_steps)), self.approximate_since
        course = "" if since is None else f"  {describe_course(since)}"
        return (
            f"step {self.step + 1:>{width}}/{self.num_steps}  loss {self.loss:8.4f}  "
            f"{self.tokens_per_s:9,.0f} tok/s  {self.quorum}  {count(self.replicas, 'replica')}"
            f"{course}"
        )


class PlainProgress:
    """Lines on a stream, none of them twice. Use as a context manager.

    Args:
        quiet: prints nothing but what goes wrong.
        every_steps: prints one line per so many steps.
        stream: where the lines go.
    """

    shows_members = False
    shows_events = False

    def __init__(
        self, *, quiet: bool = False, every_steps: int = 1, stream: TextIO | None = None
    ) -> None:
        self._quiet = quiet
        self._every_steps = every_steps
        self._stream = stream or sys.stdout
        self._recoveries: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave what was printed as it is."""

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self._quiet:
            print(printable_lines(text), file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning, quiet or not."""
        print(f"warning: {printable_lines(text)}", file=sys.stderr, flush=True)

    def step(self, line: StepLine) -> None:
        """Print a committed step."""
        if (line.step + 1) % self._every_steps == 0:
            self.say(line.text())

    def members(self, members: list[dict[str, Any]]) -> None:
        """Take note of the ranks of the newest quorum; lines do not show them."""

    def event(self, event: dict[str, Any]) -> None:
        """Take note of an event of the job's history; lines tell what matters otherwise."""

    def recovery(self, recovery: dict[str, Any]) -> None:
        """Print a finished recovery once, with its reason."""
        key = str(recovery.get("quorum"))
        if key in self._recoveries or not recovery.get("done"):
            return
        self._recoveries.add(key)
        self.say(f"  {describe_recovery(recovery)}")


def one_line(text: object) -> str:
    """Return the first line of a text; evidence may carry a whole traceback, which logs have.

    A terminal may show it: it has no control characters.
    """
    return printable(first_line(str(text)))


def describe_crash(crash: dict[str, Any] | None) -> str:
    """Return the newest exception that ended a trainer, in several lines; nothing without one."""
    if not crash:
        return ""
    rank = f" ({crash['rank']})" if crash.get("rank") else ""
    step = f" in step {crash['step']}" if crash.get("step") is not None else ""
    times = crash.get("times", 1)
    again = f", {times} tries ended like this" if times > 1 else ""
    said = f"trainer {crash['trainer']}{rank} ended{step} with {crash['type']}{again}:"
    text = textwrap.indent(str(crash.get("message", "")).strip(), "  ")
    frames = [f"  at {frame}" for frame in crash.get("frames", [])]
    return "\n".join(line for line in (said, text, *frames) if line)


def describe_recovery(recovery: dict[str, Any]) -> str:
    """Return a recovery in one line: what happened, what was done, why, how long."""
    seconds = recovery.get("first_commit_after_s")
    how_long = f", next commit {seconds:.2f} s later than normal" if seconds is not None else ""
    return (
        f"{recovery['method']} ({describe_exactness(recovery)}): {one_line(recovery['fault'])}: "
        f"{one_line(recovery['reason'])}"
        f"{how_long}, steps lost {recovery['lost_steps']}"
    )
