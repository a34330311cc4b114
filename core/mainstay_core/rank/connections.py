"""Decides which connections a trainer keeps, ends and makes for the plan that it has adopted.

Connections have different lives (protocol section 3). Gather and a running heal end with the
quorum. The stage group is kept over planned plans while its members stay, and ends with a quorum
that fails. The chain's pipeline group lives as long as its own cells stay. Any thread may end
them; the main thread then comes back from whatever it waits in.

Invariant: everything the main thread may block in is registered here, under the lock, before
it blocks, and a plan that ends it is checked under the same lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, QuorumId, Slot
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.rank.state import interrupts
from mainstay_core.wire.plan import Chain, Member, Plan

Identity = tuple[Slot, Incarnation]
"""One life of a trainer."""


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
    """The groups that connect the ranks of a chain, or the group of a position."""

    name: str

    @property
    def connected(self) -> bool: ...


GatherT = TypeVar("GatherT", bound=Gather)
GroupT = TypeVar("GroupT", bound=Groups)
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
        self._stage_group: GroupT | None = None
        self._stage_members: tuple[Identity, ...] = ()
        """Of the stage group, in the order of its ranks."""
        self._guard_groups: dict[int, GroupT] = {}
        """Of owners and guards, by the stage of the first end: they end with the quorum."""
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
        """Enter a quorum: leave the former, and keep the groups whose members are the same.

        Raises:
            QuorumAborted: a newer unplanned plan is known already.
        """
        with self._guard:
            failed = self._gather is None or self._gather.ended is not None
            self._leave_gather()
            self._end_guard_groups("another quorum has other guards")
            self.adopted, self.index = plan, index
            if failed or not _stay(self._stage_members, plan, index):
                self._end_stage_group("the members of the position have changed")
            chain = plan.chain_of(index)
            if chain is None or self._pipeline_key != _key(chain):
                self._end_pipeline("the chain has changed")
            if self._interrupt():
                raise QuorumAborted("a newer plan is known")
            self._gather = self._join(plan, index)
            # A joiner of the former quorum may wait for its state: it is refused now.
            self._guard.notify_all()
            return self._gather

    def leave(self) -> None:
        """Drop everything: this trainer is no member any more."""
        with self._guard:
            self._leave_gather()
            self._end_guard_groups("this trainer is no member any more")
            self._end_stage_group("this trainer is no member any more")
            self._end_pipeline("this trainer is no member any more")

    def _leave_gather(self) -> None:
        if self._gather is not None:
            self._gather.leave()
        self._gather = None
        self._end_heal("this trainer has moved on")

    # What the main thread blocks in -----------------------------------------------------

    def gather(self) -> GatherT:
        """Return the quorum's gather."""
        assert self._gather is not None
        return self._gather

    @property
    def stage_group_name(self) -> str:
        """Name of the connected stage group that is kept; empty if there is none."""
        with self._guard:
            group = self._stage_group
            return group.name if group and group.connected else ""

    def standing_stage_group(self, agreed: str) -> GroupT | None:
        """Return the group of the position's members if it is connected already; None if not.

        Nothing is connected here: a rank that still computes need not wait for others.

        Args:
            agreed: as of :meth:`begin_stage_group`.
        """
        with self._guard:
            group = self._stage_group
            stands = (
                group is not None
                and group.connected
                and group.name == self._stage_group_name(agreed)
            )
            return group if stands else None

    def begin_stage_group(self, agreed: str) -> tuple[GroupT | None, bool]:
        """Return the group of the position's members, and whether it is still to be connected.

        None stands for the group where this rank is the only member.

        Args:
            agreed: name of the group that every member of the position still had when the quorum
                settled. If empty, one is connected under a name of this quorum.

        Raises:
            GroupEnded: the quorum has ended.
        """
        with self._guard:
            plan = self.adopted
            assert plan is not None
            position = plan.position_of(self.index)
            members = _identities(plan, position)
            if len(members) == 1:
                return None, False
            name = self._stage_group_name(agreed)
            if self._stage_group is not None and self._stage_group.name == name:
                return self._stage_group, False
            ended = self.gather().ended
            if ended is not None:
                raise GroupEnded(ended.why)
            if agreed:
                raise GroupEnded(f"{agreed} has ended since the quorum settled")
            self._end_stage_group("a member of the position has lost the stage group")
            own = _identity(plan.members[self.index])
            group = self._group(name, members.index(own), len(members))
            self._stage_group, self._stage_members = group, members
            return group, True

    def begin_guard_group(self, end: int, members: Sequence[int]) -> tuple[GroupT, bool]:
        """Return the group of the owners and guards of an end, and whether it is to be connected.

        Args:
            end: its stage; the first one's of ends that share the group.
            members: their indices, in the order of the group's ranks.

        Raises:
            GroupEnded: the quorum has ended.
        """
        with self._guard:
            plan = self.adopted
            assert plan is not None
            if end in self._guard_groups:
                return self._guard_groups[end], False
            ended = self.gather().ended
            if ended is not None:
                raise GroupEnded(ended.why)
            name = f"{plan.job}/{plan.quorum}/g{end}"
            group = self._group(name, members.index(self.index), len(members))
            self._guard_groups[end] = group
            return group, True

    def _stage_group_name(self, agreed: str) -> str:
        plan = self.adopted
        assert plan is not None
        return agreed or f"{plan.job}/{plan.quorum}/p{plan.position_of(self.index)}"

    def stage_order(self) -> list[int]:
        """Return the indices of the position's members in the order of the stage group's ranks.

        A group that is kept has the order of the plan under which it was connected.
        """
        with self._guard:
            plan = self.adopted
            assert plan is not None
            members = plan.position_members(plan.position_of(self.index))
            if self._stage_group is None:
                return [m.index for m in members]
            index_of = {_identity(m): m.index for m in members}
            return [index_of[member] for member in self._stage_members]

    @property
    def pipeline_name(self) -> str:
        """Name of the connected pipeline group that is kept; empty if there is none."""
        with self._guard:
            return self._pipeline.name if self._pipeline and self._pipeline.connected else ""

    def begin_pipeline(self, agreed: str) -> tuple[ChainT | None, bool]:
        """Return the groups of this rank's chain, and whether they are still to be connected.

        None stands for the groups where a chain is a single rank. A replay connects those of the
        cell alone; the rest of the chain is connected when it computes.

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
                return self._pipeline, not self._pipeline.connected
            if agreed:
                raise GroupEnded(f"{agreed} has ended since the quorum settled")
            self._end_pipeline("a cell of the chain has lost its pipeline")
            groups = self._chain_groups(name, plan, chain)
            self._pipeline, self._pipeline_key = groups, _key(chain)
            self._interrupt()
            return groups, True

    def healing(self, client: EndsT) -> EndsT:
        """Have the client of a heal, or a wait for copies, end with the quorum; return it."""
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
            self._end_collectives(why)
            ended = gather.ended
        return (
            (ended.why, ended.suspects, ended.was_told) if ended is not None else (why, (), False)
        )

    def fail_pipeline(self, why: str) -> None:
        """End the chain's groups, as it broke here: the neighbours are to notice."""
        with self._guard:
            self._end_pipeline(why)

    def lost_quorum(self, quorum: QuorumId, why: str) -> None:
        """Wake the collectives: the gather of a quorum was ended by others (any thread).

        What is told late, of a quorum that was left meanwhile, concerns nobody: the next one may
        have kept the groups.
        """
        with self._guard:
            if self.adopted is not None and self.adopted.quorum == quorum:
                self._end_collectives(why)

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
            self._end_collectives(f"{self.newest.quorum} replaces the quorum")
        return ends.quorum

    def _end_collectives(self, why: str) -> None:
        """End what waits for the quorum's members; the ended group says why to who asks for it."""
        if self._stage_group is not None:
            self._stage_group.shutdown(why)
        for group in self._guard_groups.values():
            group.shutdown(why)
        self._end_heal(why)

    def _end_heal(self, why: str) -> None:
        if self._heal is not None:
            self._heal.shutdown(why)
            self._heal = None

    def _end_guard_groups(self, why: str) -> None:
        for group in self._guard_groups.values():
            group.shutdown(why)
        self._guard_groups = {}

    def _end_stage_group(self, why: str) -> None:
        if self._stage_group is not None:
            self._stage_group.shutdown(why)
        self._stage_group, self._stage_members = None, ()

    def _end_pipeline(self, why: str) -> None:
        if self._pipeline is not None:
            self._pipeline.shutdown(why)
        self._pipeline = self._pipeline_key = None


def _key(chain: Chain) -> tuple[QuorumId, int]:
    return (chain.formed_in, chain.replica)


def _identity(member: Member) -> Identity:
    """A trainer that was started again on the same slot is another member."""
    return (member.slot, member.incarnation)


def _stay(members: Sequence[Identity], plan: Plan, index: int) -> bool:
    """Return whether these, in any order, are the members of a member's position."""
    return frozenset(members) == frozenset(_identities(plan, plan.position_of(index)))


def _identities(plan: Plan, position: int) -> tuple[Identity, ...]:
    return tuple(_identity(m) for m in plan.position_members(position))
