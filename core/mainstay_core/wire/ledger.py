"""The ledger's entries: digests of every committed step, and of the final state."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.wire.plan import Partial


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

    def agrees_with(self, other: LedgerEntry) -> bool:
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
