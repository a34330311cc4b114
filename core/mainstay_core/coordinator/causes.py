"""Holds why quorums ended: what members told of it, and which causes and exceptions come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.bounds import Count
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import Cause
from mainstay_core.wire.formats import suspicion_of_format_1


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldCause:
    """The cause for which a member gave up its quorum, as it tells."""

    teller: Slot
    kind: Cause
    sources: tuple[Slot, ...] = ()
    was_told: bool = False
    """Whether it learnt only from others that the quorum has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A cause for which quorums ended, and how often it came back."""

    kind: Cause
    sources: tuple[Slot, ...]
    """Slots from which the fault came, each time."""
    witnesses: tuple[Slot, ...]
    """Slots whose trainers saw it, each time."""
    evidence: str = ""
    """What the first of them said last."""
    count: int = 1
    """Quorums that ended for it."""
    climbed: int = 1
    """The same count as far as it decides the rung: where a rung is taken again, it stays there."""
    rung: int = 0
    """What was done about it last, as a number of :class:`~.repeats.Rung`."""
    excluded: tuple[Slot, ...] = ()
    """Who was left out then."""
    hosts: tuple[PodUid, ...] = ()
    """Pods where these quorums met, the last one last."""
    furthest: Count = field(default=0, metadata=OMITTED)
    """Most steps that were committed when it came: a restart goes back behind where it comes."""
    doubted: tuple[Slot, ...] = field(default=(), metadata=OMITTED)
    """Devices between which a chain of the same members was asked last to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Members that gave up the quorum, and whom they suspect, without sure evidence."""

    first_s: float
    reporters: tuple[Slot, ...]
    suspects: tuple[Slot, ...]
    evidence: str
    observed_at_s: float
    """Wall clock of the first reporter."""
    differing: tuple[Slot, ...] = ()
    """Slots whose state differed in the votes, as the first reporter tells."""
    causes: tuple[ToldCause, ...] = ()
    """By reporter: what each tells first."""
    doubted: tuple[Slot, ...] = ()
    """Slots that have computed a type differently, as the first reporter tells: the members go on
    when another trainer computes it, too."""
    repeats: Count | None = field(default=None, metadata=OMITTED)
    """Number of the fork that is due, in a job that repeats the lineage of another run."""
    unreached: bool = field(default=False, metadata=OMITTED)
    """Whether no store of segments brings a lost stage back: nothing else has failed."""

    @staticmethod
    def modernized(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON of a suspicion with its slots, whatever the api that stored the state."""
        return data if "differing" in data else suspicion_of_format_1(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCrash:
    """An exception at a step that is not committed yet, and how often the step was tried."""

    crash: Crash
    """The newest of those that are alike."""
    last_id: int
    """The newest quorum in which it ended a trainer."""
    tries: int
    """Quorums in which it did."""
