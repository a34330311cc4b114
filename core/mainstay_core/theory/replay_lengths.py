"""Computes how long a replay of sparse snapshots is: in steps, and in seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WEIGHT_GRADIENT_SHARE = 1 / 3
"""Share of an active unit's computation that a frozen one skips (MoEvement, section 3.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLength:
    """Steps that a replay computes, over all moments at which a failure may strike."""

    least: float
    mean: float
    most: float


def plan_replay_length(window: int, lag: int, period: int) -> ReplayLength:
    """Return the length of a replay from the newest window that can be loaded.

    W steps make the window dense. Since its end ``lag`` to ``lag + period`` steps have passed, all
    equally likely. With windows one behind the other and no lag this is the paper's ``W`` to ``2
    W``, ``3/2 W`` in the mean (section 3.6).

    Args:
        window: W, at least 1.
        lag: steps from the end of a window to the moment from which it can be loaded.
        period: steps from the beginning of a window to that of the next one, at least 1.
    """
    least = window + lag
    return ReplayLength(least=least, mean=least + period / 2, most=least + period)


def conversion_cost(
    instalments: Sequence[tuple[Sequence[str], Sequence[str]]], compute: Mapping[str, float]
) -> float:
    """Return what the conversion of a window takes, in times of a step.

    In the replay of each instalment the units that it lists as frozen skip their weight gradients
    (MoEvement, section 3.3).

    Args:
        instalments: of a window, each the names of its active and of its frozen units.
        compute: share of a step's computation of each unit; their sum is 1.
    """
    return sum(
        1 - WEIGHT_GRADIENT_SHARE * sum(compute[name] for name in frozen)
        for _, frozen in instalments
    )
