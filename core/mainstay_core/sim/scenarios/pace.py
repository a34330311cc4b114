"""Draws how long each thing takes in a run."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The durations of a run, in s: (least, most) each."""

    rng: random.Random
    block: tuple[float, float] = (0.005, 0.03)
    copy: tuple[float, float] = (0.05, 0.6)
    startup: tuple[float, float] = (0.2, 0.8)

    def block_s(self) -> float:
        """A forward or backward of one micro-batch."""
        return self.rng.uniform(*self.block)

    def copy_s(self) -> float:
        """A heal, a load, a checkpoint's part."""
        return self.rng.uniform(*self.copy)

    def segment_s(self) -> float:
        """A copy of a unit's state."""
        return self.rng.uniform(0.001, 0.05)

    def startup_s(self) -> float:
        """From fork to hello."""
        return self.rng.uniform(*self.startup)

    def apply_s(self) -> float:
        """An optimizer step."""
        return self.rng.uniform(0.002, 0.02)

    def fork_s(self) -> float:
        """A fork."""
        return self.rng.uniform(0.001, 0.01)

    def reap_s(self) -> float:
        """From a process's end to its parent knowing."""
        return self.rng.uniform(1e-4, 0.005)

    def hiccup_s(self) -> float:
        """A pause between two actions."""
        return self.rng.uniform(1e-5, 0.003)
