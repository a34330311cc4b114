"""Follows one segment on its way to its holders."""

from __future__ import annotations

from collections.abc import Iterable

from mainstay_core.base.bounds import cut
from mainstay_core.base.ids import PodUid
from mainstay_core.segments.frames import AskDigests, AskSeals, Segment, ToldDigests, ToldSeals
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.records import quorum_of, refusal_of
from mainstay_core.wire.segments import SegmentHeader
from mainstay_core.wire.unit_digests import MAX_TOLD_SEALS, UnitDigests
from mainstay_core.wire.votes import CommitRecord


class Delivery:
    """The answers of the holders to which a segment is sent.

    Args:
        holders: pods that are to confirm it.
    """

    def __init__(self, holders: Iterable[PodUid]) -> None:
        self._left = set(holders)
        self._problems: dict[PodUid, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether every holder has answered, or is gone."""
        return not self._left

    @property
    def why_not(self) -> str:
        """Why the segment is not at all its holders; empty if it is. It must be over."""
        assert self.is_over
        told = (f"{pod}: {why}" for pod, why in sorted(self._problems.items()))
        return cut("; ".join(told))

    def answered(self, holder: PodUid, why_not: str = "") -> None:
        """Take a holder's answer, or what became of it; an empty sentence confirms."""
        if holder in self._left:
            self._left.discard(holder)
            if why_not:
                self._problems[holder] = why_not


def note_needless(index: SegmentIndex, message: Segment) -> None:
    """Note the version before which the sender of a segment needs nothing.

    What is sent again drops nothing. It may come from a pod that was away while the job went back
    to an older checkpoint: then its window is one that the job has not come to again.

    Args:
        index: of the store that gets the segment.
        message: with it.
    """
    lineage, version = message.header.key.lineage, message.keep_from
    if message.is_again and version > index.from_version and _has_older(index, lineage, version):
        return
    index.keep_from(lineage, version)


def note_passed(index: SegmentIndex, record: CommitRecord) -> str:
    """Keep a commit that another store passes on, and see by it whether the job went back.

    No trainer says that in a pod without a member. But who commits a step again, before the window
    that was complete here, goes on from an older checkpoint: what quorums before it had written of
    later steps counts no more, and would take the room of what is written now. Without such a thing
    the commit only came late.

    Args:
        index: of the store that gets the commit.
        record: with it.

    Returns:
        Why it is not kept, where it came damaged: then it changes nothing here. Else it is empty.
    """
    why = refusal_of(record)
    if why:
        return why
    step, quorum = record.commit.step, quorum_of(record)
    if record.lineage == index.lineage and step < index.from_version:
        left = [
            s.header.key
            for s in index.segments()
            if s.header.key.version > step and 0 < s.header.quorum < quorum
        ]
        for key in left:
            index.discard_outdated(key)
        if left:
            index.keep_from(record.lineage, step, may_go_back=True, drops_later=False)
            outdated = {r.commit.step for r in index.records if quorum_of(r) < quorum}
            commits = index.commits
            commits.drop(outdated.__contains__)
    return index.record(record, is_passed=True)


def note_digests(index: SegmentIndex, told: UnitDigests) -> bool:
    """Keep the digests of a step's units, if what is kept here is of their lineage and no newer.

    Args:
        index: of the store that gets them.
        told: by a trainer of the pod, or passed on by another store.

    Returns:
        Whether they are kept.
    """
    if told.lineage != index.lineage or told.step < index.from_version:
        return False
    commits = index.commits
    return commits.keep_digests(told)


def answer_seals(index: SegmentIndex, asked: AskSeals) -> ToldSeals:
    """Return which digests of a position's units a store has, those of the newest steps."""
    commits = index.commits
    kept = commits.list_digests(asked.position)[-MAX_TOLD_SEALS:]
    return ToldSeals(position=asked.position, seals=tuple(digests.seal for digests in kept))


def list_lacking(index: SegmentIndex, told: ToldSeals) -> tuple[UnitDigests, ...]:
    """Return the digests of a position's units that a store has and another one lacks.

    Args:
        index: of the store that has them.
        told: by the other one.
    """
    commits, known = index.commits, frozenset(told.seals)
    return tuple(d for d in commits.list_digests(told.position) if d.seal not in known)


def answer_digests(index: SegmentIndex, asked: AskDigests) -> ToldDigests:
    """Return what a store knows of the units in a step."""
    commits = index.commits
    told = commits.digests_of(asked.step, asked.position)
    if told is not None and told.lineage != asked.lineage:
        told = None
    return ToldDigests(request=asked.request, digests=told)


def is_here(index: SegmentIndex, header: SegmentHeader) -> bool:
    """Return whether what is sent again is kept already, so that it must take no place.

    What a newer quorum wrote stays, whatever its bytes. What an older one wrote stays only if it is
    the same: votes may have refused it.

    Args:
        index: of the store that gets the segment.
        header: of what is sent again.
    """
    found = index.find(header.key)
    if found is None or found.is_doubted:
        return False
    here = found.header
    is_same = (here.digest, here.window) == (header.digest, header.window)
    return here.quorum >= header.quorum or is_same


def _has_older(index: SegmentIndex, lineage: int, version: int) -> bool:
    if lineage != index.lineage:
        return False
    segments, records = index.segments(), index.records
    return any(s.header.key.version < version for s in segments) or any(
        record.commit.step < version for record in records[:1]
    )
