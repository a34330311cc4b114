"""A simulated trainer's connections, on a network that is played."""

from __future__ import annotations

from collections.abc import Callable

from mainstay_core.gather.frames import Join
from mainstay_core.rank.connections import QuorumConnections
from mainstay_core.sim.engine import Process, Signal
from mainstay_core.sim.gather import GatherClient
from mainstay_core.sim.groups import ChainGroup, Group
from mainstay_core.sim.network import Network
from mainstay_core.wire.plan import Chain, Plan


class Connections(QuorumConnections[GatherClient, Group, ChainGroup]):
    """The connections of one trainer.

    Args:
        process: the trainer.
        network: of the job.
        incarnation: this life.
        connect_s: bound on connecting a group.
    """

    def __init__(
        self, process: Process, network: Network, incarnation: str, connect_s: float
    ) -> None:
        self.changed = Signal()
        super().__init__(self.changed)
        self._process, self._network = process, network
        self._incarnation, self._connect_s = incarnation, connect_s
        self.on_plan: Callable[[Plan], None] = _ignore
        """Called with a plan that came another way than by the uplink."""

    def _join(self, plan: Plan, index: int) -> GatherClient:
        join = Join(
            quorum=str(plan.quorum),
            index=index,
            size=len(plan.members),
            incarnation=self._incarnation,
        )
        address = plan.rendezvous.gather
        return GatherClient(
            self._process,
            self._network,
            address,
            join,
            self.changed,
            lambda why: self.lost_quorum(plan.quorum, why),
            self.on_plan,
        )

    def _chain_groups(self, name: str, plan: Plan, chain: Chain) -> ChainGroup:
        # One group serves pipeline and cell here, but in a replay.
        return ChainGroup(
            self._process,
            self._network,
            name=name,
            meeting=self.gather(),
            rank=chain.cells.index(self.index),
            size=len(chain.cells),
            changed=self.changed,
            connect_s=self._connect_s,
            width=plan.ranks_per_stage,
        )

    def break_pipeline(self) -> None:
        """Have the sockets of its pipeline break, if it has one."""
        if self._pipeline is not None:
            self._pipeline.break_links()

    def _group(self, name: str, rank: int, size: int) -> Group:
        return Group(
            self._process,
            self._network,
            name=name,
            meeting=self.gather(),
            rank=rank,
            size=size,
            changed=self.changed,
            connect_s=self._connect_s,
        )


def _ignore(plan: Plan) -> None:
    del plan
