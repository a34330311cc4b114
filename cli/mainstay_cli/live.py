"""The live table of a terminal: ranks with slot, pid, phase and step, under the newest step."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mainstay_cli.progress import PlainProgress, StepLine


class LiveProgress(PlainProgress):
    """Keeps the newest step and the ranks in place; everything else scrolls by above them."""

    shows_members = True

    def __init__(self) -> None:
        super().__init__()
        self._console = Console()
        self._line = ""
        self._members: list[dict[str, Any]] = []
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
        self._members = []
        self._refresh()
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning above the table."""
        self._console.print(f"warning: {text}", markup=False, highlight=False, style="yellow")

    def step(self, line: StepLine) -> None:
        """Show a committed step in the place of the last one."""
        self._line = line.text()
        self._refresh()

    def members(self, members: list[dict[str, Any]]) -> None:
        """Show the ranks of the newest quorum."""
        self._members = members
        self._refresh()

    def _refresh(self) -> None:
        table = Table(box=None, pad_edge=False)
        for heading in ("rank", "slot", "pid", "phase", "step"):
            table.add_column(heading)
        for member in self._members:
            keys = ("rank", "slot", "pid", "phase", "step")
            table.add_row(*(Text(str(member.get(key) or "-")) for key in keys))
        parts = [Text(self._line)] + ([table] if self._members else [])
        self._live.update(Group(*parts), refresh=True)
