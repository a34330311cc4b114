"""Describes a number that a paper prints beside the one that we compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One printed number and ours.

    Attributes:
        what: what the number is.
        printed: as the paper prints it; None where it prints none.
        ours: as computed here.
        allowed: how far ours may lie from it; None where the difference is only shown.
        is_least: whether the paper prints a bound from below, so that more is no deviation.
        digits: digits behind the point that are shown.
        note: why ours differs, or what stands behind it, for people.
    """

    what: str
    printed: float | None
    ours: float
    allowed: float | None = None
    is_least: bool = False
    digits: int = 3
    note: str = ""

    @property
    def deviation(self) -> float:
        """Return ours minus the printed number; 0 where nothing is printed or a bound is kept."""
        if self.printed is None or (self.is_least and self.ours >= self.printed):
            return 0.0
        return self.ours - self.printed

    @property
    def holds(self) -> bool:
        """Return whether ours lies as near as it must."""
        return self.allowed is None or abs(self.deviation) <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The comparisons of one table or figure.

    Attributes:
        title: what is compared.
        rows: its numbers.
        notes: sentences for people about all of them.
    """

    title: str
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
