"""What a simulated trainer writes to the shared disk, in the background.

As ``mainstay_train.state.controller``: parts and renames take their time while the steps
go on; votes say what is safe, what is still being written and what is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mainstay_core.rank import events
from mainstay_core.rank.own_saves import OwnSaves
from mainstay_core.sim.disk import Part
from mainstay_core.sim.engine import Steps
from mainstay_core.wire.votes import SaveStatus

if TYPE_CHECKING:
    from mainstay_core.sim.trainer import Trainer


class Saving:
    """The writing thread of one trainer.

    Args:
        trainer: whose; it ends with it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saves, self._running = OwnSaves(), 0

    def status(self) -> SaveStatus:
        """What to say of it in a vote."""
        return self._saves.told(busy=self._running > 0)

    def look(self) -> int:
        """Return the newest version on the disk that looks complete."""
        newest = self._trainer.world.disk.newest_complete()
        self._saves = self._saves.found(newest)
        return newest

    def write(self, action: events.WriteCheckpoint, nonce: str, position: int) -> None:
        """Copy the state now; its part becomes safe later."""
        assert self._trainer.compute is not None
        part = Part(self._trainer.compute.params, action.commit, action.commit_chain)
        self._running += 1
        self._saves = self._saves.begin(action.version, nonce)
        self._trainer.spawn(self._write(action.version, nonce, position, part))

    def void(self, version: int) -> None:
        """Never call the part of a version safe."""
        self._saves = self._saves.void(version)

    def _write(self, version: int, nonce: str, position: int, part: Part) -> Steps[None]:
        world = self._trainer.world
        yield world.pace.copy_s()
        world.disk.write_part(version, nonce, position, part)
        self._saves = self._saves.written(version, nonce)
        self._done()

    def complete(self, action: events.RenameCheckpoint) -> None:
        """Rename a version, a little later."""
        self._running += 1
        self._trainer.spawn(self._complete(action))

    def _complete(self, action: events.RenameCheckpoint) -> Steps[None]:
        world = self._trainer.world
        yield world.pace.hiccup_s()
        if world.disk.finish(action.version, action.nonce):
            world.checks.durable(action.version)
        self._saves = self._saves.renamed(action.version)
        self._trainer.tell_durable(self._saves.status.durable)
        self._done()

    def _done(self) -> None:
        self._running -= 1
        self._trainer.connections.changed.fire()

    def wait_idle(self) -> Steps[None]:
        """Return once nothing is being written."""
        while self._running:
            yield self._trainer.connections.changed
