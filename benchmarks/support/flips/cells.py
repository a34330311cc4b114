"""Several cells of a stage, whose steps are computed again and again in one process."""

from __future__ import annotations

from benchmarks.support.flips.chains import StepFailedError
from benchmarks.support.flips.rank import (
    RATE,
    Outcome,
    RankTrials,
    Setting,
    Spot,
    Variant,
    variants_of,
)

from mainstay_core.dmr.flips import Flip, StatePart, Where
from mainstay_train.checks.places import Phase, Place
from mainstay_train.dmr.cell_trials import Tried
from mainstay_train.dmr.played_cells import PlayedCells, StepEnd, is_computed_with, parts_of

TYPES = ((0, 1), (2, 5), (4,))
"""Of each cell. A partial is a sum, one cell sends two, and what a lane adds up is in two cells."""


class CellsChain:
    """Cells of one stage with one rank each; what they compute, they compute in turn.

    Args:
        setting: of the cells.
    """

    def __init__(self, setting: Setting) -> None:
        self._ranks = {
            variant: [RankTrials(setting, cell, variant) for cell in range(setting.cells)]
            for variant in (Variant.OFF, *variants_of(setting))
        }
        self._played = {
            variant: PlayedCells([rank.engine for rank in ranks], TYPES, RATE)
            for variant, ranks in self._ranks.items()
        }
        plain = self._played[Variant.OFF]
        plain.run(0)  # the first step has moments of zero
        for played in self._played.values():
            played.keep(plain)
        self._expected = plain.undisturbed()
        self._ended: StepEnd | None = None

    def reset(self, variant: Variant) -> None:
        for rank in self._ranks[variant]:
            rank.reset()
        self._played[variant].reset()  # behind it: theirs is another state

    def order(self, variant: Variant, flip: Flip, spot: Spot) -> None:
        self._ranks[variant][spot.rank].order(flip, spot.place.phase)

    def compute(self, variant: Variant, step: int) -> bool:
        try:
            votes_count = variant is not Variant.OFF
            self._ended = self._played[variant].run(step, votes_count=votes_count)
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        return False

    def drop(self, variant: Variant) -> None:
        """Nothing is held between two steps."""

    def finish(self, variant: Variant, step: int) -> list[Outcome]:
        del step
        assert self._ended is not None
        found = [finding for rank in self._ranks[variant] for finding in rank.findings]
        return [(self._ended.digests, (*found, *self._ended.refusals))]

    def list_spots(self, variant: Variant) -> list[Spot]:
        self.reset(variant)
        for rank in self._ranks[variant]:
            rank.listen()
        self.compute(variant, 0)
        spots = [spot for rank in self._ranks[variant] for spot in rank.heard()]
        return spots + [
            _spot_of(cell, rank, block, part)
            for cell, rank in enumerate(self._ranks[variant])
            for block, part in parts_of(rank.engine)
        ]

    def try_state(self, variant: Variant, spot: Spot, flip: Flip) -> Tried:
        """Put a wrong bit into the state of a cell, and take steps until its end is known."""
        effective = self._played[Variant.OFF].changes(spot.rank, flip, self._expected)
        came = self._played[variant].follow(spot.rank, flip, self._expected)
        return Tried(
            kind=spot.kind, flip=flip, effective=effective, found=came.found, equal=came.equal
        )

    def close(self) -> None:
        """End the threads."""
        for played in self._played.values():
            played.close()


def _spot_of(cell: int, rank: RankTrials, block: int, part: StatePart) -> Spot:
    """Return the place of a part of a cell's state."""
    place = Place(0, Phase.FORWARD, block=block)
    return Spot(
        cell, place, None, part.value, Where.STATE, part, is_computed_with(rank.engine, block, part)
    )
