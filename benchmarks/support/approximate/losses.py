"""Draws the losses of an experiment, and follows a job that restarts through them."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A stage that loses every copy after so many steps."""

    step: int
    stage: int


LOOK_STEPS = 5
"""Steps between two looks at the held-out loss of an undisturbed run. A loss waits for the next
one, so that there is something to compare it with."""


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
