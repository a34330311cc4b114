"""Defines the plan: who is a member of a quorum, and who computes what.

Plans are frozen values that travel. :mod:`mainstay_core.base.codec` encodes every message. Unknown
fields are accepted, so a newer peer may say more. The tests keep a golden JSON file for each
format.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from mainstay_core.base.bounds import (
    MAX_FAULTS,
    MAX_MEMBERS,
    MAX_TYPES,
    Address,
    Count,
    Index,
    Instant,
    Longest,
    Name,
    Sentence,
    TypeIndex,
    cut_fields,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import Hardware, Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.dmr.settings import CheckRules
from mainstay_core.wire.reinitialisation import ForkOrder
from mainstay_core.wire.taints import MAX_TAINTS, Taint

FORMAT = 1
"""Format of plans, votes and the ledger, as plans carry it in their field ``version``."""


class Method(enum.StrEnum):
    """The method by which a plan was made: the ladder's answer (design section 5)."""

    START = "start"
    MASK = "mask"
    REFORM = "re-form"
    JOIN = "join"
    RESTART = "restart"
    WAIT = "wait"
    REPLAY = "replay"
    HAND_OVER = "hand-over"
    SUSPEND = "suspend"
    APPROXIMATE = "approximate"

    @property
    def code(self) -> str:
        """The method as Kubernetes writes the reasons of conditions and Events: ``HandOver``."""
        return "".join(word.capitalize() for word in self.split("-"))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Partial:
    """A run of complete shard types of one lane, summed in ascending order.

    Invariant: ``first`` is the lane's first type, or ``first == last``.
    """

    lane: TypeIndex
    first: TypeIndex
    last: TypeIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a quorum."""

    index: Index
    """Place in the plan's list of members, and the rank's number in gathers."""
    rank: RankId
    slot: Slot
    incarnation: Incarnation
    address: Address
    """Host address of the pod, for data connections."""
    since: Count
    """Id of the quorum since which it has been a member of its position without a break."""
    joining: bool = False
    """Whether it was no member of the quorum before. It then supplies nothing in the first step."""
    clean_from: Count | None = field(default=None, metadata=OMITTED)
    """First step in which no witness has agreed with its device yet, in whichever life of its
    trainers; None: that is not known, or there is no witness."""
    hardware: Hardware | None = field(default=None, metadata=OMITTED)
    """What it runs on, in a job with a witness: two slots may be one device."""


Members = Annotated[tuple[Member, ...], Longest(MAX_MEMBERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A replica: one member per position, by stage and then by inner rank.

    ``formed_in`` names the plan that formed it. Its pipeline group and inner meshes live as long as
    its members stay the same (protocol section 3).
    """

    replica: Index
    cells: Annotated[tuple[Index, ...], Longest(MAX_MEMBERS)]
    formed_in: QuorumId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The meeting place of a quorum: a member pod's gather server."""

    pod: PodUid
    gather: Address
    store: Address = ""
    """What the pod has registered as ``store``: for pods of the version before, else empty."""
    snapshots: Address = field(default="", metadata=OMITTED)
    """The pod's store of segments; empty in a job without snapshots."""
    domain: Name = field(default="", metadata=OMITTED)
    """The pod's failure domain, in a job with snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherStore:
    """The store of segments of a pod that has no member in a plan: a spare, for one."""

    pod: PodUid
    address: Address
    """Where it listens."""
    domain: Name = ""
    """The pod's failure domain."""


MAX_VOIDED = 16
"""Times that a job has gone back before wrong steps of which a plan tells: the newest ones. What is
older was put aside long ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voided:
    """Steps that count no more: a device had computed wrongly, and the job went back before them.

    Checkpoints of them may be left on the disk, entries of them in the ledger.
    """

    quorum: Count
    """Id of the plan with which the job went back: what was committed before it is void."""
    lineage: Count
    """Of that plan."""
    version: Count
    """Newest version that counts of what was computed before."""


def is_void(voided: Iterable[Voided], version: int, lineage: int) -> bool:
    """Return whether a version is one of steps that count no more.

    Args:
        voided: of the newest plan.
        version: the version.
        lineage: in which it was computed.
    """
    return any(version > one.version and lineage < one.lineage for one in voided)


_Guard = TypeVar("_Guard")
_Followed = TypeVar("_Followed")
_Others = ParamSpec("_Others")


class _Derived:
    """Holds what follows from a plan, once it was asked for.

    It is no field: it neither travels nor counts in a comparison. A settle asks for each member,
    so to look at all members each time would cost the square of a quorum's size.
    """

    __slots__ = ("_followed", "_guards", "_positions", "_ranks_per_stage")
    _followed: dict[object, tuple[tuple[object, ...], Any]]
    """By a pure function of the plan: its other arguments the last time, and what it returned."""
    _guards: tuple[object, int, tuple[Any, ...]]
    """What guards were planned for last (blocks, number), and who guards then
    (:func:`mainstay_core.reinitialisation.guards.plan_guards`)."""
    _positions: tuple[tuple[Member, ...], ...]
    _ranks_per_stage: int

    def follow(
        self, function: object, others: tuple[object, ...], decide: Callable[[], _Followed]
    ) -> _Followed:
        """Return what a pure function of the plan and other values comes to (:func:`follows`).

        Args:
            function: which one.
            others: its other arguments, which never change.
            decide: calls it.
        """
        if not hasattr(self, "_followed"):
            object.__setattr__(self, "_followed", {})
        known = self._followed.get(function)
        if known is None or known[0] != others:
            known = self._followed[function] = others, decide()
        followed: _Followed = known[1]
        return followed

    def guards_by(
        self, stages: object, number: int, plan_them: Callable[[], tuple[_Guard, ...]]
    ) -> tuple[_Guard, ...]:
        """Return who guards under this plan: as it was planned before for the same, or anew.

        Args:
            stages: the blocks of every stage; the very object counts.
            number: guards of each end.
            plan_them: plans who guards.
        """
        known = getattr(self, "_guards", None)
        if known is None or known[0] is not stages or known[1] != number:
            known = stages, number, plan_them()
            object.__setattr__(self, "_guards", known)
        guards: tuple[_Guard, ...] = known[2]
        return guards


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Derived):
    """The agreed membership, and who computes what. It is stored before it is visible."""

    job: JobUid
    quorum: QuorumId
    lineage: Count = 0
    planned: bool
    """Whether it was made between faults: it is adopted at a step boundary and interrupts
    nobody."""
    unplanned_id: Count
    """Largest id <= quorum.id of an unplanned plan. A rank in a quorum below it is interrupted."""
    method: Method
    members: Members
    chains: Annotated[tuple[Chain, ...], Longest(MAX_MEMBERS)]
    suppliers: Annotated[tuple[Index, ...], Longest(MAX_TYPES)]
    """Replica that computes each shard type, by type."""
    all_reduce_stack: TypeIndex
    """Largest number of types of one replica."""
    rendezvous: Rendezvous
    reason: Sentence
    faults_fired: Annotated[tuple[Name, ...], Longest(MAX_FAULTS)] = ()
    """Injected faults that have fired, so that they do not fire twice."""
    created_at_s: Instant = 0.0
    hosts: Annotated[tuple[Rendezvous, ...], Longest(MAX_MEMBERS)] = ()
    """The gather server of every pod with a member. Supervisors pass the plan on to each
    other by them, and a store that lost the job learns where the next quorum may meet."""
    replicas_wanted: Index = 0
    """Replicas wanted when the plan was made, for a store that lost the job."""
    suspend_wanted: bool = False
    """Whether the job was to be suspended when the plan was made, for a store that lost the job."""
    pause: bool = False
    """Whether its members write a checkpoint and compute no further, as the job is to be
    suspended."""
    outgoing: Members = ()
    """Members of the quorum before that this planned plan drops. The others need their votes until
    all have adopted it. A store that lost the job knows them from here alone."""
    version: Count = FORMAT
    other_stores: Annotated[tuple[OtherStore, ...], Longest(MAX_MEMBERS)] = field(
        default=(), metadata=OMITTED
    )
    """The stores of segments of living pods without a member, in pod order. They keep copies as
    well, and may have the last ones."""

    fork: ForkOrder | None = field(default=None, metadata=OMITTED)
    """Positions to make anew from others, if no member holds them; None: every state is exact, or
    void."""
    checks: CheckRules | None = field(default=None, metadata=OMITTED)
    """What is checked in this quorum. None, in a plan of an older release: what the job said when
    its trainers were started."""
    voided: Annotated[tuple[Voided, ...], Longest(MAX_VOIDED)] = field(default=(), metadata=OMITTED)
    """Steps that count no more, the newest last. All later plans tell of them."""
    asks_first: bool = field(default=False, metadata=OMITTED)
    """Whether members of which a stage is lost ask before they all load a checkpoint, or the seed:
    what pods keep in memory did not bring the stage back, and it may be made anew of others."""
    taints: Annotated[tuple[Taint, ...], Longest(MAX_TAINTS)] = field(default=(), metadata=OMITTED)
    """Steps that devices may have computed wrongly, as of when the plan was made: for a store that
    lost the job."""

    def __post_init__(self) -> None:
        cut_fields(self, "reason")

    def neighbours(self, pod: PodUid) -> list[str]:
        """Return the gather servers of member pods at ring distances 1, 2, 4, ... from ``pod``.

        A pod without a member stands before the first one.
        """
        hosts = [h for h in self.hosts if h.pod != pod and h.gather]
        position = next((i for i, h in enumerate(self.hosts) if h.pod == pod), 0)
        ring = [*hosts[position:], *hosts[:position]]
        distances = [1 << power for power in range(len(ring).bit_length())]
        return [ring[distance - 1].gather for distance in distances if distance <= len(ring)]

    def member_of(self, slot: Slot, incarnation: Incarnation) -> Member | None:
        """Return the member that this life of a trainer is; None if it is none."""
        for member in self.members:
            if member.incarnation == incarnation and member.slot == slot:
                return member
        return None

    def position_members(self, position: int) -> tuple[Member, ...]:
        """Return the members whose states are interchangeable, in index order."""
        positions = self.positions
        return positions[position] if 0 <= position < len(positions) else ()

    def position_of(self, index: int) -> int:
        """Return the number of a member's position: by stage, then by inner rank."""
        rank = self.members[index].rank
        return rank.stage * self.ranks_per_stage + rank.inner

    def chain_of(self, index: int) -> Chain | None:
        """Return the chain to which a member belongs; None for a follower."""
        for chain in self.chains:
            if index in chain.cells:
                return chain
        return None

    def chain_identity(self, chain: Chain) -> tuple[tuple[Slot, Incarnation], ...]:
        """Return the (slot, incarnation) pairs of a chain, in order of positions."""
        return tuple((self.members[i].slot, self.members[i].incarnation) for i in chain.cells)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(m.rank.stage for m in self.members)

    @property
    def ranks_per_stage(self) -> int:
        """Size of the inner mesh."""
        if not hasattr(self, "_ranks_per_stage"):
            width = 1 + max(m.rank.inner for m in self.members)
            object.__setattr__(self, "_ranks_per_stage", width)
        return self._ranks_per_stage

    @property
    def positions(self) -> tuple[tuple[Member, ...], ...]:
        """Members per position, in index order. A replica has one member in each."""
        if not hasattr(self, "_positions"):
            width = self.ranks_per_stage
            found: list[list[Member]] = [[] for _ in range(self.num_stages * width)]
            for member in self.members:
                found[member.rank.stage * width + member.rank.inner].append(member)
            object.__setattr__(self, "_positions", tuple(tuple(each) for each in found))
        return self._positions


def follows(
    decide: Callable[Concatenate[Plan, _Others], _Followed],
) -> Callable[Concatenate[Plan, _Others], _Followed]:
    """Have a plan keep what a pure function of it and of other values came to last.

    In each step the same work follows from a plan. What it follows from is kept as long as the
    plan, so it is to be small.
    """

    @wraps(decide)
    def once(plan: Plan, /, *args: _Others.args, **named: _Others.kwargs) -> _Followed:
        by_place = tuple(_kept(arg) for arg in args)
        by_name = tuple((name, _kept(arg)) for name, arg in named.items())
        return plan.follow(decide, (by_place, by_name), lambda: decide(plan, *args, **named))

    return once


def _kept(argument: object) -> object:
    """A list may change later, and then it is no longer what was decided on."""
    return tuple(argument) if isinstance(argument, list) else argument
