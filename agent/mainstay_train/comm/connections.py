"""The connections of a trainer under the plan that it has adopted.

Two groups of sockets with different lives: the quorum's (gather, stage group, a
running heal) end with the quorum; the chain's pipeline group lives as long as
its own cells stay (protocol section 3). Any thread may end them; the main thread
then comes back from whatever it waits in.

Invariant: everything the main thread may block in is registered here, under the
lock, before it blocks, and a plan that ends it is checked under the same lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from mainstay_core.base.ids import QuorumId
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.rank.machine import interrupts
from mainstay_core.wire.plan import Chain, Plan
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.gather_client import GatherClient
from mainstay_train.comm.group import Group, GroupEnded

MAX_FORMER = 64
"""Groups whose keys are still to be deleted from their stores, most of which are not used again."""


class _Former(NamedTuple):
    """A group that this process has left."""

    store: str
    name: str
    rank: int


class Endable(Protocol):
    """Something that blocks on sockets of its own and that another thread can end."""

    def shutdown(self, why: str) -> None:
        """End it: whoever is blocked in it raises an error that says why."""


EndableT = TypeVar("EndableT", bound=Endable)


class Connections:
    """The sockets of one trainer.

    Args:
        settings: addresses and the job's bounds.
        backend: ``gloo`` or ``nccl``.
    """

    def __init__(self, settings: TrainerSettings, backend: str) -> None:
        self._settings, self._backend = settings, backend
        self.on_plan: Callable[[dict[str, Any]], None] | None = None
        """Called (any thread) with a plan, as JSON, that came another way than by the uplink."""
        self.changed = threading.Condition(threading.RLock())
        """Guards everything here; notified when a plan arrives or the version grows."""
        self.newest: Plan | None = None
        self.ended = False
        """Whether the job is over: there will be no further plan."""
        self.adopted: Plan | None = None
        self.index = -1
        self._gather: GatherClient | None = None
        self._reduce_group: Group | None = None
        self._pipeline: ChainGroups | None = None
        self._pipeline_key: tuple[QuorumId, int] | None = None
        self._heal: Endable | None = None
        self._former: deque[_Former] = deque(maxlen=MAX_FORMER)

    def see(self, plan: Plan) -> None:
        """Take note of a plan (any thread) and end what it makes useless."""
        with self.changed:
            if self.newest is None or plan.quorum.id > self.newest.quorum.id:
                self.newest = plan
                self._interrupt()
            self.changed.notify_all()

    def end(self) -> None:
        """The job is over (any thread): wake whoever waits for a plan."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def adopt(self, plan: Plan, index: int) -> GatherClient:
        """Enter a quorum: leave the former, keep the pipeline if the chain is the same.

        Raises:
            QuorumAborted: a newer unplanned plan is known already.
        """
        with self.changed:
            self.leave_quorum()
            self.adopted, self.index = plan, index
            chain = plan.chain_of(index)
            if chain is None or self._pipeline_key != _key(chain):
                self._end_pipeline("the chain has changed")
            if self._interrupt():
                raise QuorumAborted("a newer plan is known")
            self._gather = GatherClient(
                plan.rendezvous.gather,
                str(plan.quorum),
                index,
                len(plan.members),
                self._settings.incarnation,
                self._settings.address,
                self._on_abort,
                self.on_plan,
            )
            return self._gather

    def leave_quorum(self) -> None:
        """Drop gather, reduction group and a running heal; the pipeline stays."""
        with self.changed:
            if self._gather is not None:
                self._gather.leave()
            self._end_reduce("this trainer has moved on")
            self._drop(self._reduce_group)
            self._gather = self._reduce_group = None

    def leave(self) -> None:
        """Drop everything: this trainer is no member any more."""
        with self.changed:
            self.leave_quorum()
            self._end_pipeline("this trainer is no member any more")

    def gather(self) -> GatherClient:
        """The quorum's gather."""
        assert self._gather is not None
        return self._gather

    def reduce_group(self, position: int) -> Group | None:
        """The group of the position's members, connected; None when there is only this one.

        Raises:
            GroupEnded: a member is gone or the quorum ended.
        """
        with self.changed:
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
        group.connect()
        return group

    @property
    def pipeline_name(self) -> str:
        """Name of the connected pipeline group that is kept; empty if there is none."""
        with self.changed:
            return self._pipeline.name if self._pipeline and self._pipeline.connected else ""

    def pipeline(self, agreed: str) -> ChainGroups | None:
        """The groups of this rank's chain, connected; None where a chain is a single rank.

        Args:
            agreed: name of the group that every cell of the chain still had when the quorum
                settled. If empty, one is connected under a name of this quorum: under an old
                one the keys of the former group would be found.

        Raises:
            GroupEnded: a cell of the chain is gone, or a plan took it apart.
        """
        with self.changed:
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
            groups = self._chain_groups(name, plan, chain)
            self._pipeline, self._pipeline_key = groups, _key(chain)
            self._interrupt()
        groups.connect()
        return groups

    def _chain_groups(self, name: str, plan: Plan, chain: Chain) -> ChainGroups:
        """Pipeline and inner mesh of this rank, not yet connected."""
        rank, width = plan.members[self.index].rank, plan.ranks_per_stage
        pipeline = mesh = None
        if plan.num_stages > 1:
            place = chain.cells.index(self.index)
            pipeline = self._group(name, plan, place, len(chain.cells))
        if width > 1:
            mesh = self._group(f"{name}/s{rank.stage}", plan, rank.inner, width)
        return ChainGroups(name, pipeline, mesh)

    def healing(self, client: EndableT) -> EndableT:
        """Have the client of a heal end with the quorum; returns the client."""
        with self.changed:
            self._heal = client
            ended = self.gather().ended
            if ended is not None:
                client.shutdown(ended.why)
            return client

    def fail_quorum(self, why: str) -> tuple[str, tuple[int, ...]]:
        """A collective failed here: end the quorum for all; returns why and the suspects."""
        with self.changed:
            gather = self.gather()
            if gather.ended is None:
                gather.abort(why)
            self._end_reduce(why)
            ended = gather.ended
        return (ended.why, ended.suspects) if ended is not None else (why, ())

    def fail_pipeline(self, why: str) -> None:
        """The chain broke here: let the neighbours notice."""
        with self.changed:
            self._end_pipeline(why)

    def _group(self, name: str, plan: Plan, rank: int, size: int) -> Group:
        store = plan.rendezvous.store
        former = [f for f in self._former if f.store == store and f.name != name]
        for done in former:
            self._former.remove(done)
        return Group(
            name=name,
            store=store,
            rank=rank,
            size=size,
            address=self._settings.address,
            backend=self._backend,
            timeout_s=self._settings.config.operation_timeout_s,
            connect_s=self._settings.config.connect_s,
            former=[(f.name, f.rank) for f in former],
        )

    def _interrupt(self) -> bool:
        """End what the newest plan makes useless; whether that includes the quorum."""
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
            for group in self._pipeline.groups:
                self._drop(group)
        self._pipeline = self._pipeline_key = None

    def _drop(self, group: Group | None) -> None:
        """What a group left in its store is deleted when that store is used next."""
        if group is not None:
            self._former.append(_Former(group.store, group.name, group.rank))

    def _on_abort(self, why: str, suspects: tuple[int, ...]) -> None:
        """The gather ended by others' doing (its reader thread): wake the collectives."""
        del suspects
        with self.changed:
            self._end_reduce(why)


def _key(chain: Chain) -> tuple[QuorumId, int]:
    return (chain.formed_in, chain.replica)
