"""The live table of a terminal: what a job is doing now, in place.

``render`` makes it of values alone; :class:`LiveProgress` collects them and keeps
the table on the screen, while warnings and what is said scroll by above it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mainstay_cli.views.progress import PlainProgress, StepLine, describe_recovery, one_line
from mainstay_core.base.words import printable, printable_lines

MEMBER_KEYS = ("rank", "slot", "pid", "phase", "step")
NUM_RECOVERIES = 6
"""The newest ones; all of them are in the report and the timeline."""
NUM_EVENTS = 6
PHASE_STYLES = {
    "parked": "red",
    "settling": "yellow",
    "healing": "yellow",
    "stopped": "bold red",
    "starting": "dim",
    "idle": "dim",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """The contents of the live table."""

    line: StepLine | None = None
    """The newest committed step."""
    members: tuple[dict[str, Any], ...] = ()
    """As ``GET /v1/jobs/{job}/members`` gives them: ranks, then spares."""
    recoveries: tuple[dict[str, Any], ...] = ()
    """Oldest first; one that is under way has ``done`` false."""
    events: tuple[dict[str, Any], ...] = ()
    """The job's history, oldest first."""


def render(view: LiveView, width: int = 100) -> RenderableType:
    """Return the table of a view, for a terminal of ``width`` columns."""
    parts: list[RenderableType] = []
    if view.line is not None:
        parts.append(_headline(view.line, width))
    if view.members:
        parts += [Text(), _members(view.members)]
    if view.recoveries:
        parts += [Text(), Text("recoveries", style="bold")]
        parts += [_recovery(r, width) for r in view.recoveries[-NUM_RECOVERIES:]]
    if view.events:
        parts += [Text(), Text("events", style="bold")]
        parts += [_event(event, width) for event in view.events[-NUM_EVENTS:]]
    return Group(*parts)


def _headline(line: StepLine, width: int) -> Text:
    text = Text(line.text())
    room = max(0, width - len(text) - 3)
    filled = min(room, room * (line.step + 1) // max(1, line.num_steps))
    return text.append(" ").append("=" * filled, style="green").append("-" * (room - filled))


def _members(members: tuple[dict[str, Any], ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in MEMBER_KEYS:
        table.add_column(heading)
    for member in members:
        phase = printable(str(member.get("phase") or "-"))
        cells = {key: Text(printable(str(member.get(key) or "-"))) for key in MEMBER_KEYS}
        if member.get("step") is not None:
            cells["step"] = Text(str(member["step"]))
        joining = member.get("joining") and not member.get("settled")
        cells["phase"] = Text(
            f"{phase} (joins)" if joining else phase, style=PHASE_STYLES.get(phase, "")
        )
        table.add_row(*(cells[key] for key in MEMBER_KEYS))
    return table


def _recovery(recovery: dict[str, Any], width: int) -> Text:
    under_way = not recovery.get("done")
    text = Text("  > " if under_way else "    ", style="yellow" if under_way else "")
    text.append(describe_recovery(recovery))
    text.truncate(width, overflow="ellipsis")
    return text


def _event(event: dict[str, Any], width: int) -> Text:
    warning = event.get("type") == "Warning"
    text = Text(f"    {event['reason']}: {one_line(event['message'])}")
    text.stylize("yellow" if warning else "")
    text.truncate(width, overflow="ellipsis")
    return text


class LiveProgress(PlainProgress):
    """Keeps a job's state in place; what is said scrolls by above it.

    Args:
        console: the terminal; made here if left out.
    """

    shows_members = True
    shows_events = True

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console()
        self._view = LiveView()
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)
        self._by_quorum: dict[str, dict[str, Any]] = {}
        self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What stays on the screen is the last step; the rest is over and said in the summary.
        self._show(LiveView(line=self._view.line))
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(printable_lines(text), markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning above the table."""
        shown = f"warning: {printable_lines(text)}"
        self._console.print(shown, markup=False, highlight=False, style="yellow")

    def step(self, line: StepLine) -> None:
        """Show a committed step in the place of the last one."""
        self._show(replace(self._view, line=line))

    def members(self, members: list[dict[str, Any]]) -> None:
        """Show the ranks of the newest quorum, and the spares."""
        self._show(replace(self._view, members=tuple(members)))

    def recovery(self, recovery: dict[str, Any]) -> None:
        """Show a recovery, also while it is under way."""
        key = str(recovery.get("quorum"))
        if self._by_quorum.get(key) == recovery:
            return
        self._by_quorum[key] = recovery
        self._show(replace(self._view, recoveries=tuple(self._by_quorum.values())))

    def event(self, event: dict[str, Any]) -> None:
        """Show an event of the job's history."""
        self._events.append(event)
        self._show(replace(self._view, events=tuple(self._events)))

    def _show(self, view: LiveView) -> None:
        self._view = view
        self._live.update(render(view, self._console.width), refresh=True)
