"""The plan: who is a member of a quorum, and who computes what. Frozen values that travel.

Every message is encoded by :mod:`mainstay_core.base.codec`. Unknown fields are accepted, so a
newer peer may say more. A golden JSON file for each format is kept with the tests.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot

FORMAT = 1
"""The format of what this room describes, as plans carry it in their field ``version``."""


class Method(enum.StrEnum):
    """How a plan came to be: the ladder's answer (design section 5)."""

    START = "start"
    MASK = "mask"
    REFORM = "re-form"
    JOIN = "join"
    RESTART = "restart"
    WAIT = "wait"
    HAND_OVER = "hand-over"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Partial:
    """A run of complete shard types of one lane, summed in ascending order.

    Invariant: ``first`` is the lane's first type, or ``first == last``.
    """

    lane: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank of a quorum."""

    index: int
    """Position in the plan's members; the rank's number in gathers."""
    rank: RankId
    slot: Slot
    incarnation: Incarnation
    address: str
    """Host address of the pod, for data connections."""
    since: int
    """Id of the quorum since which it is a member without a break."""
    joining: bool = False
    """Whether it was no member of the quorum before: it supplies nothing in the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A replica: one member per position, by stage and then by inner rank.

    ``formed_in`` names the plan that formed it; its pipeline group and inner
    meshes live as long as its members stay the same (protocol section 3).
    """

    replica: int
    cells: tuple[int, ...]
    formed_in: QuorumId


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where a quorum meets: a member pod's gather server and its launcher's store."""

    pod: PodUid
    gather: str
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The agreed membership and who computes what. Durable before it is visible."""

    job: JobUid
    quorum: QuorumId
    lineage: int = 0
    planned: bool
    """A join between faults: adopted at a step boundary, interrupts nobody."""
    unplanned_id: int
    """Largest id <= quorum.id of an unplanned plan: a rank below it is interrupted."""
    method: Method
    members: tuple[Member, ...]
    chains: tuple[Chain, ...]
    suppliers: tuple[int, ...]
    """Replica that computes each shard type, by type."""
    all_reduce_stack: int
    """Largest number of types of one replica."""
    rendezvous: Rendezvous
    reason: str
    faults_fired: tuple[str, ...] = ()
    """Injected faults that already fired: they do not fire twice."""
    created_at_s: float = 0.0
    hosts: tuple[Rendezvous, ...] = ()
    """Of every pod with a member, where its gather server and store are: supervisors pass the plan
    on to each other, and a store that lost the job knows where the next quorum may meet."""
    replicas_wanted: int = 0
    """Replicas that were wanted when it was made; a store that lost the job learns it from here."""
    suspend_wanted: bool = False
    """Whether the job was to be suspended when it was made; for a store that lost the job, too."""
    pause: bool = False
    """Whether its members save their state and compute no further: the job is to be suspended."""
    outgoing: tuple[Member, ...] = ()
    """Members of the quorum before that this planned plan drops: the others need their votes until
    all have adopted it. A store that lost the job looks after them by this alone."""
    version: int = FORMAT

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
        """Return the member that this life of a trainer is, if any."""
        for member in self.members:
            if member.slot == slot and member.incarnation == incarnation:
                return member
        return None

    def position_members(self, position: int) -> tuple[Member, ...]:
        """Return the members whose states are interchangeable, in index order."""
        where = divmod(position, self.ranks_per_stage)
        return tuple(m for m in self.members if m.rank.position == where)

    def position_of(self, index: int) -> int:
        """Return the number of a member's position: by stage, then by inner rank."""
        rank = self.members[index].rank
        return rank.stage * self.ranks_per_stage + rank.inner

    def chain_of(self, index: int) -> Chain | None:
        """Return the chain a member belongs to; None for a follower."""
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
        return 1 + max(m.rank.inner for m in self.members)

    @property
    def positions(self) -> tuple[tuple[Member, ...], ...]:
        """Members per position, in index order: a replica has one in each."""
        width = self.ranks_per_stage
        found: list[list[Member]] = [[] for _ in range(self.num_stages * width)]
        for member in self.members:
            found[member.rank.stage * width + member.rank.inner].append(member)
        return tuple(tuple(members) for members in found)
