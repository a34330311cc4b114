"""Names who is who, and to which agreement a message belongs.

A *rank* is a place in a plan, a *slot* is an accelerator of a pod, and an *incarnation* is one life
of a trainer process on a slot. A plan maps ranks to (slot, incarnation) pairs. Nothing else may
address a trainer, since a restarted process on the same slot is another trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

from mainstay_core.base.bounds import Count, Index, Name, SlotIndex
from mainstay_core.base.codec import OMITTED

JobUid = NewType("JobUid", Name)
PodUid = NewType("PodUid", Name)
Incarnation = NewType("Incarnation", Name)
"""Random name of one life of a trainer process."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Slot:
    """One accelerator of one pod."""

    pod: PodUid
    index: SlotIndex

    def __str__(self) -> str:
        return f"{self.pod}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The node and accelerator of a slot, as far as they are known: others may get the same."""

    node: Name = field(default="", metadata=OMITTED)
    """Name of the node, or failure domain; empty: not known, so that each pod is a node of its
    own."""
    accelerator: Name = field(default="", metadata=OMITTED)
    """UUID of the accelerator; empty: it has none that tells one."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RankId:
    """A place in a plan: all three coordinates, always.

    ``replica`` is None for a follower: a living cell without a chain.
    """

    replica: Index | None
    stage: Index
    inner: Index = 0

    @property
    def position(self) -> tuple[int, int]:
        """Return (stage, inner). The ranks of one position have interchangeable states."""
        return self.stage, self.inner

    def __str__(self) -> str:
        replica = "f" if self.replica is None else f"r{self.replica}"
        return f"{replica}.s{self.stage}.i{self.inner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumId:
    """An agreed membership: ``id`` orders quorums, ``nonce`` identifies one.

    Two quorums may share an id after the store fell back to an older state;
    their nonces differ, so their messages never mix (protocol section 8).
    """

    id: Count
    nonce: Name

    def __str__(self) -> str:
        return f"q{self.id}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> QuorumId:
        """Return the quorum that a text names, as ``str`` writes it: ``q7-3f9a``.

        Raises:
            ValueError: it names none.
        """
        number, dash, nonce = text.removeprefix("q").partition("-")
        if not (number.isdecimal() and number.isascii() and dash and nonce):
            raise ValueError(f"{text!r} names no quorum")
        return cls(id=int(number), nonce=nonce)
