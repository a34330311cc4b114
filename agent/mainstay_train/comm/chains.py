"""The groups of a chain: pipeline and inner mesh, which live and end together.

Both live as long as the chain's members stay the same (protocol section 3) and
end together: a cell fails as a unit, and without it the pipeline is broken.
"""

from __future__ import annotations

from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm.group import Group


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

    def connect(self) -> None:
        """Meet the chain's other ranks. Blocks until all are there.

        Raises:
            GroupEnded: shut meanwhile, or a peer is gone.
        """
        for group in self.groups:
            group.connect()
        if self._mesh is not None:
            comm_mesh.enter(self._mesh)

    def shutdown(self, why: str) -> None:
        """End every operation that waits in the chain, and all later ones; returns at once."""
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
        for group in self.groups:
            group.check()

    def broke(self, error: RuntimeError) -> str:
        """Why the inner mesh ended, if that is what ``error`` comes from; else empty.

        A collective of the user's raises what its backend raises: only the group's
        connections tell a lost rank from a mistake.
        """
        return self._mesh.broke(error) if self._mesh is not None else ""
