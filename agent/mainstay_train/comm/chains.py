"""The groups of a chain: pipeline and inner mesh, which live and end together.

Both live as long as the chain's members stay the same (protocol section 3) and
end together: a cell fails as a unit, and without it the pipeline is broken.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.base.device import Moment
from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm.group import Group


@dataclass(slots=True, eq=False)
class Mark:
    """A moment of the device, and whether what was computed over a chain until then counts."""

    moment: Moment
    counts: bool | None = None
    """Whether the device was done before the chain ended; None: it is not known yet."""


class ChainGroups:
    """The groups of one rank's chain; stands in for its single group where one is enough.

    Operations are for one thread, :meth:`shutdown` for any.

    Args:
        name: of both groups, and of this formation of the chain.
        pipeline: all ranks of the chain, numbered by position; None with one stage.
        mesh: the ranks of this rank's cell; None where a cell has one rank.
    """

    def __init__(self, name: str, pipeline: Group | None, mesh: Group | None) -> None:
        self.name, self.pipeline, self._mesh = name, pipeline, mesh
        self.groups = tuple(group for group in (pipeline, mesh) if group is not None)
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._marks: list[Mark] = []
        """Those of which it is not known whether they count."""

    def connect(self) -> None:
        """Meet the chain's other ranks. Blocks until all are there.

        Raises:
            GroupEnded: shut meanwhile, or a peer is gone.
        """
        if self.pipeline is not None:
            self.pipeline.connect()
        self.connect_cell()

    def connect_cell(self) -> None:
        """Meet the other ranks of this rank's cell, unless they have met; raises likewise.

        A replay computes within the cell alone, and the rest of the chain may not come before it
        is done.
        """
        if self._mesh is not None and not self._mesh.connected:
            self._mesh.connect()
            comm_mesh.enter(self._mesh)

    def shutdown(self, why: str) -> None:
        """End every operation that waits in the chain, and all later ones; returns at once."""
        with self._lock:
            if self._ended is None:
                # Before anything is aborted: what ends from here on may have ended for that.
                self._look()
                self._ended = why
                for mark in self._marks:
                    mark.counts = False
                self._marks.clear()
        for group in self.groups:
            group.shutdown(why)

    @property
    def connected(self) -> bool:
        """Whether all of the chain's ranks that this one talks to have met it."""
        return all(group.connected for group in self.groups)

    def check(self) -> None:
        """Return if the chain stands; else what its collectives yielded may be anything.

        Raises:
            GroupEnded: a group of the chain has ended.
        """
        if self._ended is not None:
            raise GroupEnded(self._ended)
        for group in self.groups:
            group.check()

    def mark(self, moment: Moment) -> Mark:
        """Return a mark of what was computed until now.

        Collectives that are aborted may end without an error, and a device runs behind the host.
        So what they lead to counts only if the device was done with it while the chain stood, and
        nothing was wrong with its connections.

        Args:
            moment: of now.

        Raises:
            GroupEnded: a group of the chain has ended, or its connections have failed.
        """
        with self._lock:
            self.check()
            mark = Mark(moment)
            self._marks.append(mark)
            problem = self._look()
        if problem:
            raise GroupEnded(problem)
        return mark

    def judge(self) -> None:
        """Wait until it is known of all marks whether they count."""
        with self._lock:
            last = self._marks[-1].moment if self._marks else None
        if last is None:
            return
        try:
            for group in self.groups:
                group.wait_for(last)
            with self._lock:
                problem = self._look()
            if problem:
                raise GroupEnded(problem)
        except GroupEnded as end:
            self.shutdown(end.why)

    def _look(self) -> str:
        """Note which marks count by now; return what is wrong with the chain. Under the lock."""
        over = []
        for mark in self._marks:
            # Of a device that has failed nothing counts. Who uses it next finds that out.
            with contextlib.suppress(RuntimeError):
                if mark.moment.is_over():
                    over.append(mark)
        # In this order: of a chain of which something is wrong, what is over may be so for that.
        problem = self.problem
        if not problem:
            for mark in over:
                mark.counts = True
            self._marks = [mark for mark in self._marks if mark.counts is None]
        return problem

    @property
    def problem(self) -> str:
        """What is wrong with a group of the chain, though no operation tells; empty if nothing."""
        return next((group.problem for group in self.groups if group.problem), "")

    def broke(self, error: RuntimeError) -> str:
        """Why the inner mesh ended, if that is what ``error`` comes from; else empty.

        A collective of the user's raises what its backend raises: only the group's
        connections tell a lost rank from a mistake.
        """
        return self._mesh.broke(error) if self._mesh is not None else ""
