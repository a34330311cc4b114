"""Holds an experiment about lost stages: a setting, what is drawn in it, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from support.approximate.curves import Curve, Curves
from support.approximate.losses import Draw
from support.approximate.staged_model import Strategy
from support.approximate.staged_setting import Setting
from support.approximate.strategies import CHECKFREE_PLUS
from support.intervals import Claim

from mainstay_core.base.shape import Order


@dataclass(slots=True, kw_only=True)
class Experiment:
    """A setting, what is drawn in it, and what has come of it so far."""

    curves: Curves
    setting: Setting
    rates: Sequence[float]
    """Losses per stage and step, ascending: the paper's 5, 10 and 16 %."""
    num_seeds: int
    """Of losses, and of models where nothing is lost."""
    rounds: int
    """In which steps are timed."""
    claims: list[Claim] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)

    @property
    def swapped(self) -> Setting:
        """The same with a swapped pipeline."""
        return dataclasses.replace(self.setting, order=Order.SWAPPED)

    @property
    def middle(self) -> float:
        """The middle one of the rates."""
        return self.rates[len(self.rates) // 2]

    def draws(self, rate: float, *, with_ends: bool = True, first: int = 1) -> list[Draw]:
        """Return one draw of losses for each seed that has any."""
        drawn = [
            Draw(rate=rate, seed=seed, first=first, with_ends=with_ends)
            for seed in range(self.num_seeds)
        ]
        return [draw for draw in drawn if draw.losses(self.setting.stages, self.setting.steps)]

    def runs(self, strategy: Strategy, draws: Sequence[Draw]) -> dict[int, Curve]:
        """Return the curves of a strategy, by the seed of their losses."""
        setting = self.swapped if strategy is CHECKFREE_PLUS else self.setting
        found = ((draw.seed, self.curves.get(setting, strategy, draw)) for draw in draws)
        return {seed: curve for seed, curve in found if curve is not None}


def paired(
    one: Mapping[tuple[int, int], float], other: Mapping[tuple[int, int], float]
) -> list[float]:
    """Return the differences of what both have, in the order of the keys (seed, step)."""
    return [one[key] - other[key] for key in sorted(one) if key in other]
