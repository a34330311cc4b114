"""Names the place of a kernel in a trainer's program, as findings and flips do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

from mainstay_core.dmr.flips import Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.faults.points import PHASES
from mainstay_core.planning.routes import Extent


class Phase(enum.StrEnum):
    """The part of a step in which a kernel is executed, as faults name it."""

    __hash__ = str.__hash__  # kernels are looked up by it, and Enum's own takes longer

    FORWARD = "forward"
    BACKWARD = "backward"
    """With the recompute, the weights' gradients, and the sums of types."""
    REDUCE = "reduce"
    """The owner's sums, and what is known of the reduced gradient."""
    VOTE = "vote"
    """What the vote tells beside that."""
    APPLY = "apply"
    """With the cast, and the digest of the masters."""

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Return a phase by its alias in faults, or by an action of it; None: nothing checks it."""
        return next((p for p in cls if name == p.value or name in PHASES[p.value]), None)


@dataclass(frozen=True, slots=True)
class Place:
    """A pass of a block, or the part of a step that belongs to no block."""

    step: int
    phase: Phase
    in_pass: Pass = Pass.STEP
    shard_type: int | None = None
    micro_batch: int | None = None
    block: int | None = None
    """In its stage."""
    name: str | None = None
    """Of the block."""
    visit: int = -1
    """Place on the micro-batch's route, as actions have it."""
    extent: Extent = Extent.WHOLE
    """The part of the stage through which that visit leads."""

    def fits(self, flip: Flip) -> bool:
        """Return whether a flip may mean this place."""
        block = flip.block or 0 if flip.where is Where.STATE else flip.block
        return (
            flip.in_pass is self.in_pass
            and flip.shard_type in (None, self.shard_type)
            and flip.micro_batch in (None, self.micro_batch)
            and block in (None, self.block)
        )
