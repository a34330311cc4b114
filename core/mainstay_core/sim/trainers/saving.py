"""Loads a simulated trainer's checkpoints, and writes them in the background.

As ``mainstay_train.state.controller``: parts and renames take their time while the steps
go on; votes say what is safe, what is still being written and what is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mainstay_core.rank import events
from mainstay_core.rank.saving.own_saves import OwnSaves
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.disk import AbandonedError, DamagedError, Part
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.wire.plan import Voided, is_void
from mainstay_core.wire.votes import SaveStatus


class Saving:
    """The writing thread of one trainer.

    Args:
        world: has the disk.
        process: the trainer; the thread ends with it.
        changed: fired when something is written.
        report: called with what became of a version that this rank has renamed.
    """

    def __init__(
        self,
        world: Surroundings,
        process: Process,
        changed: Signal,
        report: Callable[[int, str], None],
    ) -> None:
        self._world, self._process, self._changed = world, process, changed
        self._report = report
        self._saves, self._running = OwnSaves(), 0
        self._voided: tuple[Voided, ...] = ()

    def status(self) -> SaveStatus:
        """What to say of it in a vote."""
        return self._saves.told(busy=self._running > 0)

    def newest_complete(self) -> int:
        """Return the newest version on the disk that looks complete."""
        newest = self._world.disk.newest_complete(self._voided)
        self._saves = self._saves.found(newest)
        return newest

    def load(self, cell: Compute, version: int) -> Steps[events.StateLoaded | events.LoadFailed]:
        """Read a version into the cell's state; version 0 is the initial one."""
        yield self._world.pace.copy_s()
        if version == 0:
            cell.params = terms.initial_state(cell.position)
            return events.StateLoaded(cell.params, None, "")
        try:
            part = self._world.disk.load(version)[cell.position]
        except DamagedError as error:
            return events.LoadFailed(str(error))
        cell.params = part.params
        return events.StateLoaded(part.params, part.commit, part.commit_chain, part.history)

    def write(self, action: events.WriteCheckpoint, cell: Compute, nonce: str) -> None:
        """Copy the state now; its part becomes safe later."""
        part = Part(cell.params, action.commit, action.commit_chain, action.history)
        self._running += 1
        self._saves = self._saves.begin(action.version, nonce)
        self._process.spawn(self._write(action.version, nonce, cell.position, part))

    def void(self, version: int) -> None:
        """Never call the part of a version safe."""
        self._saves = self._saves.void(version)

    def go_back(self, voided: Sequence[Voided], *, puts_aside: bool) -> None:
        """Count no version of steps that count no more."""
        known, newest = self._voided, voided[-1]
        self._voided = tuple(voided)
        if not known or known[-1].lineage < newest.lineage:
            self._saves = self._saves.void_after(newest.version)
        if puts_aside:
            self._world.disk.put_aside(self._voided)

    def _write(self, version: int, nonce: str, position: int, part: Part) -> Steps[None]:
        world = self._world
        world.disk.abandon_others(version, nonce)
        yield world.pace.copy_s()
        world.disk.write_part(version, nonce, position, part)
        self._saves = self._saves.written(version, nonce)
        self._done()

    def complete(self, action: events.RenameCheckpoint, lineage: int) -> None:
        """Rename a version of a lineage, a little later."""
        self._running += 1
        self._process.spawn(self._complete(action, lineage))

    def _complete(self, action: events.RenameCheckpoint, lineage: int) -> Steps[None]:
        world = self._world
        yield world.pace.hiccup_s()
        if is_void(self._voided, action.version, lineage):
            self._done()
            return
        try:
            if world.disk.finish(action.version, action.nonce, lineage, action.clean_at):
                world.checks.durable(action.version)
        except AbandonedError:
            self._done()
            return
        self._saves = self._saves.renamed(action.version)
        self._report(self._saves.status.durable, "")
        self._done()

    def _done(self) -> None:
        self._running -= 1
        self._changed.fire()

    def wait_idle(self) -> Steps[None]:
        """Return once nothing is being written."""
        while self._running:
            yield self._changed
