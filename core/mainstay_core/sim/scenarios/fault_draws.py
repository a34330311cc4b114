"""Draws faults of a simulated run: alone, or as a loss with what strikes while it is mended."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.sim.scenarios.points import (
    API_POINTS,
    COMMIT_POINTS,
    FORK_POINTS,
    POINTS,
    READ_POINTS,
    REPLAY_POINTS,
    WRITE_POINTS,
)
from mainstay_core.sim.scenarios.scenario import (
    IN_MEMORY,
    Fault,
)

HARMLESS = ("reset", "slow", "corrupt-gradient", "cut-api", "kill-api", "damage-checkpoint")
"""Nobody dies of these, nor is left out for long."""
LOSSES = (
    "kill-stage",
    "kill-stage",
    "kill-all",
    "kill-all-but-one",
    "kill-replica",
    "kill-trainer",
    "kill-pod",
    "kill-supervisor",
    "node-loss",
    "cut-pod",
    "stop-pod",
    "reset",
    "corrupt-gradient",
)
"""Faults that take states from a job with snapshots, or hold up their copies."""


def draw_forks(rng: random.Random, num_ranks: int, forking: Sequence[str]) -> list[Fault]:
    """Return the loss of a stage, and now and then what strikes while it is made anew.

    Args:
        rng: draws it.
        num_ranks: of the job; each step passes a point so often.
        forking: kinds of losses.
    """
    draws: list[tuple[str, tuple[str, ...], int]] = [
        (
            rng.choice(forking),
            rng.choice((COMMIT_POINTS, POINTS)),
            rng.randint(1, 4 * num_ranks),
        )
    ]
    if rng.random() < 0.5:
        more = (*forking, "kill-trainer", "kill-trainer", "kill-meeting", "reset", "kill-stage")
        draws += [
            (rng.choice(more), FORK_POINTS, rng.choice((1, 1, 2, 3, rng.randint(1, 12))))
            for _ in range(rng.choice((1, 1, 2)))
        ]
    return [
        replace(draw_fault(rng, kind), at_s=None, point=rng.choice(points), times=times)
        for kind, points, times in draws
    ]


def draw_cascade(rng: random.Random, num_ranks: int) -> list[Fault]:
    """Return the loss of a stage, and what strikes while it is computed again.

    Args:
        rng: draws it.
        num_ranks: of the job; each step passes a point so often.
    """
    # As a rule some window is complete by then.
    draws: list[tuple[str, tuple[str, ...], int]] = [
        ("kill-stage", WRITE_POINTS, rng.randint(2 * num_ranks, 8 * num_ranks))
    ]
    draws += [
        (
            rng.choice(("kill-stage", *LOSSES, *IN_MEMORY)),
            REPLAY_POINTS,
            rng.choice((1, 1, 2, 3, rng.randint(1, 12))),
        )
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return [
        replace(draw_fault(rng, kind), at_s=None, point=rng.choice(points), times=times)
        for kind, points, times in draws
    ]


def draw_losses(
    rng: random.Random, num_ranks: int, of_memory: Sequence[str], losses: Sequence[str]
) -> list[Fault]:
    """Return a loss of states with what becomes of their copies before it, and meanwhile.

    Args:
        rng: draws it.
        num_ranks: of the job; each step passes a point so often.
        of_memory: kinds of faults of what pods keep.
        losses: kinds that take states; none for damaged copies alone.
    """
    draws: list[tuple[str, tuple[str, ...], int]] = []
    if rng.random() < 0.5:
        draws.append((rng.choice(of_memory), WRITE_POINTS, 2 * num_ranks))
    if losses:
        draws.append((rng.choice(losses), WRITE_POINTS, 3 * num_ranks))
    if losses and rng.random() < 0.4:
        draws.append((rng.choice((*losses, *of_memory)), READ_POINTS, 3))
    return [
        replace(draw_fault(rng, kind), at_s=None, point=rng.choice(points), times=times)
        for kind, points, most in draws
        for times in [rng.randint(1, most)]
    ]


def draw_faults(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    if not kinds:
        return ()
    some = rng.sample(kinds, min(len(kinds), rng.randint(1, 4)))
    if "corrupt-state" in some:
        # Whoever dies with a bad state before its vote has poisoned its chain's gradients, and
        # nobody can know: that takes the checks of single operations.
        some = ["corrupt-state", *(k for k in some if k in HARMLESS)]
    return tuple(draw_fault(rng, rng.choice(some)) for _ in range(rng.randint(1, 7)))


def draw_fault(rng: random.Random, kind: str) -> Fault:
    lasts_s = rng.choice((0.05, 0.5, 1.0, 2.0, 4.0, 12.0)) * (0.5 + rng.random())
    if kind == "kill-api" and rng.random() < 0.6:
        point, times = rng.choice(API_POINTS), rng.randint(1, 3)
        return Fault(kind=kind, point=point, times=times, lasts_s=lasts_s)
    if rng.random() < 0.25:
        return Fault(kind=kind, at_s=rng.random() * rng.choice((0.1, 2.0, 5.0)), lasts_s=lasts_s)
    times = rng.choice((1, 1, 1, 2, 3, rng.randint(1, 12)))
    # The narrowest moments decide what is committed.
    point = rng.choice(rng.choice((POINTS, COMMIT_POINTS)))
    return Fault(kind=kind, point=point, times=times, lasts_s=lasts_s)
