"""What a simulated trainer is connected to for its plan, and how that ends.

``mainstay_train.comm.connections``, method by method.
"""

from __future__ import annotations

from collections.abc import Callable

from mainstay_core.base.ids import QuorumId
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.gather.frames import Join
from mainstay_core.rank.machine import interrupts
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.gather import GatherClient
from mainstay_core.sim.groups import Group, GroupEnded
from mainstay_core.sim.heal import HealClient
from mainstay_core.sim.network import Network
from mainstay_core.wire.plan import Chain, Plan


class Connections:
    """The sockets of one trainer.

    Args:
        process: the trainer.
        network: of the job.
        incarnation: this life.
        connect_s: bound on connecting a group.
    """

    def __init__(
        self, process: Process, network: Network, incarnation: str, connect_s: float
    ) -> None:
        self._process, self._network = process, network
        self._incarnation, self._connect_s = incarnation, connect_s
        self.changed = Signal()
        self.on_plan: Callable[[Plan], None] = _ignore
        """Called with a plan that came another way than by the uplink."""
        self.newest: Plan | None = None
        self.adopted: Plan | None = None
        self.index = -1
        self._gather: GatherClient | None = None
        self._reduce_group: Group | None = None
        self._pipeline: Group | None = None
        self._pipeline_key: tuple[QuorumId, int] | None = None
        self._heal: HealClient | None = None

    def see(self, plan: Plan) -> None:
        """Take note of a plan and end what it makes useless."""
        if self.newest is None or plan.quorum.id > self.newest.quorum.id:
            self.newest = plan
            self._interrupt()
        self.changed.fire()

    def adopt(self, plan: Plan, index: int) -> GatherClient:
        """Enter a quorum: leave the former, keep the pipeline if the chain is the same.

        Raises:
            QuorumAborted: a newer unplanned plan is known already.
        """
        self.leave_quorum()
        self.adopted, self.index = plan, index
        chain = plan.chain_of(index)
        if chain is None or self._pipeline_key != _key(chain):
            self._end_pipeline("the chain has changed")
        if self._interrupt():
            raise QuorumAborted("a newer plan is known")
        join = Join(
            quorum=str(plan.quorum),
            index=index,
            size=len(plan.members),
            incarnation=self._incarnation,
        )
        self._gather = GatherClient(
            self._process,
            self._network,
            plan.rendezvous.gather,
            join,
            self.changed,
            self._end_reduce,
            self.on_plan,
        )
        return self._gather

    def leave_quorum(self) -> None:
        """Drop gather, reduction group and a running heal; the pipeline stays."""
        if self._gather is not None:
            self._gather.leave()
        self._end_reduce("this trainer has moved on")
        self._gather = self._reduce_group = None

    def leave(self) -> None:
        """Drop everything."""
        self.leave_quorum()
        self._end_pipeline("this trainer is no member any more")

    def gather(self) -> GatherClient:
        """The quorum's gather."""
        assert self._gather is not None
        return self._gather

    def reduce_group(self, position: int) -> Steps[Group | None]:
        """The group of the position's members, connected; None when there is only this one.

        Raises:
            GroupEnded: a member is gone or the quorum ended.
        """
        plan = self.adopted
        assert plan is not None
        members = [m.index for m in plan.position_members(position)]
        if self._reduce_group is not None or len(members) == 1:
            return self._reduce_group
        ended = self.gather().ended
        if ended is not None:
            raise GroupEnded(ended.why)
        name = f"{plan.job}/{plan.quorum}/p{position}"
        group = self._group(name, plan, members.index(self.index), len(members))
        self._reduce_group = group
        yield from group.connect()
        return group

    @property
    def pipeline_name(self) -> str:
        """Name of the connected pipeline group that is kept; empty if there is none."""
        return self._pipeline.name if self._pipeline and self._pipeline.connected else ""

    def pipeline(self, agreed: str) -> Steps[Group | None]:
        """The group of this cell's chain, connected, rank = position; None of a single trainer.

        Raises:
            GroupEnded: a cell of the chain is gone, or a plan took it apart.
        """
        plan = self.adopted
        assert plan is not None
        chain = plan.chain_of(self.index)
        if chain is None or len(chain.cells) == 1:
            return None
        name = agreed or f"{plan.job}/{plan.quorum}/r{chain.replica}"
        if self._pipeline is not None and self._pipeline.name == name:
            return self._pipeline
        if agreed:
            raise GroupEnded(f"{agreed} has ended since the quorum settled")
        self._end_pipeline("a cell of the chain has lost its pipeline")
        group = self._group(name, plan, chain.cells.index(self.index), len(chain.cells))
        self._pipeline, self._pipeline_key = group, _key(chain)
        self._interrupt()
        yield from group.connect()
        return group

    def healing(self) -> HealClient:
        """A client for a copy that ends with the quorum."""
        self._heal = HealClient(self._process, self._network, self.changed)
        ended = self.gather().ended
        if ended is not None:
            self._heal.shutdown(ended.why)
        return self._heal

    def fail_quorum(self, why: str) -> tuple[str, tuple[int, ...]]:
        """A collective failed here: end the quorum for all."""
        gather = self.gather()
        if gather.ended is None:
            gather.abort(why)
        self._end_reduce(why)
        ended = gather.ended
        return (ended.why, ended.suspects) if ended is not None else (why, ())

    def fail_pipeline(self, why: str) -> None:
        """The chain broke here: let the neighbours notice."""
        self._end_pipeline(why)

    def _group(self, name: str, plan: Plan, rank: int, size: int) -> Group:
        return Group(
            self._process,
            self._network,
            name=name,
            store=plan.rendezvous.store,
            rank=rank,
            size=size,
            changed=self.changed,
            connect_s=self._connect_s,
        )

    def _interrupt(self) -> bool:
        if self.newest is None:
            return False
        connected = self._pipeline is not None and self._pipeline.connected
        ends = interrupts(self.adopted, self.index, self.newest, connected=connected)
        if ends.pipeline:
            self._end_pipeline(f"{self.newest.quorum} takes the chain apart")
        if ends.quorum:
            if self._gather is not None:
                self._gather.leave()
            self._end_reduce(f"{self.newest.quorum} replaces the quorum")
        return ends.quorum

    def _end_reduce(self, why: str) -> None:
        if self._reduce_group is not None:
            self._reduce_group.shutdown(why)
        if self._heal is not None:
            self._heal.shutdown(why)
            self._heal = None

    def _end_pipeline(self, why: str) -> None:
        if self._pipeline is not None:
            self._pipeline.shutdown(why)
        self._pipeline = self._pipeline_key = None


def _key(chain: Chain) -> tuple[QuorumId, int]:
    return (chain.formed_in, chain.replica)


def _ignore(plan: Plan) -> None:
    del plan
