"""Defines votes, commits and settle reports: what the members of a quorum tell each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Annotated

from mainstay_core.base import codec
from mainstay_core.base.bounds import (
    MAX_BLOCKS,
    MAX_DOUBTED,
    MAX_FLOWS,
    MAX_MEMBERS,
    MAX_STATISTICS,
    MAX_TYPES,
    Address,
    AnyFloat,
    Count,
    CountOrNone,
    Digest,
    Finite,
    Index,
    Longest,
    Name,
    Sentence,
    TypeIndex,
    cut_fields,
)
from mainstay_core.base.ids import Hardware, Slot
from mainstay_core.dmr.witness import Exchanged, Sent
from mainstay_core.wire.plan import Partial
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.windows import Measures, WindowBasis

Statistics = Annotated[tuple[Count, ...], Longest(MAX_STATISTICS)]
"""Integers that blocks count while they compute, such as the tokens of each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStat:
    """The statistics of one shard type in a step, as its supplier knows them."""

    type: TypeIndex
    loss_sum: AnyFloat | None = None
    """Sum over tokens, from the last stage."""
    tokens: Count | None = None
    data: Digest | None = None
    """Digest of the consumed samples, from the first stage."""
    statistics: Statistics = field(default=(), metadata=codec.OMITTED)
    """From every stage: the integers that its blocks counted, in model order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeType:
    """A type that a member holds, and the chain that computed it: copies of several never mix."""

    type: TypeIndex
    quorum: Count
    """Id of the quorum in which it was computed."""
    replica: Index
    """Of the chain, in that quorum's plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessAccount:
    """The account that a rank gives of a type which other chains compute in this step, too."""

    type: TypeIndex
    forward: Annotated[tuple[Digest, ...], Longest(MAX_FLOWS)] = ()
    """Digests of what it sent to the next stage, by micro-batch."""
    backward: Annotated[tuple[Digest, ...], Longest(MAX_FLOWS)] = ()
    """Digests of what it sent to the stage before, by micro-batch."""
    sent: Annotated[tuple[Sent, ...], Longest(4 * MAX_FLOWS)] = field(
        default=(), metadata=codec.OMITTED
    )
    """In place of both, where micro-batches take two routes: it sends at most twice each way."""
    weights: Annotated[tuple[Digest, ...], Longest(MAX_BLOCKS)]
    """Digests of the type's gradient, and of what votes tell of the type."""
    exchanged: Annotated[tuple[Exchanged, ...], Longest(6 * MAX_FLOWS)] = field(
        default=(), metadata=codec.OMITTED
    )
    """What it gave to the collectives of its cell, and got, by pass, micro-batch and visit."""
    is_partial: bool = field(default=False, metadata=codec.OMITTED)
    """Whether there were collectives of which it does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtedAccount:
    """The account of one cell, of a type on which chains may disagree: a settle hears of it."""

    quorum: Count
    """Id of the quorum in which its chain computed the type."""
    attempt: Count
    """Of the step, in that quorum."""
    replica: Index
    """Of its chain, in that quorum's plan."""
    slot: Slot
    """The device that computed."""
    account: WitnessAccount
    hardware: Hardware | None = field(default=None, metadata=codec.OMITTED)
    """What the slot ran on then, as the plan said."""


BadTypes = Annotated[tuple[TypeIndex, ...], Longest(MAX_TYPES)]
"""Shard types of the step of which a check has found, after they were used, that they are wrong."""


RECORD_SEAL_BYTES = 16
"""Of the digest of a commit's record, as of all other digests."""
MAX_GUARDED = 2
"""Ends of a pipeline of which one rank keeps or guards blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedDigest:
    """The digest of the blocks of a pipeline's end that guards keep, at the version of a rank."""

    stage: Index
    """The end."""
    masters: Digest
    rest: Digest
    """Of a part of what is not masters: which part is a function of the version."""


GuardedDigests = Annotated[tuple[GuardedDigest, ...], Longest(MAX_GUARDED)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """A rank's status of durable checkpoints.

    It travels in each vote, and alone where no step follows.
    """

    checkpoint_safe: Count | None = None
    """Newest version of which this rank has safely written its part."""
    checkpoint_nonce: Name = ""
    """Nonce of the quorum in which that part was copied. Parts with different nonces never mix."""
    checkpoint_busy: bool = False
    """Whether it still writes a part, or completes a version."""
    durable: Count = 0
    """Newest durable version that it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStatus(SaveStatus):
    """The status where no step follows.

    It carries a digest of the state that was written, as no vote will.
    """

    state: Digest = ""
    """Digest of the position's masters at the version that is saved."""
    rest: Digest = field(default="", metadata=codec.OMITTED)
    """Digest of the position's whole state beside the masters, after the last step of a job whose
    trainers check what they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A rank's status of the snapshots and logs that it writes into its pod's memory."""

    logged: bool
    """Whether its part of the step's reduced gradient is at all its holders."""
    copied: Count = 0
    """All states that it wrote at versions below this one are at all their holders."""
    measures: Measures | None = field(default=None, metadata=codec.OMITTED)
    """What it has measured of copies and steps; None where the job says how long a window is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(SaveStatus):
    """A rank's vote on a step (protocol section 4)."""

    step: Count
    attempt: Count
    ok: bool
    problem: Sentence = ""
    """Why the vote is not ok, in one sentence."""
    norms_sq: Annotated[tuple[AnyFloat, ...], Longest(MAX_BLOCKS)]
    """Squared norm (fp64) of the summed gradient, one per block of the stage, in model order. Of
    what the inner ranks hold in copies, only that of inner rank 0 counts."""
    gradient: Digest
    """Digest of the position's reduced gradient."""
    state: Digest
    """Digest of the position's masters at version = step, before this step is applied."""
    stats: Annotated[tuple[TypeStat, ...], Longest(MAX_TYPES)]
    newest_plan: Count
    """Id of the newest plan seen. If it is equal for all, a planned plan is adopted now."""
    newest_nonce: Name
    copies: Digest = ""
    """Digest of the gradients and masters that the inner ranks of a stage hold in copies. It is
    equal on all of them."""
    snapshots: SnapshotStatus | None = field(default=None, metadata=codec.OMITTED)
    """None in a job without snapshots."""
    rest: Digest = field(default="", metadata=codec.OMITTED)
    """Digest of a part of the position's state beside the masters, at version = step: which part is
    a function of the step. Empty in a job whose trainers do not check what they compute."""
    witness: WitnessAccount | None = field(default=None, metadata=codec.OMITTED)
    """Of the type that several chains compute in this step, if this rank's does."""
    clean_from: Count | None = field(default=None, metadata=codec.OMITTED)
    """First step in which no witness has agreed with this rank's device yet; None in a job without
    a witness."""
    bad: BadTypes = field(default=(), metadata=codec.OMITTED)
    """Types that this rank has computed wrongly. Their copies are void in every position, with all
    that they were summed into."""
    guarded: GuardedDigests = field(default=(), metadata=codec.OMITTED)
    """Of what it guards of other stages, and of what others guard of its own, at version = step."""

    def __post_init__(self) -> None:
        cut_fields(self, "problem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The result of the votes of a committed step. It is equal on every rank."""

    step: Count
    norm: Finite
    """Global L2 norm of the mean gradient, before clipping."""
    scale: Finite
    """Factor from summed to applied gradient: 1/tokens times the clip factor."""
    tokens: Count
    loss: Finite
    """Mean loss per token."""
    data: Digest
    """Digest of all samples of the step."""
    data_total: Digest = ""
    """Sum of the data digests of all steps up to this one."""
    statistics: Statistics = field(default=(), metadata=codec.OMITTED)
    """The integers that the model's blocks counted, in model order, each added over all types."""
    norms_sq: Annotated[tuple[Finite, ...], Longest(MAX_BLOCKS)] = field(
        default=(), metadata=codec.OMITTED
    )
    """Squared norm of the summed gradient of each block, in model order, in a job that may go on
    approximately: they weigh what a lost stage is made anew of. No part of the commit chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """A commit, and what its votes said of each position: enough to apply its step again later."""

    lineage: Count
    commit: Commit
    certified_in: Name
    """Quorum (as text) whose votes made the commit."""
    chain: Digest
    """Commit chain after it."""
    gradients: Annotated[tuple[Digest, ...], Longest(MAX_MEMBERS)]
    """Digest of each position's reduced gradient of the step."""
    states: Annotated[tuple[Digest, ...], Longest(MAX_MEMBERS)]
    """Digest of each position's masters at version = step, before the step was applied."""
    forks: Digest = field(default="", metadata=codec.OMITTED)
    """Digest of the history of these states; empty if they are exact."""
    seal: Digest = field(default="", metadata=codec.OMITTED)
    """Digest of all the rest (:func:`seal_record`), by whoever wrote it. Whoever goes by a record
    checks it first."""


def seal_record(record: CommitRecord) -> CommitRecord:
    """Return a record with the digest of its canonical JSON, as a reader decodes it."""
    commit = record.commit
    # Another process reads each of them as a float, also where a whole number was written.
    as_read = replace(
        commit,
        norm=float(commit.norm),
        scale=float(commit.scale),
        loss=float(commit.loss),
        norms_sq=tuple(map(float, commit.norms_sq)),
    )
    text = codec.dumps(replace(record, commit=as_read, seal=""))
    digest = hashlib.blake2b(text.encode(), digest_size=RECORD_SEAL_BYTES).hexdigest()
    return replace(record, seal=digest)


def is_sealed(record: CommitRecord) -> bool:
    """Return whether a record is as it was written; one without a seal is not."""
    return bool(record.seal) and seal_record(record).seal == record.seal


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleReport:
    """A rank's report of what it holds when a quorum settles (protocol sections 4 and 6)."""

    index: Index
    valid: bool
    """Whether it holds a valid state of its assigned stage and lineage."""
    lineage: Count = 0
    version: Count = 0
    certified_in: Name | None = None
    """Quorum (as text) of the last commit; None at version 0 or when the state came from a disk."""
    commit: Commit | None = None
    """The last commit. It lets a rank that holds the mark roll forward."""
    chain: Digest = ""
    """Commit chain: the hash of all commits. Equal histories have equal commit chains."""
    state: Digest = ""
    """Digest of the masters at ``version``."""
    held: Annotated[tuple[Partial, ...], Longest(MAX_TYPES)] = ()
    held_in: Count = 0
    """Id of the quorum in which the oldest of ``held`` was begun."""
    refused_in: CountOrNone = -1
    """Newest quorum known to have refused a step over a bad state. What was computed in it, or
    before, may come from that state's activations. A rank with an invalid state reports it as
    well."""
    mark: Name | None = None
    """Quorum (as text) that reduced the gradient of step = version, if it is held."""
    settled: CountOrNone = -1
    """Id of the last quorum whose settle this rank completed with a valid state."""
    heal_address: Address = ""
    durable: Count = 0
    """Newest durable version it has seen; 0 is the seed's initial state."""
    pipeline: Name = ""
    """Name of the connected pipeline group that it keeps for its chain; empty if it has none."""
    stage_group: Name = ""
    """Name of the connected group of its position's members that it keeps; empty if it has none."""
    basis: WindowBasis | None = field(default=None, metadata=codec.OMITTED)
    """What the next window of snapshots is planned from. The member of each position tells it that
    has been one for the longest."""
    kept_from: Count = field(default=0, metadata=codec.OMITTED)
    """First version of the newest window of snapshots that votes completed, as far as it knows."""
    last_gradient: Digest = field(default="", metadata=codec.OMITTED)
    """In a job with snapshots: digest of its position's reduced gradient of the last commit's step,
    as the votes on it told; empty if it does not know."""
    last_masters: Digest = field(default="", metadata=codec.OMITTED)
    """Likewise the digest of its masters before that step."""
    history: History = field(default=(), metadata=codec.OMITTED)
    """Forks that the state contains."""
    mark_gradient: Digest = field(default="", metadata=codec.OMITTED)
    """In a job with snapshots: digest of the mark's gradient, if it has voted with it."""
    made: Annotated[tuple[MadeType, ...], Longest(MAX_TYPES)] = field(
        default=(), metadata=codec.OMITTED
    )
    """By which chains the types of ``held`` were computed."""
    bad: BadTypes = field(default=(), metadata=codec.OMITTED)
    """Types of the step that this rank knows to be wrong: by its own checks, or by votes."""
    doubted: Annotated[tuple[DoubtedAccount, ...], Longest(MAX_DOUBTED)] = field(
        default=(), metadata=codec.OMITTED
    )
    """What cells of its position have told of the type that several chains compute, those that are
    gone by now among them; and its own account of it, if no vote has heard that yet."""
    guarded: GuardedDigests = field(default=(), metadata=codec.OMITTED)
    """Of what it guards of other stages, at its version."""
