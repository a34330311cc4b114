"""Defines votes, commits and settle reports: what the members of a quorum tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.wire.plan import Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStat:
    """The statistics of one shard type in a step, as its supplier knows them."""

    type: int
    loss_sum: float | None = None
    """Sum over tokens, from the last stage."""
    tokens: int | None = None
    data: str | None = None
    """Digest of the consumed samples, from the first stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """A rank's status of durable checkpoints.

    It travels in each vote, and alone where no step follows.
    """

    checkpoint_safe: int | None = None
    """Newest version of which this rank has safely written its part."""
    checkpoint_nonce: str = ""
    """Nonce of the quorum in which that part was copied. Parts with different nonces never mix."""
    checkpoint_busy: bool = False
    """Whether it still writes a part, or renames a version."""
    durable: int = 0
    """Newest durable version that it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStatus(SaveStatus):
    """The status where no step follows.

    It carries a digest of the state that was written, as no vote will.
    """

    state: str = ""
    """Digest of the position's masters at the version that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote(SaveStatus):
    """A rank's vote on a step (protocol section 4)."""

    step: int
    attempt: int
    ok: bool
    problem: str = ""
    """Why the vote is not ok, in one sentence."""
    norms_sq: tuple[float, ...]
    """Squared norm (fp64) of the summed gradient, one per block of the stage, in model order. Of
    what the inner ranks hold in copies, only that of inner rank 0 counts."""
    gradient: str
    """Digest of the position's reduced gradient."""
    state: str
    """Digest of the position's masters at version = step, before this step is applied."""
    stats: tuple[TypeStat, ...]
    newest_plan: int
    """Id of the newest plan seen. If it is equal for all, a planned plan is adopted now."""
    newest_nonce: str
    copies: str = ""
    """Digest of the gradients and masters that the inner ranks of a stage hold in copies. It is
    equal on all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The result of the votes of a committed step. It is equal on every rank."""

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
    """A rank's report of what it holds when a quorum settles (protocol sections 4 and 6)."""

    index: int
    valid: bool
    """Whether it holds a valid state of its assigned stage and lineage."""
    lineage: int = 0
    version: int = 0
    certified_in: str | None = None
    """Quorum (as text) of the last commit; None at version 0 or when the state came from a disk."""
    commit: Commit | None = None
    """The last commit. It lets a rank that holds the mark roll forward."""
    chain: str = ""
    """Commit chain: the hash of all commits. Equal histories have equal commit chains."""
    state: str = ""
    """Digest of the masters at ``version``."""
    held: tuple[Partial, ...] = ()
    held_in: int = 0
    """Id of the quorum in which the oldest of ``held`` was begun."""
    refused_in: int = -1
    """Newest quorum known to have refused a step over a bad state. What was computed in it, or
    before, may come from that state's activations. A rank with an invalid state reports it as
    well."""
    mark: str | None = None
    """Quorum (as text) that reduced the gradient of step = version, if it is held."""
    settled: int = -1
    """Id of the last quorum whose settle this rank completed with a valid state."""
    heal_address: str = ""
    durable: int = 0
    """Newest durable version that it has seen; 0 is the seed's initial state."""
    pipeline: str = ""
    """Name of the connected pipeline group that it keeps for its chain; empty if it has none."""
