"""Draws the losses of an experiment, and follows a job that restarts through them."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A stage that loses every copy after so many steps."""

    step: int
    stage: int


LOOK_STEPS = 5
"""Steps between two looks at the held-out loss of an undisturbed run. A loss waits for the next
one, so that there is something to compare it with."""
LATER_STEPS = 100
"""Steps after a loss at which its cost is looked at once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The held-out loss that a lost stage costs, in nats; None where nobody has looked."""

    jump: float
    """Over the loss just before."""
    right_after: float | None
    """Over the undisturbed run at that step."""
    later: float | None
    """Over the undisturbed run :data:`LATER_STEPS` steps on."""


def cost_of(
    lost: Mapping[str, Any], held_out: Mapping[int, float], undisturbed: Mapping[int, float]
) -> Cost:
    """Return what one lost stage costs.

    Args:
        lost: step and stage, and the loss ``before`` and ``after`` the stage was made anew.
        held_out: loss of the run, by the number of steps trained.
        undisturbed: the same of the run that loses nothing; empty if there is none.
    """
    at, then = lost["step"], lost["step"] + LATER_STEPS
    has_later = then in held_out and then in undisturbed
    return Cost(
        jump=lost["after"] - lost["before"],
        right_after=lost["after"] - undisturbed[at] if at in undisturbed else None,
        later=held_out[then] - undisturbed[then] if has_later else None,
    )


def columns_of(costs: Sequence[Cost]) -> tuple[list[float], list[float], list[float]]:
    """Return the jumps, what follows right after them, and what does later, as far as known."""
    return (
        [cost.jump for cost in costs],
        [cost.right_after for cost in costs if cost.right_after is not None],
        [cost.later for cost in costs if cost.later is not None],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Losses that are drawn from a seed: each stage has a rate per step, one is lost at a time."""

    rate: float
    seed: int
    first: int
    """No loss comes before this step."""
    with_ends: bool = False
    """Whether the first and the last stage are lost as well."""

    def losses(self, num_stages: int, num_steps: int) -> tuple[Loss, ...]:
        """Return the losses within so many steps; those of fewer steps are the first of these."""
        rng = random.Random(f"losses/{self.seed}")
        stages = range(num_stages) if self.with_ends else range(1, num_stages - 1)
        found: dict[int, Loss] = {}
        for step in range(self.first, num_steps):
            lost = [stage for stage in stages if rng.random() < self.rate]
            seen = -(-step // LOOK_STEPS) * LOOK_STEPS
            if lost and seen < num_steps:
                found.setdefault(seen, Loss(step=seen, stage=rng.choice(lost)))
        return tuple(found.values())


def restarted(losses: Collection[Loss], every: int, num_iterations: int) -> list[int]:
    """Return the version after each iteration of a job that restarts from its newest checkpoint.

    A restart is exact: an iteration that is computed again has the bits of the first time. So the
    job's loss at a version is that of the undisturbed run, and only its way there is longer.

    Args:
        losses: by iteration, in which the job has come less far than without them.
        every: steps between checkpoints; version 0 is always there.
        num_iterations: that are computed.
    """
    at, version, found = {loss.step for loss in losses}, 0, []
    for iteration in range(num_iterations):
        if iteration in at:
            version = version // every * every
        version += 1
        found.append(version)
    return found


def reaches(curve: Mapping[int, float], level: float) -> int | None:
    """Return after how many steps a curve is first at a level or below; None: never."""
    return min((step for step, loss in curve.items() if loss <= level), default=None)
