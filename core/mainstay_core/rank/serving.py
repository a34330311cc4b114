"""Decides when a joiner may copy a trainer's state, and when a copy is good (protocol section 7).

Parameters are only written by apply, apply needs the joiner's vote, and the joiner votes
after its copy. So a state that is complete at a quorum's version stays so, without a lock,
until the quorum is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from mainstay_core.base.bounds import Count, Index, Name
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import QuorumId
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import SettleReport

T = TypeVar("T")

MAX_TOGETHER = 4
"""Sources that a joiner copies from at a time. Each costs it a thread and the memory of a chunk,
and four fill a link that one does not."""


class HealFailed(MainstayError):  # noqa: N818 - a state, not a failure
    """A copy of a living cell's state did not complete or has not its announced digest."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state that a joiner asks for.

    Raises:
        ValueError: the text of the quorum names none.
    """

    quorum: Name
    position: Index
    """By stage, then by inner rank."""
    version: Count
    masters_only: bool = field(default=False, metadata=OMITTED)
    """Whether the optimizer's state is left out: another position is made of these parameters."""
    guarded: Index | None = field(default=None, metadata=OMITTED)
    """The end of the pipeline whose guarded blocks are asked for instead of the state: of a cell of
    that stage, or of one that guards them."""

    def __post_init__(self) -> None:
        QuorumId.parse(self.quorum)

    @property
    def whole(self) -> Wanted:
        """The same state with all that belongs to it."""
        return replace(self, masters_only=False, guarded=None)

    @property
    def number(self) -> int:
        """Id of the quorum."""
        return QuorumId.parse(self.quorum).id


def may_copy(wanted: Wanted, served: Wanted | None, adopted: Plan | None) -> bool | None:
    """Return whether a joiner's request is served; None while that is still to be seen.

    Args:
        wanted: what is asked for.
        served: what is complete here; None while a quorum settles.
        adopted: the plan of this trainer.
    """
    if served == wanted.whole:
        return True
    if served is not None and served.quorum == wanted.quorum and served.version > wanted.version:
        return False
    return False if adopted is not None and adopted.quorum.id > wanted.number else None


@dataclass(frozen=True, slots=True)
class Source:
    """A member from which a joiner copies."""

    slot: str
    """Names it to people."""
    address: str
    """Where it serves."""


Sources = Sequence[Source]
"""Members from which a joiner copies, best first."""


class CopyOrder(NamedTuple):
    """The state of another position that a maker copies, and from whom."""

    known: Sources
    """Who has it."""
    wanted: Wanted
    expected: str
    """Digest of its masters; "" if no report names it."""

    @property
    def first(self) -> Sources:
        """From whom it is copied first, at the same time; empty if nobody has it."""
        return next(iter(copy_attempts(self.known, self.expected)), ())


def sources_of(plan: Plan, reports: Sequence[SettleReport], members: Sequence[int]) -> Sources:
    """Return members as sources, as their reports say where they serve."""
    return tuple(Source(str(plan.members[i].slot), reports[i].heal_address) for i in members)


def copy_attempts(sources: Sequence[T], expected: str) -> tuple[tuple[T, ...], ...]:
    """Return from whom a member copies at a time, one attempt after the other.

    Several sources together are quickest. They are asked one by one where no report names the
    digest, as two whole copies are compared then, and where a copy of several is wrong, as that
    tells which of them was.

    Args:
        sources: who has the state, best first.
        expected: the masters' digest that the quorum's reports name; "" if none does.
    """
    alone = tuple((source,) for source in sources)
    together = tuple(sources[:MAX_TOGETHER])
    return (together, *alone) if expected and len(sources) > 1 else alone


async def copy_from(
    copy: Callable[[Sources, Wanted, str], Coroutine[Any, Any, str]],
    known: Sources,
    wanted: Wanted,
    expected: str,
    warn: Callable[[str], None],
) -> str:
    """Copy what other cells hold, attempt by attempt; return the digest of the masters.

    Args:
        copy: copies from some of them at once; returns the digest of the masters.
        known: who has the state, best first.
        wanted: what is copied.
        expected: the masters' digest that the quorum's reports name; "" if none does.
        warn: tells of an attempt that was in vain.

    Raises:
        HealFailed: no attempt was good.
    """
    why = f"no member of position {wanted.position} has version {wanted.version}"
    for sources in copy_attempts(known, expected):
        try:
            masters = await copy(sources, wanted, expected)
        except HealFailed as failure:
            warn(f"healing failed: {(why := str(failure))}")
            continue
        if expected or len(known) == 1:
            return masters
        expected, why = masters, "no other source is left to compare the copy with"
    raise HealFailed(why)


def disbelieved_part(own: Sequence[str], told: Mapping[str, Sequence[str]]) -> int | None:
    """Return the number of the first part of a copy that others contradict; None: there is none.

    A part is believed if more of those who have the state hold the same than anything else. With
    two of them that differ nobody knows who is right, so neither is.

    Args:
        own: digests of the parts of the copy.
        told: those of others' states, by their slots; equally many each.
    """
    for number, mine in enumerate(own):
        counts = Counter(digests[number] for digests in told.values())
        others = max((n for digest, n in counts.items() if digest != mine), default=0)
        if others and counts[mine] <= others:
            return number
    return None


def copy_problem(masters: str, expected: str) -> str:
    """Return what is wrong with a copy all of whose chunks are right; empty if it is good.

    Args:
        masters: digest of the masters that have arrived.
        expected: the masters' digest that the quorum's reports name; "" if none does.
    """
    return f"has digest {masters}, not {expected}" if expected and masters != expected else ""
