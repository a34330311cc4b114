"""What a simulated trainer writes to the shared disk, in the background.

As ``mainstay_train.state.controller``: parts and renames take their time while the steps
go on; votes say what is safe, what is still being written and what is durable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mainstay_core.rank import events
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
        self._status, self._running = SaveStatus(), 0
        self._attempt, self._void_nonce = (0, ""), ""

    def status(self) -> SaveStatus:
        """What to say of it in a vote."""
        return replace(self._status, checkpoint_busy=self._running > 0)

    def look(self) -> int:
        """Return the newest version on the disk that looks complete."""
        newest = self._trainer.world.disk.newest_complete()
        self._status = replace(self._status, durable=newest)
        return newest

    def write(self, action: events.WriteCheckpoint, nonce: str, position: int) -> None:
        """Copy the state now; its part becomes safe later."""
        assert self._trainer.compute is not None
        part = Part(self._trainer.compute.params, action.commit, action.commit_chain)
        self._running += 1
        self._attempt = (action.version, nonce)
        self._trainer.spawn(self._write(action.version, nonce, position, part))

    def void(self, version: int) -> None:
        """Never call the part of a version safe."""
        if self._attempt[0] == version:
            self._void_nonce = self._attempt[1]
        if self._status.checkpoint_safe == version:
            self._status = replace(self._status, checkpoint_safe=None, checkpoint_nonce="")

    def _write(self, version: int, nonce: str, position: int, part: Part) -> Steps[None]:
        world = self._trainer.world
        yield world.pace.copy_s()
        world.disk.write_part(version, nonce, position, part)
        if nonce != self._void_nonce:
            self._status = replace(self._status, checkpoint_safe=version, checkpoint_nonce=nonce)
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
        durable = max(self._status.durable, action.version)
        self._status = replace(self._status, durable=durable)
        self._trainer.tell_durable(durable)
        self._done()

    def _done(self) -> None:
        self._running -= 1
        self._trainer.connections.changed.fire()

    def wait_idle(self) -> Steps[None]:
        """Return once nothing is being written."""
        while self._running:
            yield self._trainer.connections.changed
