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
    untold: int = 0
    """Of these, those that are not told, since the last one that was put."""


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
        full = len(self.waiting) >= MAX_WAITING
        untold = min(before.untold + 1, MAX_UNTOLD) if full else 0
        after = replace(before, known=before.known + 1, untold=untold)
        numbers = {**self.numbers, slot: after}
        if full:
            return replace(self, numbers=numbers)
        told = ToldFinding(
            finding=finding,
            incarnation=incarnation,
            number=before.known,
            at_s=at_s,
            untold=before.untold,
        )
        return FindingOutbox(
            held=(*self.held, told)[-MAX_WAITING:], waiting=(*self.waiting, told), numbers=numbers
        )

    def repeat(self) -> FindingOutbox:
        """Return the outbox from which all is told once more: the api has lost what it had."""
        return replace(self, waiting=self.held)

    def take(self) -> tuple[FindingOutbox, tuple[ToldFinding, ...]]:
        """Return the outbox without the next batch, and that batch."""
        return replace(self, waiting=self.waiting[MAX_BATCH:]), self.waiting[:MAX_BATCH]
