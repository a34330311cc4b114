"""Puts drawn wrong bits on the wire and into states, where cells are played in one process.

What one cell computes alone is tried elsewhere (:mod:`mainstay_train.dmr.flip_trials`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import MAX_BITS, Flip, StatePart, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import CheckRules, Mode
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.compute.engine import Engine
from mainstay_train.dmr.played_cells import (
    FAILURES,
    NUM_CELLS,
    PlayedCells,
    is_computed_with,
    parts_of,
)

WIRE = "wire"
"""The class of flips in what comes from other cells."""
STATE = "state"
"""The class of flips in what apply alone reads."""
COMPUTED_WITH = "state computed with"
"""The class of flips in what gradients are computed with. What they have led to by the time that a
vote finds them cannot be undone, so nothing is promised of it."""
OUTPUTS, ELEMENTS = 3, 1 << 20
"""Bounds of what is drawn; modulo what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of steps with a wrong bit, with checks and without."""

    kind: str
    """The flip's class."""
    flip: Flip
    effective: bool
    found: bool
    equal: bool

    @property
    def is_promised(self) -> bool:
        """Whether all of the class are to be found, with the undisturbed digests."""
        return self.kind != COMPUTED_WITH


class CellTrials:
    """The second steps of a job in several cells; each can be computed again and again.

    Args:
        build: builds the engine of a cell with the checks that it is given.
        num_types: shard types of a step that are computed.
        seed: of the job.
        learning_rate: of each step.
    """

    def __init__(
        self, build: Callable[[Checks], Engine], num_types: int, seed: int, learning_rate: float
    ) -> None:
        self._findings: list[Finding] = []
        engines = [build(Checks(Mode.FULL, tell=self._findings.append)) for _ in range(NUM_CELLS)]
        for engine in engines:
            engine.state.initialize(seed)
        types = [range(cell, num_types, NUM_CELLS) for cell in range(NUM_CELLS)]
        self._cells = PlayedCells(engines, types, learning_rate)
        self._check(Mode.OFF)
        self._cells.reset()
        self._cells.run(0)  # the first one has moments of zero
        self._cells.keep()
        self._expected = self._cells.undisturbed()
        self._cells.reset()
        self._clean = self._cells.run(0).digests
        self._check(Mode.FULL)
        self._cells.reset()
        self.is_clean = self._cells.run(0).digests == self._clean and not self._findings
        """Whether nothing is found in a step that no bit was put into."""

    def close(self) -> None:
        """End what was started."""
        self._cells.close()

    def try_one(self, where: Where, rng: random.Random) -> Tried:
        """Draw a wrong bit on the wire or in a state, and compute what comes of it."""
        return self._try_wire(rng) if where is Where.WIRE else self._try_state(rng)

    def _try_wire(self, rng: random.Random) -> Tried:
        cell = rng.randrange(NUM_CELLS)
        flip = _draw(rng, Where.WIRE)
        self._check(Mode.OFF)
        effective = self._digests_with(cell, flip, votes_count=False) != self._clean
        self._check(Mode.FULL)
        equal = self._digests_with(cell, flip) == self._clean
        found = bool(self._findings)
        return Tried(kind=WIRE, flip=flip, effective=effective, found=found, equal=equal)

    def _digests_with(
        self, cell: int, flip: Flip, *, votes_count: bool = True
    ) -> tuple[str, ...] | None:
        """Take the step with a flip on the wire; return its digests, or None if it ends."""
        self._cells.reset()
        self._findings.clear()
        self._cells.engines[cell].checks.order("drawn", 0, Phase.REDUCE, flip)
        try:
            return self._cells.run(0, votes_count=votes_count).digests
        except FAILURES:
            return None

    def _try_state(self, rng: random.Random) -> Tried:
        cell = rng.randrange(NUM_CELLS)
        block, part = rng.choice(parts_of(self._cells.engines[cell]))
        flip = _draw(rng, Where.STATE, block, part)
        is_late = is_computed_with(self._cells.engines[cell], block, part)
        self._check(Mode.OFF)
        effective = self._cells.changes(cell, flip, self._expected)
        self._check(Mode.FULL)
        came = self._cells.follow(cell, flip, self._expected)
        about = {"effective": effective, "found": came.found, "equal": came.equal}
        return Tried(kind=COMPUTED_WITH if is_late else STATE, flip=flip, **about)

    def _check(self, mode: Mode) -> None:
        """Have all cells check, or not, from the next step on."""
        for engine in self._cells.engines:
            engine.follow(CheckRules(mode=mode))


def _draw(
    rng: random.Random, where: Where, block: int | None = None, part: StatePart | None = None
) -> Flip:
    return Flip(
        in_pass=Pass.STEP,
        block=block,
        output=rng.randrange(OUTPUTS),
        element=rng.randrange(ELEMENTS),
        bit=rng.randrange(MAX_BITS // 2),
        where=where,
        part=part,
    )
