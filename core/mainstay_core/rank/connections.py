"""Decides which connections a trainer keeps, ends and makes for the plan that it has adopted.

Two kinds of connections with different lives: the quorum's (gather, stage group, a running
heal) end with the quorum; the chain's pipeline group lives as long as its own cells stay
(protocol section 3). Any thread may end them; the main thread then comes back from whatever it
waits in.

Invariant: everything the main thread may block in is registered here, under the lock, before
it blocks, and a plan that ends it is checked under the same lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import QuorumId
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.rank.state import interrupts
from mainstay_core.wire.plan import Chain, Plan


class GroupEnded(MainstayError):  # noqa: N818 - a state, not a failure
    """A group was shut, or an operation on it failed.

    No failure of the process that sees it: the quorum may live on under a newer plan.

    Args:
        why: the reason in one sentence.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Monitor(Protocol):
    """A lock whose holder may wake all who wait for a change of what it guards."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *_: Any) -> Any: ...
    def notify_all(self) -> None: ...


class Gather(Protocol):
    """One member's side of a quorum's gather."""

    @property
    def ended(self) -> QuorumAborted | None: ...
    def leave(self) -> None: ...
    def abort(self, why: str) -> None: ...


class Ends(Protocol):
    """A connection that another thread can end."""

    def shutdown(self, why: str) -> None: ...


class Groups(Ends, Protocol):
    """The groups that connect the ranks of a chain."""

    name: str

    @property
    def connected(self) -> bool: ...


GatherT = TypeVar("GatherT", bound=Gather)
GroupT = TypeVar("GroupT", bound=Ends)
ChainT = TypeVar("ChainT", bound=Groups)
EndsT = TypeVar("EndsT", bound=Ends)


class QuorumConnections(ABC, Generic[GatherT, GroupT, ChainT]):
    """The connections of one trainer.

    Args:
        changed: guards everything here; notified when a plan arrives or the state moves on.
    """

    def __init__(self, changed: Monitor) -> None:
        self._guard = changed
        self.newest: Plan | None = None
        self.adopted: Plan | None = None
        self.index = -1
        """Of this rank in the adopted plan."""
        self._gather: GatherT | None = None
        self._reduce_group: GroupT | None = None
        self._pipeline: ChainT | None = None
        self._pipeline_key: tuple[QuorumId, int] | None = None
        self._heal: Ends | None = None

    # What the shell makes; nothing here waits -------------------------------------

    @abstractmethod
    def _join(self, plan: Plan, index: int) -> GatherT:
        """Return this member's side of the plan's gather."""

    @abstractmethod
    def _group(self, name: str, rank: int, size: int) -> GroupT:
        """Return a group that is not connected yet."""

    @abstractmethod
    def _chain_groups(self, name: str, plan: Plan, chain: Chain) -> ChainT:
        """Return what connects this rank's chain, not connected yet."""

    # Plans --------------------------------------------------------------------------

    def see(self, plan: Plan) -> None:
        """Take note of a plan (any thread) and end what it makes useless."""
        with self._guard:
            if self.newest is None or plan.quorum.id > self.newest.quorum.id:
                self.newest = plan
                self._interrupt()
            self._guard.notify_all()

    def has_newer(self, known: int) -> bool:
        """Return whether a plan has arrived whose quorum has an id above ``known``."""
        return self.newest is not None and self.newest.quorum.id > known

    def adopt(self, plan: Plan, index: int) -> GatherT:
        """Enter a quorum: leave the former, keep the pipeline if the chain is the same.

        Raises:
            QuorumAborted: a newer unplanned plan is known already.
        """
        with self._guard:
            self.leave_quorum()
            self.adopted, self.index = plan, index
            chain = plan.chain_of(index)
            if chain is None or self._pipeline_key != _key(chain):
                self._end_pipeline("the chain has changed")
            if self._interrupt():
                raise QuorumAborted("a newer plan is known")
            self._gather = self._join(plan, index)
            # A joiner of the former quorum may wait for its state: it is refused now.
            self._guard.notify_all()
            return self._gather

    def leave_quorum(self) -> None:
        """Drop gather, reduction group and a running heal; the pipeline stays."""
        with self._guard:
            if self._gather is not None:
                self._gather.leave()
            self._end_reduce("this trainer has moved on")
            self._gather = self._reduce_group = None

    def leave(self) -> None:
        """Drop everything: this trainer is no member any more."""
        with self._guard:
            self.leave_quorum()
            self._end_pipeline("this trainer is no member any more")

    # What the main thread blocks in -----------------------------------------------------

    def gather(self) -> GatherT:
        """Return the quorum's gather."""
        assert self._gather is not None
        return self._gather

    def begin_reduce_group(self, position: int) -> tuple[GroupT | None, bool]:
        """Return the group of the position's members, and whether it is still to be connected.

        None stands for the group where this rank is the only member.

        Raises:
            GroupEnded: the quorum has ended.
        """
        with self._guard:
            plan = self.adopted
            assert plan is not None
            members = [m.index for m in plan.position_members(position)]
            if self._reduce_group is not None or len(members) == 1:
                return self._reduce_group, False
            ended = self.gather().ended
            if ended is not None:
                raise GroupEnded(ended.why)
            name = f"{plan.job}/{plan.quorum}/p{position}"
            group = self._group(name, members.index(self.index), len(members))
            self._reduce_group = group
            return group, True

    @property
    def pipeline_name(self) -> str:
        """Name of the connected pipeline group that is kept; empty if there is none."""
        with self._guard:
            return self._pipeline.name if self._pipeline and self._pipeline.connected else ""

    def begin_pipeline(self, agreed: str) -> tuple[ChainT | None, bool]:
        """Return the groups of this rank's chain, and whether they are still to be connected.

        None stands for the groups where a chain is a single rank.

        Args:
            agreed: name of the group that every cell of the chain still had when the quorum
                settled. If empty, one is connected under a name of this quorum.

        Raises:
            GroupEnded: a cell of the chain is gone, or a plan took it apart.
        """
        with self._guard:
            plan = self.adopted
            assert plan is not None
            chain = plan.chain_of(self.index)
            if chain is None or len(chain.cells) == 1:
                return None, False
            name = agreed or f"{plan.job}/{plan.quorum}/r{chain.replica}"
            if self._pipeline is not None and self._pipeline.name == name:
                return self._pipeline, False
            if agreed:
                raise GroupEnded(f"{agreed} has ended since the quorum settled")
            self._end_pipeline("a cell of the chain has lost its pipeline")
            groups = self._chain_groups(name, plan, chain)
            self._pipeline, self._pipeline_key = groups, _key(chain)
            self._interrupt()
            return groups, True

    def healing(self, client: EndsT) -> EndsT:
        """Have the client of a heal end with the quorum; return the client."""
        with self._guard:
            self._heal = client
            ended = self.gather().ended
            if ended is not None:
                client.shutdown(ended.why)
            return client

    # Ends ---------------------------------------------------------------------------------

    def fail_quorum(self, why: str) -> tuple[str, tuple[int, ...], bool]:
        """End the quorum for all, as a collective failed here.

        Returns:
            Why it ended, the suspects, and whether others had ended it before.
        """
        with self._guard:
            gather = self.gather()
            if gather.ended is None:
                gather.abort(why)
            self._end_reduce(why)
            ended = gather.ended
        return (
            (ended.why, ended.suspects, ended.was_told) if ended is not None else (why, (), False)
        )

    def fail_pipeline(self, why: str) -> None:
        """End the chain's groups, as it broke here: the neighbours are to notice."""
        with self._guard:
            self._end_pipeline(why)

    def lost_quorum(self, why: str) -> None:
        """Wake the collectives: the gather was ended by others (any thread)."""
        with self._guard:
            self._end_reduce(why)

    def _interrupt(self) -> bool:
        """End what the newest plan makes useless; return whether that includes the quorum."""
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
