"""Defines the ledger's entries: digests of every committed step, and of the final state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import (
    MAX_MEMBERS,
    MAX_TYPES,
    Count,
    Digest,
    Finite,
    Index,
    Instant,
    Longest,
    Seconds,
)
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import QuorumId, Slot
from mainstay_core.wire.plan import Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialDigest:
    """The digest of a partial that was sent into a reduction, and its sender."""

    partial: Partial
    slot: Slot
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanDevice:
    """A device, and the first step in which no witness has agreed with it yet."""

    slot: Slot
    clean_from: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedState:
    """The state with which a position began the first step after stages were made anew."""

    fork: Digest
    """Of the fork at that version (:func:`mainstay_core.wire.reinitialisation.digest_of_fork`)."""
    masters: Digest
    """At version = step, as the votes compared them."""


LedgerKey = tuple[int, int, int]
"""The key of an entry: (step, stage, inner)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One position's entry of one committed step (design section 8).

    Digests add up over positions. The digest of inner rank 0 alone contains what the inner ranks
    hold in copies.
    """

    step: Count
    stage: Index
    quorum: QuorumId
    gradient: Digest
    masters: Digest
    """Digest of the masters at version step + 1."""
    data: Digest
    loss: Finite
    norm: Finite
    tokens: Count
    step_s: Seconds
    """Duration of the step on the reporting rank."""
    replicas: Index
    attempt: Count = 0
    partials: Annotated[tuple[PartialDigest, ...], Longest(MAX_TYPES)] = ()
    committed_at_s: Instant = 0.0
    inner: Index = 0
    copy_wait_s: Seconds = 0.0
    """Part of ``step_s``: for which the step waited until the copy of a checkpoint had left the
    state that it was about to change."""

    clean: Annotated[tuple[CleanDevice, ...], Longest(MAX_MEMBERS)] = field(
        default=(), metadata=OMITTED
    )
    """Devices of the position with which a witness has agreed since the step before, as they tell;
    none in a job without a witness."""
    corrects: bool = field(default=False, metadata=OMITTED)
    """Whether votes have found that the state of the cell which told the entry before was bad: this
    one takes its place."""
    history: Digest = field(default="", metadata=OMITTED)
    """Of the forks that the state contains; empty: it is exact. Entries of one step are equal only
    if their histories are."""
    approximate_since: Count | None = field(default=None, metadata=OMITTED)
    """Version of the first of these forks."""
    forked: ForkedState | None = field(default=None, metadata=OMITTED)
    """Of the first step after a fork, unless it was replayed."""

    @property
    def key(self) -> LedgerKey:
        """Return the key of the entry."""
        return self.step, self.stage, self.inner

    def agrees_with(self, other: LedgerEntry) -> bool:
        """Return whether two cells report the same commit.

        Each knows only the partials that it sent. A commit of another history is another one, even
        if it came to the same bits.
        """
        mine, theirs = ((e.quorum, e.masters, e.history) for e in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalDigests:
    """Digests of one position at the end of a job. They add up over positions."""

    stage: Index
    version: Count
    params: Digest
    masters: Digest
    optimizer: Digest
    data: Digest
    """Sum over all committed steps of the digests of the samples."""
    inner: Index = 0
    history: Digest = field(default="", metadata=OMITTED)
    """Of the forks that the state contains; empty: it is exact."""
    approximate_since: Count | None = field(default=None, metadata=OMITTED)
    """Version of the first of these forks."""
