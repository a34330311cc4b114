"""Holds the findings of a pod's trainers until the api has heard of them.

A pod tells a bounded number. Of a device that computes wrongly all the time the first ones say what
there is to say: the rest is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mainstay_core.base.ids import Incarnation
from mainstay_core.dmr.findings import Finding
from mainstay_core.wire.findings import MAX_BATCH, MAX_UNTOLD, MAX_WAITING, ToldFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """The findings of one life of a trainer, in numbers."""

    incarnation: Incarnation
    known: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOutbox:
    """The newest findings of a pod, and which of them the api has not heard of yet."""

    held: tuple[ToldFinding, ...] = ()
    waiting: tuple[ToldFinding, ...] = ()
    numbers: Mapping[int, _Numbers] = field(default_factory=dict)
    """By slot."""

    def put(self, finding: Finding, incarnation: Incarnation, at_s: float) -> FindingOutbox:
        """Return the outbox with a further finding, or one that only counts it.

        Args:
            finding: what a trainer has found.
            incarnation: of that trainer.
            at_s: wall clock.
        """
        slot = finding.slot.index
        before = self.numbers.get(slot)
        if before is None or before.incarnation != incarnation:
            before = _Numbers(incarnation=incarnation)
        numbers = {**self.numbers, slot: replace(before, known=before.known + 1)}
        if len(self.waiting) >= MAX_WAITING:
            return replace(self._count(slot, incarnation), numbers=numbers)
        told = ToldFinding(finding=finding, incarnation=incarnation, number=before.known, at_s=at_s)
        return FindingOutbox(
            held=(*self.held, told)[-MAX_WAITING:], waiting=(*self.waiting, told), numbers=numbers
        )

    def _count(self, slot: int, incarnation: Incarnation) -> FindingOutbox:
        """Return the outbox in which a finding that waits says that a further one is not told.

        It says so and not the next one, as the trainer may end before it finds anything more. The
        newest of the same trainer does, else the newest of all.
        """
        of_it = [
            told
            for told in self.waiting
            if (told.finding.slot.index, told.incarnation) == (slot, incarnation)
        ]
        old = (of_it or self.waiting)[-1]
        new = replace(old, untold=min(old.untold + 1, MAX_UNTOLD))
        held, waiting = (
            tuple(new if told is old else told for told in among)
            for among in (self.held, self.waiting)
        )
        return replace(self, held=held, waiting=waiting)

    def repeat(self) -> FindingOutbox:
        """Return the outbox from which all is told once more: the api has lost what it had."""
        return replace(self, waiting=self.held)

    def take(self) -> tuple[FindingOutbox, tuple[ToldFinding, ...]]:
        """Return the outbox without the next batch, and that batch."""
        return replace(self, waiting=self.waiting[MAX_BATCH:]), self.waiting[:MAX_BATCH]
