"""Lists what is explored of jobs with snapshots: what holds, and mistakes that are found."""

from __future__ import annotations

from typing import Any

from tests.model.configurations import budget, mutant
from tests.model.values import Cfg

LONE: dict[str, Any] = {"N": 1, "P": 1, "steps": 3, "window": 2, "units": 2, "until_calm": True}
"""One rank, whose trainer dies while its pod lives."""
STAGES: dict[str, Any] = {
    "N": 1, "P": 2, "spares": 1, "steps": 4, "window": 2, "units": 2, "max_plans": 40, "grow": True,
}  # fmt: skip
"""The paper's layout: one cell for each stage, and a spare that takes a lost one's place."""
CELLS = STAGES | {"N": 2, "P": 1}
"""Two cells of one stage, which share the units."""
GRID = STAGES | {"N": 2, "P": 2}

MEMORY_EXHAUSTIVE = [
    Cfg("1x1, a window of 2, a trainer dies twice", bud=budget(trainer=2), **LONE),
    Cfg("1x1, a trainer dies, a copy is damaged", bud=budget(trainer=1, damage=1), **LONE),
    Cfg("1x1, a trainer dies, a store is full", bud=budget(trainer=1, full=1), **LONE),
]
MEMORY_SLOW = [
    Cfg(
        "1x1, a trainer dies twice, a copy is damaged, a store is full",
        bud=budget(trainer=2, damage=1, full=1),
        **LONE,
    ),
    Cfg(
        "1x2, 1 step, a pod is lost with its store",
        bud=budget(crash=1),
        **LONE | {"P": 2, "steps": 1, "window": 1, "units": 1},
    ),
    Cfg(
        "1x2, 2 steps, a pod is lost with its store",
        bud=budget(crash=1),
        **LONE | {"P": 2, "steps": 2, "window": 1, "units": 1},
    ),
    Cfg(
        "2x1, 1 step, a pod is lost, a trainer dies",
        bud=budget(crash=1, trainer=1),
        **LONE | {"N": 2, "steps": 1, "window": 1},
    ),
]
ALL_OF_IT = (2, 1, 1, 1, 0, 0, 0, 2, 1, 1)
MEMORY_RANDOM = [
    Cfg("1x2 + spare, 4 steps, every loss", bud=ALL_OF_IT, **STAGES),
    Cfg("2x1 + spare, 4 steps, every loss", bud=ALL_OF_IT, **CELLS),
    Cfg("2x2 + spare, 4 steps, every loss, checkpoints", bud=ALL_OF_IT, **GRID, ckpt=2),
]
ONE_WINDOW = LONE | {"P": 2, "steps": 3, "window": 1, "units": 1}
MEMORY_MUTANTS = [
    mutant(
        "vote_before_log",
        "a rank votes that its gradient is kept as soon as it is sent",
        "simulate",
        bud=budget(crash=2, trainer=1),
        **STAGES,
    ),
    mutant(
        "copied_once_begun",
        "a state counts as copied before its holders have it",
        "simulate",
        bud=budget(crash=1),
        **ONE_WINDOW,
    ),
    mutant(
        "complete_at_once",
        "a window is complete once its last instalment is due",
        "simulate",
        bud=budget(crash=1),
        **ONE_WINDOW,
    ),
    mutant(
        "older_dropped_early",
        "the window before goes when the next one begins",
        "simulate",
        bud=budget(crash=2),
        **STAGES,
    ),
    mutant(
        "record_after_apply", "a commit is kept once it is applied", bud=budget(trainer=1), **LONE
    ),
    mutant(
        "floor_comes_last",
        "a holder drops given up states before it hears that their window is complete",
        "simulate",
        bud=budget(crash=2),
        **STAGES,
    ),
    mutant(
        "no_compare+no_digest",
        "nobody compares what is read and what comes out",
        bud=budget(trainer=1, damage=1),
        **LONE,
    ),
    mutant(
        "no_compare+no_record_needed",
        "a gradient that is kept counts as one of a committed step",
        bud=budget(trainer=1, sdc=1),
        **LONE,
    ),
    mutant(
        "bad_not_told",
        "a copy that is found damaged is asked for again",
        bud=budget(trainer=1, damage=1),
        **LONE,
    ),
    mutant(
        "stores_before_disk",
        "an older version is made anew though a checkpoint has a newer one",
        "simulate",
        bud=budget(trainer=2, damage=1),
        **STAGES | {"P": 1, "window": 1, "units": 1, "steps": 3, "ckpt": 1},
    ),
]
MEMORY_MUTANTS.append(
    mutant(
        "strict_records",
        "NOT a mistake: who rolls forward cannot stand in for whoever saw the votes",
        "simulate",
        bud=budget(crash=1, glitch=1),
        **ONE_WINDOW,
    )
)
FIRST_WALK = {
    "vote_before_log": 125,
    "copied_once_begun": 220,
    "complete_at_once": 220,
    "floor_comes_last": 105,
    "stores_before_disk": 30,
    "strict_records": 180,
}
"""The walk from which on some mistakes are looked for: those before do not show them."""
