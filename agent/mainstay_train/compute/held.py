"""Holds the complete types of a step: partials, what is known of them, and which are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mainstay_core.wire.plan import Partial
from mainstay_train.compute.statistics import TypeResult
from mainstay_train.exact.reduction import PartialStore


@dataclass(slots=True)
class HeldTypes:
    """The complete types of a cell. A partial goes as a whole: its sum cannot be taken apart."""

    store: PartialStore
    results: dict[int, TypeResult]
    """Of every complete type."""
    wrong: set[int] = field(default_factory=set)
    """Types of which a check that came late has found that they are wrong."""

    def drop(self, partials: Iterable[Partial]) -> None:
        """Forget some partials and what is known of their types."""
        for partial in partials:
            self.store.drop(partial)
            for shard_type in range(partial.first, partial.last + 1):
                del self.results[shard_type]
                self.wrong.discard(shard_type)

    def drop_cut_off(self) -> None:
        """Forget the partials of which a chain's end has cut something off."""
        self.drop(
            partial
            for partial in self.store.held()
            if any(self.results[t].is_cut_off for t in range(partial.first, partial.last + 1))
        )

    def clear(self) -> None:
        """Forget all."""
        self.store.clear()
        self.results.clear()
        self.wrong.clear()

    def bad(self) -> tuple[int, ...]:
        """Return the complete types that checks have found to be wrong."""
        return tuple(sorted(self.wrong.intersection(self.results)))
