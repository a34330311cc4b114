"""What travels between trainers, supervisors and the api: frozen values.

Every message is encoded by :mod:`mainstay_core.base.codec`; unknown fields are
accepted, so a newer peer may say more. ``VERSION`` is the version of this wire
format; a golden JSON file per version is kept with the tests.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from mainstay_core.base.codec import dumps
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot

VERSION = 1


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
    version: int = VERSION

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON of the plan."""
        return hashlib.sha256(dumps(self).encode()).hexdigest()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStat:
    """What one supplier knows of one shard type of a step."""

    type: int
    loss_sum: float | None = None
    """Sum over tokens, from the last stage."""
    tokens: int | None = None
    data: str | None = None
    """Digest of the consumed samples, from the first stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """What a rank says of durable checkpoints: in each vote, and where no step follows."""

    checkpoint_safe: int | None = None
    """Newest version of which this rank's checkpoint part is safely written."""
    checkpoint_nonce: str = ""
    """Nonce of the quorum in which that part was copied: parts of different ones never mix."""
    checkpoint_busy: bool = False
    """Whether it still writes a part, or completes a version."""
    durable: int = 0
    """Newest complete durable version that it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStatus(SaveStatus):
    """The same where no step follows: no vote will find a state bad that is to be saved."""

    state: str = ""
    """Digest of the position's masters at the version that is saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(SaveStatus):
    """A rank's vote on a step: the exchange of gradient norms (protocol section 4)."""

    step: int
    attempt: int
    ok: bool
    problem: str = ""
    """Why not ok, in one sentence."""
    norms_sq: tuple[float, ...]
    """fp64 norm squared of the summed gradient, one per block of the stage, in model order; of what
    the inner ranks hold in copies, inner rank 0 alone counts."""
    gradient: str
    """Digest of the position's reduced gradient."""
    state: str
    """Digest of the position's masters at version = step, before this step is applied."""
    stats: tuple[TypeStat, ...]
    newest_plan: int
    """Id of the newest plan seen: equal for all means a planned plan is adopted now."""
    newest_nonce: str
    copies: str = ""
    """Digest of gradient and masters that the inner ranks of a stage hold in copies: equal on
    all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What the votes of a committed step say together: equal on every rank."""

    step: int
    norm: float
    """Global L2 norm of the mean gradient, before clipping."""
    scale: float
    """Factor from summed to applied gradient: 1/tokens times the clip factor."""
    tokens: int
    loss: float
    """Mean loss per token."""
    data: str
    """Digest of all samples of the step."""
    data_total: str = ""
    """Sum of the data digests of all steps up to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleReport:
    """What a rank holds when a quorum settles (protocol sections 4 and 6)."""

    index: int
    valid: bool
    """Whether it holds a valid state of its assigned stage and lineage."""
    lineage: int = 0
    version: int = 0
    certified_in: str | None = None
    """Quorum (as text) of the last commit; None at version 0 or when the state came from a disk."""
    commit: Commit | None = None
    """The last commit; lets a rank that holds the mark roll forward."""
    chain: str = ""
    """Digest chain of the commits: equal histories have equal chains."""
    state: str = ""
    """Digest of the masters at ``version``."""
    held: tuple[Partial, ...] = ()
    held_in: int = 0
    """Id of the quorum in which the oldest of ``held`` was begun."""
    refused_in: int = -1
    """Newest quorum known to have refused a step over a bad state: what was computed in it, or
    before, may come from that state's activations. Told of an invalid state as well."""
    mark: str | None = None
    """Quorum (as text) that reduced the gradient of step = version, if it is held."""
    settled: int = -1
    """Id of the last quorum whose settle this rank completed with a valid state."""
    heal_address: str = ""
    durable: int = 0
    """Newest complete durable version it has seen; 0 is the seed's initial state."""
    pipeline: str = ""
    """Name of the connected pipeline group that it keeps for its chain; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialDigest:
    """A partial that was sent into a reduction, and by whom."""

    partial: Partial
    slot: Slot
    digest: str


LedgerKey = tuple[int, int, int]
"""(step, stage, inner): what there is one entry of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One position's entry of one committed step (design section 8).

    Digests add up over positions: what the inner ranks hold in copies is in
    that of inner rank 0 alone.
    """

    step: int
    stage: int
    quorum: QuorumId
    gradient: str
    masters: str
    """Digest of the masters at version step + 1."""
    data: str
    loss: float
    norm: float
    tokens: int
    step_s: float
    """Duration of the step on the reporting rank."""
    replicas: int
    attempt: int = 0
    partials: tuple[PartialDigest, ...] = ()
    committed_at_s: float = 0.0
    inner: int = 0

    @property
    def key(self) -> LedgerKey:
        """What it is the entry of."""
        return self.step, self.stage, self.inner

    def tells_same_as(self, other: LedgerEntry) -> bool:
        """Whether two cells tell of the same commit: each knows what it has sent itself."""
        return (self.quorum, self.masters) == (other.quorum, other.masters)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalDigests:
    """Digests of one position at the end of a job; they add up over positions."""

    stage: int
    version: int
    params: str
    masters: str
    optimizer: str
    data: str
    """Sum over all committed steps of the digests of the samples."""
    inner: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The five times of a recovery, in seconds (design 13.9); None until known."""

    detect_s: float | None = None
    """Death to the first fact at the api."""
    decide_s: float | None = None
    """First fact to the plan being durable."""
    fence_s: float | None = None
    """Plan to the last survivor holding all settle reports."""
    load_s: float | None = None
    """From there to state and table ready on every survivor."""
    resume_s: float | None = None
    """From there to the next commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What was done about one fault."""

    fault: str
    """What happened, with rank and slot named."""
    method: Method
    exact: bool
    reason: str
    quorum: QuorumId
    from_step: int
    """Step that was interrupted."""
    slots: tuple[Slot, ...] = ()
    started_at_s: float = 0.0
    times: StageTimes = StageTimes()
    first_commit_after_s: float | None = None
    lost_steps: int = 0
    redone_steps: int = 0
    done: bool = False
