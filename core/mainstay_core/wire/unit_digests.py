"""Defines the digests of a position's units in a step: what a replay of the step has to come to.

They are parts of what the votes told of the position, and add up to it. Each cell computes them
beside its vote, and its pod's store keeps them and passes them on to the pods that keep the cell's
copies. So whoever makes a lost state anew can compare the units whose state it has, while others
are frozen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Annotated

from mainstay_core.base import codec
from mainstay_core.base.bounds import Count, Index, Longest
from mainstay_core.base.bounds import Digest as DigestText
from mainstay_core.base.digest import Digest, total
from mainstay_core.wire.votes import RECORD_SEAL_BYTES, CommitRecord

DIGEST_CHARS = 32
"""Hexadecimal digits of one digest."""
MAX_DIGESTED_UNITS = 15_000
"""Units of a position of which digests are told: those of both kinds fit into the head of a message
between pods. A position with more units is compared as a whole alone."""

MAX_TOLD_SEALS = 1024
"""Steps of a position of which a store tells that it has the digests: the newest. What it has of
older ones is passed on to it again."""

PackedDigests = Annotated[str, Longest(DIGEST_CHARS * MAX_DIGESTED_UNITS)]
"""Digests of units, by number, one behind the other."""
SealText = Annotated[str, Longest(2 * RECORD_SEAL_BYTES)]
"""A seal of digests of units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitDigests:
    """The digests of a position's units in a committed step."""

    lineage: Count
    position: Index
    step: Count
    gradients: PackedDigests
    """Of each unit's part of the reduced gradient."""
    masters: PackedDigests
    """Of each unit's masters at version = step, before the step was applied."""
    seal: DigestText = field(default="", metadata=codec.OMITTED)
    """Digest of all the rest (:func:`seal_digests`), by whoever wrote it."""

    @property
    def size_bytes(self) -> int:
        """Return about how many bytes they take."""
        return 512 + len(self.gradients) + len(self.masters)


def seal_digests(told: UnitDigests) -> UnitDigests:
    """Return digests of units with the digest of their canonical JSON."""
    text = codec.dumps(replace(told, seal=""))
    return replace(
        told, seal=hashlib.blake2b(text.encode(), digest_size=RECORD_SEAL_BYTES).hexdigest()
    )


def are_sealed(told: UnitDigests) -> bool:
    """Return whether digests of units are as they were written; without a seal they are not."""
    return bool(told.seal) and seal_digests(told).seal == told.seal


def unpack(packed: str) -> tuple[Digest, ...]:
    """Return digests that lie one behind the other.

    Raises:
        ValueError: they are no whole number of digests.
    """
    if len(packed) % DIGEST_CHARS:
        raise ValueError(f"{len(packed)} digits are no whole number of digests of {DIGEST_CHARS}")
    starts = range(0, len(packed), DIGEST_CHARS)
    return tuple(Digest.parse(packed[at : at + DIGEST_CHARS]) for at in starts)


def why_void(told: UnitDigests, record: CommitRecord, position: int, num_units: int) -> str:
    """Return why digests of units count for nothing; empty if a replay can go by them.

    Their sums are what the votes told, so no majority has to be asked for: whoever tells other sums
    is wrong.

    Args:
        told: by some pod's store.
        record: of the step's commit, by which the replay goes.
        position: that is made anew.
        num_units: of it.
    """
    step = record.commit.step
    if not are_sealed(told):
        return "they do not have the seal that they were written with"
    if (told.lineage, told.position, told.step) != (record.lineage, position, step):
        return f"they are of step {told.step} of position {told.position}"
    if position >= min(len(record.gradients), len(record.states)):
        return f"what votes told of step {step} is not known"
    for what, packed, whole in (
        ("gradients", told.gradients, record.gradients[position]),
        ("masters", told.masters, record.states[position]),
    ):
        try:
            digests = unpack(packed)
        except ValueError as error:
            return str(error)
        if len(digests) != num_units:
            return f"they have {what} of {len(digests)} units, the position has {num_units}"
        if total(digests).hex() != whole:
            return f"those of the {what} do not add up to what the votes told of the position"
    return ""
