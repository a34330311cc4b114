"""A simulated trainer, as its keeper of segments sees it."""

from __future__ import annotations

from typing import Protocol

from mainstay_core.base.ids import Slot
from mainstay_core.planning.program import Action
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.invariants.life import Life


class Owner(Life, Protocol):
    """A trainer whose segments are kept."""

    slot: Slot

    def made_cell(self) -> Compute:
        """Return the cell of the adopted plan's position."""

    async def point(self, name: str) -> None:
        """A place in the code where a fault may strike."""

    def strike(self, name: str) -> None:
        """A place in the code of a thread beside the session's, where a fault may strike."""

    async def begin(self, action: Action) -> None:
        """Take note, before an action of a program."""
