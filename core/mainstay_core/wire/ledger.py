"""Defines the ledger's entries: digests of every committed step, and of the final state."""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.wire.plan import Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialDigest:
    """The digest of a partial that was sent into a reduction, and its sender."""

    partial: Partial
    slot: Slot
    digest: str


LedgerKey = tuple[int, int, int]
"""The key of an entry: (step, stage, inner)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One position's entry of one committed step (design section 8).

    Digests add up over positions. The digest of inner rank 0 alone contains what the inner ranks
    hold in copies.
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
        """Return the key of the entry."""
        return self.step, self.stage, self.inner

    def agrees_with(self, other: LedgerEntry) -> bool:
        """Return whether two cells report the same commit.

        Each knows only the partials that it sent.
        """
        return (self.quorum, self.masters) == (other.quorum, other.masters)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalDigests:
    """Digests of one position at the end of a job. They add up over positions."""

    stage: int
    version: int
    params: str
    masters: str
    optimizer: str
    data: str
    """Sum over all committed steps of the digests of the samples."""
    inner: int = 0
