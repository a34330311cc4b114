"""Votes, commits and settle reports: what the members of a quorum tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.wire.plan import Partial


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
