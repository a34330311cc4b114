"""Describes the bytes of memory that a view of a tensor covers, so that parts can be told apart.

A kernel may write a tensor in parts, as the halves of a gradient's columns, and a flat buffer holds
many parameters. Whoever reads one part must not count as a reader of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class Region:
    """Runs of bytes at equal distances: ``start + i * period + [0, run)`` for i below ``count``.

    A view of another form is described by all bytes from its first to its last: it may then seem to
    overlap what it does not touch, never the other way round.
    """

    start: int
    run: int
    period: int = 0
    """0 where there is one run."""
    count: int = 1

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self | None:
        """Return the bytes of its storage that a tensor covers; None if it has no elements."""
        if tensor.numel() == 0:
            return None
        width = tensor.element_size()
        start = int(tensor.storage_offset()) * width
        dims = sorted(
            (stride * width, size)
            for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
            if size > 1 and stride > 0  # a stride of 0 covers nothing more
        )
        run, period, number = width, 0, 1
        end = start + width + sum(int(stride * (size - 1)) for stride, size in dims)
        for stride, size in dims:
            if number == 1 and stride == run:
                run *= size
            elif number == 1 and stride > run:
                period, number = stride, size
            elif number > 1 and stride == period * number:
                number *= size
            else:
                return cls(start, end - start)
        return cls(start, run, period, number)

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.start + self.period * (self.count - 1) + self.run

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.run * self.count

    def overlaps(self, other: Region) -> bool:
        """Return whether the two share a byte; sometimes True where they do not."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.count == 1 or other.count == 1 or self.period != other.period:
            return True
        # Both repeat with the same period: compare them within one.
        distance = (other.start - self.start) % self.period
        return distance < self.run or distance + other.run > self.period

    def contains(self, other: Region) -> bool:
        """Return whether all bytes of another lie in this one; sometimes False where they do."""
        if self == other:
            return True
        return self.count == 1 and self.start <= other.start and other.end <= self.end

    def hull(self, other: Region) -> Region:
        """Return all bytes from the first to the last of both."""
        start = min(self.start, other.start)
        return Region(start, max(self.end, other.end) - start)
