"""Keeps the commits beside the segments of one store: the newest, as many as a report can tell.

With them it keeps the digests of units in their steps, which no report tells: who replays a step
asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mainstay_core.base.ids import QuorumId
from mainstay_core.segments.report_sizes import record_bytes
from mainstay_core.wire.segments import MAX_RECORD_BYTES, MAX_RECORDS
from mainstay_core.wire.unit_digests import UnitDigests, are_sealed
from mainstay_core.wire.votes import CommitRecord, is_sealed

MAX_DIGESTS_BYTES = 16 * 1024 * 1024
"""Of the digests of units that one store keeps. Those of a position with a thousand units take 64
KB a step."""


def quorum_of(record: CommitRecord) -> int:
    """Return the number of the quorum that made a commit; 0 if it is not known."""
    try:
        return QuorumId.parse(record.certified_in).id
    except ValueError:
        return 0


def refusal_of(record: CommitRecord) -> str:
    """Return why a record is not kept: it came damaged. Empty if it did not."""
    if is_sealed(record):
        return ""
    return f"the record of step {record.commit.step} does not have the seal that it was sent with"


class CommitRecords:
    """The commits that one store keeps, one for each step, and the digests of units in them."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[CommitRecord, int]] = {}
        """By step, with its bytes in a report."""
        self._size_bytes = 0
        """Of all of them."""
        self._digests: dict[tuple[int, int], UnitDigests] = {}
        """Of units, by step and position."""
        self._digests_bytes = 0
        self._damaged: set[int] = set()
        """Steps whose commits do not have their seals, as far as these were checked."""
        self.num_discarded = 0
        """Commits that were found damaged, gone ones included."""

    def __bool__(self) -> bool:
        return bool(self._records)

    @property
    def told(self) -> tuple[CommitRecord, ...]:
        """Return all of them by step, ascending."""
        return tuple(record for _, (record, _) in sorted(self._records.items()))

    @property
    def good(self) -> tuple[CommitRecord, ...]:
        """Return the same of those that were not found damaged."""
        kept = sorted(self._records.items())
        return tuple(record for step, (record, _) in kept if step not in self._damaged)

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps whose commits are kept, ascending; a damaged one may name another."""
        return tuple(sorted(self._records))

    @property
    def damaged(self) -> frozenset[int]:
        """Return the steps whose commits are here and were found damaged."""
        return frozenset(self._damaged)

    @property
    def newest(self) -> int:
        """Return the newest step; -1 where there is none."""
        return max(self._records, default=-1)

    def find(self, step: int) -> CommitRecord | None:
        """Return the commit of a step; None if it is not here."""
        record, _ = self._records.get(step, (None, 0))
        return record

    def check(self, step: int) -> bool:
        """Return whether the commit of a step is kept here and has its seal no more.

        From now on it covers nothing. It stays until one that is sealed comes in its place.
        """
        record = self.find(step)
        if record is not None and step not in self._damaged and not is_sealed(record):
            self._damaged.add(step)
            self.num_discarded += 1
        return step in self._damaged

    def check_all(self) -> None:
        """Find all commits that have their seals no more; who is told of them finds them, too."""
        for step in self._records:
            self.check(step)

    def is_judged(self, step: int) -> bool:
        """Return whether what the votes on a step said is here, and was not found damaged."""
        record = self.find(step)
        return record is not None and bool(record.states) and step not in self._damaged

    def knows_votes(self, step: int) -> bool:
        """Return whether what the votes on a step said is here, as it was written."""
        record = self.find(step)
        return record is not None and bool(record.states) and is_sealed(record)

    def put(self, record: CommitRecord) -> None:
        """Keep a commit, in place of one of the same step.

        Of more than ``MAX_RECORDS``, or of more than ``MAX_RECORD_BYTES``, the oldest go, with the
        digests of units in their steps.
        """
        step, size = record.commit.step, record_bytes(record)
        _, before = self._records.get(step, (None, 0))
        self._records[step] = record, size
        self._size_bytes += size - before
        self._damaged.discard(step)
        while len(self._records) > MAX_RECORDS or self._size_bytes > MAX_RECORD_BYTES:
            oldest = min(self._records)
            self._pop(oldest)
            self._drop_digests([place for place in self._digests if place[0] <= oldest])

    def digests_of(self, step: int, position: int) -> UnitDigests | None:
        """Return the digests of a position's units in a step; None if they are not here."""
        return self._digests.get((step, position))

    def list_digests(self, position: int) -> tuple[UnitDigests, ...]:
        """Return the digests of a position's units in all steps of which they are here."""
        return tuple(d for (_, of), d in sorted(self._digests.items()) if of == position)

    def keep_digests(self, told: UnitDigests) -> bool:
        """Keep digests of units, in place of those of the same step and position.

        What takes more than ``MAX_DIGESTS_BYTES`` with them goes, the oldest steps first.

        Returns:
            Whether they are kept: they did not come damaged.
        """
        if not are_sealed(told):
            return False
        self._drop_digests([(told.step, told.position)])
        self._digests[told.step, told.position] = told
        self._digests_bytes += told.size_bytes
        while self._digests_bytes > MAX_DIGESTS_BYTES:
            self._drop_digests([min(self._digests)])
        return True

    def _drop_digests(self, places: Iterable[tuple[int, int]]) -> None:
        for place in places:
            found = self._digests.pop(place, None)
            self._digests_bytes -= found.size_bytes if found is not None else 0

    def drop(self, goes: Callable[[int], bool]) -> None:
        """Drop what is of those steps for which ``goes`` returns whether they go."""
        for step in [step for step in self._records if goes(step)]:
            self._pop(step)
        self._drop_digests([place for place in self._digests if goes(place[0])])

    def _pop(self, step: int) -> None:
        self._size_bytes -= self._records.pop(step)[1]
        self._damaged.discard(step)
